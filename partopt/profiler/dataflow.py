"""Which tensors pass from layer to layer, seen in one real forward.

A dispatch mode sees every operation and tags the storage of each result with the layer that made
it. A view keeps the tag of its base, a write in place renews it, and tags die with their storages,
so that a recycled address is never taken for an old tensor. Parameters and buffers belong to a
module, the model's own inputs to nobody: each stage reads them from the data loader. So does code
between units that works on nothing but such inputs (an attention mask made from the ids): each
stage can do it for itself.
"""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    is_traceable_wrapper_subclass_type,
)

from partopt.documents import profile
from partopt.profiler.flops import count_flops
from partopt.profiler.tensors import local_tensors, tensors_in
from partopt.profiler.tracker import Tracker


@dataclass
class Flow:
    """A storage that one layer wrote, the layers that read it, and the parts that they read."""

    producer: int
    storage_bytes: int
    consumers: set[int] = field(default_factory=set)
    parts: dict[tuple[int, int], int] = field(default_factory=dict)  # (offset, elements) -> bytes
    gradient: bool = False  # something of it that is read has one

    def read(self, layer: int, tensor: Tensor) -> None:
        """Note that `layer` reads `tensor`, which lies in this storage."""
        self.consumers.add(layer)
        self.gradient = self.gradient or tensor.requires_grad
        self.parts[int(tensor.storage_offset()), tensor.numel()] = (
            tensor.numel() * tensor.element_size()
        )

    @property
    def carried_bytes(self) -> int:
        """Bytes to carry: the parts that are read, at most the whole storage."""
        return min(sum(self.parts.values()), self.storage_bytes)


class StorageMap:
    """Values keyed by storage, forgotten when the storage is freed; `freed` is then told them."""

    def __init__(self, freed: Callable[[Any], None] = lambda _value: None) -> None:
        self._values: dict[int, tuple[weakref.ref[Any], Any]] = {}
        self._freed = freed

    def get(self, tensor: Tensor) -> Any:
        """The value of the storage of `tensor`, or None."""
        entry = self._values.get(tensor.untyped_storage()._cdata)
        return entry[1] if entry else None

    def values(self) -> list[Any]:
        """The values of the storages that live."""
        return [value for _, value in self._values.values()]

    def set(self, tensor: Tensor, value: Any) -> None:
        """Give the storage of `tensor` a value."""
        storage = tensor.untyped_storage()
        key = storage._cdata

        def forget(dead: weakref.ref[Any]) -> None:
            if key in self._values and self._values[key][0] is dead:
                self._freed(self._values.pop(key)[1])

        self._values[key] = (weakref.ref(storage, forget), value)


class DataflowMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Watches one forward.

    Afterwards `flows` holds what passed between layers, `users` which layers used each parameter,
    and `flops` the operations of each layer.
    """

    def __init__(self, model: nn.Module, tracker: Tracker) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tracker = tracker
        self.flows: list[Flow] = []
        self.flops: Counter[int] = Counter()
        self.users: defaultdict[str, set[int]] = defaultdict(set)
        self._tags = StorageMap()
        self._constants = StorageMap()
        for name, tensor in [*model.named_buffers(), *model.named_parameters()]:
            for part in local_tensors(tensor):
                self._constants.set(part, name)
        self._parameters = {name for name, _ in model.named_parameters()}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the operation, and note what it read and wrote."""
        if wraps_tensors(types):
            self._note_gradients([args, kwargs])
            return NotImplemented
        options = kwargs or {}
        result = func(*args, **options)
        if func.namespace == "prim":  # a question to a fake tensor: where does it lie?
            return result
        layer = self.tracker.current
        self.flops[layer] += count_flops(func, args, options, result)
        read = [self._note_read(tensor, layer) for tensor in storages_in([args, options])]
        written = written_arguments(func, args)
        if self.tracker.inside_unit or any(read):
            made = [*storages_in(written), *_made(result, [args, options])]
            self._note_written(made, tensors_in(written), layer)
        return result

    def _note_gradients(self, arguments: Any) -> None:
        """Note what has a gradient of tensors that wrap others, whose parts do not say so."""
        for tensor in tensors_in(arguments):
            for part in local_tensors(tensor) if tensor.requires_grad else ():
                flow = self._tags.get(part)
                if flow is not None:
                    flow.gradient = True

    def _note_read(self, tensor: Tensor, layer: int) -> bool:
        """Note one input, and return whether it ties the operation to a layer.

        Results of layers and parameters do.
        """
        constant = self._constants.get(tensor)
        if constant is not None:
            if constant in self._parameters:
                self.users[constant].add(layer)
            return constant in self._parameters
        flow = self._tags.get(tensor)
        if flow is not None and flow.producer != layer:
            flow.read(layer, tensor)
        return flow is not None

    def _note_written(self, results: list[Tensor], in_place: list[Tensor], layer: int) -> None:
        """Tag new results, and those written in place by a layer that did not make them."""
        for tensor in results:
            if self._constants.get(tensor) is not None:
                continue
            flow = self._tags.get(tensor)
            renewed = (
                flow is not None
                and flow.producer != layer
                and any(tensor is written for written in in_place)
            )
            if flow is None or renewed:
                flow = Flow(layer, tensor.untyped_storage().nbytes())
                self.flows.append(flow)
                self._tags.set(tensor, flow)

    def tensors(self) -> list[profile.Tensor]:
        """What crosses between layers, summed over tensors of the same producer and consumers.

        Those with a gradient are summed apart from those without.
        """
        merged: defaultdict[tuple[int, tuple[int, ...], bool], int] = defaultdict(int)
        for flow in self.flows:
            if flow.consumers:
                read = tuple(sorted(flow.consumers))
                merged[flow.producer, read, flow.gradient] += flow.carried_bytes
        return [
            profile.Tensor(producer=made, consumers=list(read), bytes=size, gradient=gradient)
            for (made, read, gradient), size in sorted(merged.items())
        ]


def wraps_tensors(types: Any) -> bool:
    """Whether an operation is on tensors that wrap others, such as DTensors.

    A mode that returns NotImplemented for it is asked again for each of the operations on what they
    wrap, which are those that this rank does.
    """
    return any(is_traceable_wrapper_subclass_type(each) for each in types)


def storages_in(value: Any) -> Iterator[Tensor]:
    """The tensors in `value` with memory of their own or of another; of a sparse one, its parts."""
    for tensor in local_tensors(value):
        if tensor.layout is torch.sparse_coo:
            yield from (part for part in (tensor._indices(), tensor._values()) if _has_bytes(part))
        elif tensor.layout is torch.strided and _has_bytes(tensor):
            yield tensor


def _made(result: Any, arguments: Any) -> list[Tensor]:
    """What an operation returns that is no view of its arguments.

    A view of what no layer made, such as the model's inputs, is nobody's either.
    """
    read = {tensor.untyped_storage()._cdata for tensor in storages_in(arguments)}
    return [each for each in storages_in(result) if each.untyped_storage()._cdata not in read]


def _has_bytes(tensor: Tensor) -> bool:
    return tensor.untyped_storage().nbytes() > 0


def written_arguments(func: Any, args: Sequence[Any]) -> list[Any]:
    """Those of `args` that an operation writes to."""
    return [
        value
        for value, argument in zip(args, func._schema.arguments, strict=False)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


def output_recorder(outputs: dict[int, int]) -> Callable[[int, Any], None]:
    """A callback that records the bytes of each layer's output tensors in `outputs`."""

    def left(layer: int, output: Any) -> None:
        outputs[layer] = sum(
            tensor.numel() * tensor.element_size() for tensor in local_tensors(output)
        )

    return left
