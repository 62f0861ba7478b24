"""What is in memory only while a layer runs, seen in one real training step.

A dispatch mode notes every storage that an operation makes, with the layer that ran, and the moment
at which it is freed. What lives when the forward ends is kept for the backward; all else is
transient: partial results, the gradients of activations and of weights until they are added to the
parameters', and what a checkpoint computes again. Temporaries inside one kernel are not seen on the
CPU; on CUDA the allocator's peak during each operation shows them.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from partopt.profiler.dataflow import StorageMap, storages_in, wraps_tensors
from partopt.profiler.tensors import local_tensors


class Event(NamedTuple):
    """A block that a layer makes (`size_bytes` above 0) or that is freed (below 0)."""

    layer: int
    backward: bool
    block: int
    size_bytes: int


@contextlib.contextmanager
def new_garbage_only() -> Iterator[None]:
    """In this context `gc.collect` looks only at what was made in it, and is quick."""
    if gc.get_freeze_count():  # somebody keeps what was there before out of it already
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class MemoryMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows the storages that are made while it is active; `layer` is the one that runs.

    `recomputed` are the layers that build a graph in the backward: they compute activations again.
    What `model` and `inputs` hold, and what an operation reads that it did not see made, was there
    before and does not count.
    """

    def __init__(self, model: nn.Module, inputs: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.layer, self.backward = 0, False
        self.events: list[Event] = []
        self.recomputed: set[int] = set()
        self.made: dict[int, tuple[int, int]] = {}  # live block -> (layer that made it, bytes)
        self._blocks = StorageMap(self._free)
        gradients = [each.grad for each in model.parameters() if each.grad is not None]
        self._note_held([*model.parameters(), *model.buffers(), *gradients, inputs])

    def enter(self, layer: int) -> None:
        """Charge what follows to `layer`."""
        self.layer = layer

    def enter_backward(self, layer: int) -> None:
        """Charge what follows to the backward of `layer`."""
        self.layer, self.backward = layer, True

    def block_of(self, tensor: Tensor) -> int | None:
        """The number of the block in which `tensor` lies; None for one that was there before."""
        block = self._blocks.get(local_tensors(tensor)[0])
        return block if block in self.made else None

    @contextlib.contextmanager
    def settled_gradients(self, model: nn.Module) -> Iterator[None]:
        """In this context a gradient is no longer transient once it is its parameter's."""
        handles = [
            parameter.register_post_accumulate_grad_hook(self._settle)  # type: ignore[no-untyped-call]
            for parameter in model.parameters()
            if parameter.requires_grad
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the operation, and note the storages that it makes."""
        if wraps_tensors(types):
            return NotImplemented
        options = kwargs or {}
        if func.namespace == "prim":  # a question to a fake tensor: where does it lie?
            return func(*args, **options)
        self._note_held([args, options])
        # the gradient of the loss itself is made as a graph is, too
        if self.backward and torch.is_grad_enabled() and func is not _FIRST:
            self.recomputed.add(self.layer)
        allocator = _Allocator(storages_in([args, options]))
        result = func(*args, **options)
        for tensor in storages_in(result):
            if self._blocks.get(tensor) is None:
                self._note_made(tensor)
        self._note_passing(allocator.passing_bytes())
        return result

    def _note_held(self, value: Any) -> None:
        for tensor in storages_in(value):
            if self._blocks.get(tensor) is None:
                self._blocks.set(tensor, _HELD)

    def _note_made(self, tensor: Tensor) -> None:
        block, size_bytes = len(self.events), tensor.untyped_storage().nbytes()
        self._blocks.set(tensor, block)
        self.made[block] = (self.layer, size_bytes)
        self.events.append(Event(self.layer, self.backward, block, size_bytes))

    def _note_passing(self, size_bytes: int) -> None:
        if size_bytes:
            block = len(self.events)
            self.events.append(Event(self.layer, self.backward, block, size_bytes))
            self.events.append(Event(self.layer, self.backward, block, -size_bytes))

    def _free(self, block: int) -> None:
        if block in self.made:
            self.events.append(Event(self.layer, self.backward, block, -self.made.pop(block)[1]))

    def _settle(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            for tensor in storages_in(parameter.grad):
                self._free(self._blocks.get(tensor))


_FIRST = torch.ops.aten.ones_like.default
_HELD = -1  # the block of what was there before


def transient_bytes(events: Sequence[Event], kept: Mapping[int, int]) -> dict[int, int]:
    """For each layer, the peak while it runs beside what is kept for it and those before it.

    `kept` holds the blocks that are kept for the backward, and the first layer that each is kept
    for. What is kept is known at a layer's end in the forward, at its beginning in the backward;
    the larger peak of both counts. In bytes.
    """
    peaks: defaultdict[int, int] = defaultdict(int)
    live, stash = 0, Counter[int]()
    for (layer, backward), visit in itertools.groupby(events, lambda event: event[:2]):
        peak, before = live, _kept_until(layer, stash)
        for event in visit:
            live += event.size_bytes
            peak = max(peak, live)
            if event.block in kept:
                stash[kept[event.block]] += event.size_bytes
        held = before if backward else _kept_until(layer, stash)
        peaks[layer] = max(peaks[layer], peak - held)
    return dict(peaks)


def _kept_until(last: int, stash: Mapping[int, int]) -> int:
    return sum(size_bytes for layer, size_bytes in stash.items() if layer <= last)


class _Allocator:
    """What one operation takes of CUDA's allocator for itself, beside its results."""

    def __init__(self, tensors: Iterator[Tensor]) -> None:
        devices = (tensor.device for tensor in tensors if tensor.is_cuda)
        self.device = next(devices, None)
        if self.device is not None:
            torch.cuda.reset_peak_memory_stats(self.device)

    def passing_bytes(self) -> int:
        """Bytes that were allocated at the operation's peak and are no longer."""
        if self.device is None:
            return 0
        peak = torch.cuda.max_memory_allocated(self.device)
        return int(peak - torch.cuda.memory_allocated(self.device))
