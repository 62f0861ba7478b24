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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from partopt.documents import profile
from partopt.profiler.flops import count_flops
from partopt.profiler.step import tensors_in
from partopt.profiler.tracker import Tracker


@dataclass
class Flow:
    """A storage that one layer wrote, the layers that read it, and the parts that they read."""

    producer: int
    storage_bytes: int
    consumers: set[int] = field(default_factory=set)
    parts: dict[tuple[int, int], int] = field(default_factory=dict)  # (offset, elements) -> bytes

    def read(self, layer: int, tensor: Tensor) -> None:
        """Note that `layer` reads `tensor`, which lies in this storage."""
        self.consumers.add(layer)
        self.parts[int(tensor.storage_offset()), tensor.numel()] = (
            tensor.numel() * tensor.element_size()
        )

    @property
    def carried_bytes(self) -> int:
        """Bytes to carry: the parts that are read, at most the whole storage."""
        return min(sum(self.parts.values()), self.storage_bytes)


class StorageMap:
    """Values keyed by storage, forgotten when the storage is freed."""

    def __init__(self) -> None:
        self._values: dict[int, tuple[weakref.ref[Any], Any]] = {}

    def get(self, tensor: Tensor) -> Any:
        """The value of the storage of `tensor`, or None."""
        entry = self._values.get(tensor.untyped_storage()._cdata)
        return entry[1] if entry else None

    def set(self, tensor: Tensor, value: Any) -> None:
        """Give the storage of `tensor` a value."""
        storage = tensor.untyped_storage()
        key = storage._cdata

        def forget(dead: weakref.ref[Any]) -> None:
            if key in self._values and self._values[key][0] is dead:
                del self._values[key]

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
            self._constants.set(tensor, name)
        self._parameters = {name for name, _ in model.named_parameters()}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the operation, and note what it read and wrote."""
        options = kwargs or {}
        result = func(*args, **options)
        layer = self.tracker.current
        self.flops[layer] += count_flops(func, args, options, result)
        read = [self._note_read(tensor, layer) for tensor in _storages([args, options])]
        written = [args[position] for position in _written(func) if position < len(args)]
        if self.tracker.inside_unit or any(read):
            self._note_written(
                [*tensors_in(written), *_storages(result)], tensors_in(written), layer
            )
        return result

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
            if not _has_storage(tensor) or self._constants.get(tensor) is not None:
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
        """What crosses between layers, summed over tensors of the same producer and consumers."""
        merged: defaultdict[tuple[int, tuple[int, ...]], int] = defaultdict(int)
        for flow in self.flows:
            if flow.consumers:
                merged[flow.producer, tuple(sorted(flow.consumers))] += flow.carried_bytes
        return [
            profile.Tensor(producer=made, consumers=list(read), bytes=size)
            for (made, read), size in sorted(merged.items())
        ]


def _storages(value: Any) -> Iterator[Tensor]:
    return (tensor for tensor in tensors_in(value) if _has_storage(tensor))


def _has_storage(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.untyped_storage().nbytes() > 0


def _written(func: Any) -> list[int]:
    """Positions of the arguments that an operation writes to."""
    return [
        position
        for position, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


def output_recorder(outputs: dict[int, int]) -> Callable[[int, Any], None]:
    """A callback that records the bytes of each layer's output tensors in `outputs`."""

    def left(layer: int, output: Any) -> None:
        outputs[layer] = sum(
            tensor.numel() * tensor.element_size() for tensor in tensors_in(output)
        )

    return left
