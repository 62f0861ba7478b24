"""What autograd keeps from forward to backward, seen in one real forward.

Neighbouring layers keep the same storage (a convolution's result is the ReLU's input), so each
storage is counted once, with every layer that keeps it. Parameters and buffers are kept anyway and
do not count.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from partopt.documents import profile
from partopt.profiler.tracker import Tracker


class StashRecorder:
    """Records which storages each layer keeps.

    Use `hooks()` around one forward whose graph stays alive meanwhile.
    """

    def __init__(self, model: nn.Module, tracker: Tracker) -> None:
        self.tracker = tracker
        self._own = {_key(tensor) for tensor in [*model.parameters(), *model.buffers()]}
        # the storage itself is held, so that its key is not given to another
        self._kept: dict[int, tuple[Any, set[int]]] = {}

    def hooks(self) -> saved_tensors_hooks:
        """The context in which a forward is recorded."""
        pack: Callable[[Tensor], Any] = self._pack
        return saved_tensors_hooks(pack, lambda kept: kept)

    def _pack(self, tensor: Tensor) -> Tensor:
        if tensor.layout is torch.strided and _key(tensor) not in self._own:
            storage = tensor.untyped_storage()
            self._kept.setdefault(_key(tensor), (storage, set()))[1].add(self.tracker.current)
        return tensor

    def groups(self) -> list[profile.StashGroup]:
        """Bytes kept, by the set of layers that keep them."""
        merged: defaultdict[tuple[int, ...], int] = defaultdict(int)
        for storage, layers in self._kept.values():
            merged[tuple(sorted(layers))] += storage.nbytes()
        return [
            profile.StashGroup(layers=list(layers), bytes=size)
            for layers, size in sorted(merged.items())
            if size
        ]


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
