"""What is kept from forward to backward, seen in one real forward.

Neighbouring layers keep the same storage (a convolution's result is the ReLU's input), so each
storage is counted once, with every layer that autograd keeps it for. What a layer made and still
lives when the forward has ended, although autograd does not know of it, is that layer's: a custom
Function keeps it as `ctx.x`, or the model as an attribute. Parameters and buffers are kept anyway
and do not count.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from partopt.documents import profile
from partopt.profiler.dataflow import StorageMap
from partopt.profiler.tensors import local_tensors
from partopt.profiler.tracker import Tracker
from partopt.profiler.transient import MemoryMode


class Kept(NamedTuple):
    """A storage that is kept, for which layers, and its block if this step made it."""

    layers: set[int]
    size_bytes: int
    block: int | None


class StashRecorder:
    """Records which storages each layer keeps.

    Use `hooks()` around one forward under `memory` whose graph stays alive meanwhile.
    """

    def __init__(self, model: nn.Module, tracker: Tracker, memory: MemoryMode) -> None:
        self.tracker, self.memory = tracker, memory
        self._own = StorageMap()
        for tensor in local_tensors([*model.parameters(), *model.buffers()]):
            self._own.set(tensor, True)
        self._saved = StorageMap()

    def hooks(self) -> saved_tensors_hooks:
        """The context in which a forward is recorded."""
        pack: Callable[[Tensor], Tensor] = self._pack
        return saved_tensors_hooks(pack, lambda kept: kept)

    def _pack(self, tensor: Tensor) -> Tensor:
        for part in local_tensors(tensor):
            if part.layout is torch.strided and self._own.get(part) is None:
                self._note_saved(part)
        return tensor

    def _note_saved(self, tensor: Tensor) -> None:
        saved = self._saved.get(tensor)
        if saved is None:
            size_bytes = tensor.untyped_storage().nbytes()
            saved = Kept(set(), size_bytes, self.memory.block_of(tensor))
            self._saved.set(tensor, saved)
        saved.layers.add(self.tracker.current)

    def kept(self, loss: Tensor) -> list[Kept]:
        """The storages that are still kept now that the forward has ended, apart from the loss."""
        found: list[Kept] = self._saved.values()
        known = {self.memory.block_of(loss), *(each.block for each in found)}
        return found + [
            Kept({layer}, size_bytes, block)
            for block, (layer, size_bytes) in self.memory.made.items()
            if block not in known
        ]


class PartingGradients:
    """What the first part of a split backward keeps for the second: gradients, by layer.

    `size_bytes` counts each storage once that `memory` saw made.
    """

    def __init__(self, memory: MemoryMode) -> None:
        self.size_bytes: defaultdict[int, int] = defaultdict(int)
        self._memory = memory
        self._noted: set[int] = set()

    def note(self, layer: int, gradient: Tensor) -> None:
        """Count a gradient that arrives where a layer's weights part from its input."""
        for part in local_tensors(gradient):
            block = self._memory.block_of(part)
            if block is not None and block not in self._noted:
                self._noted.add(block)
                self.size_bytes[layer] += part.untyped_storage().nbytes()


def stash_groups(kept: Iterable[Kept]) -> list[profile.StashGroup]:
    """Bytes kept, by the set of layers that keep them."""
    merged: defaultdict[tuple[int, ...], int] = defaultdict(int)
    for each in kept:
        merged[tuple(sorted(each.layers))] += each.size_bytes
    return [
        profile.StashGroup(layers=list(layers), bytes=size)
        for layers, size in sorted(merged.items())
        if size
    ]
