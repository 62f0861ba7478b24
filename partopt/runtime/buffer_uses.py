"""Which layers use the buffers of a model, where a graph names each of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

from torch import Tensor, fx

from partopt.runtime.events import EVERYWHERE, storage_of

_CHANGED = 'the buffer "{name}", which {{}} changes'


class BufferUses:
    """The layers that read and write buffers; every stage has buffers of its own."""

    def __init__(self, buffers: Mapping[str, Tensor], layers: int) -> None:
        self._names = {storage_of(each): name for name, each in buffers.items()}
        self._last = layers - 1
        self._users: defaultdict[str, set[int]] = defaultdict(set)
        self._writers: defaultdict[str, set[int]] = defaultdict(set)

    @property
    def changed(self) -> frozenset[str]:
        """The buffers that are written to."""
        return frozenset(self._writers)

    def is_changed(self, value: object) -> bool:
        """Whether a value is a tensor in a buffer that a layer has written to by now."""
        name = self._names.get(storage_of(value)) if isinstance(value, Tensor) else None
        return bool(self._writers.get(name or "", set()) - {EVERYWHERE})

    def note(self, tensors: Mapping[fx.Node, Tensor], written: set[fx.Node], layer: int) -> None:
        """Note what a node of a layer reads, and which of it is written to."""
        for node, tensor in tensors.items():
            name = self._names.get(storage_of(tensor))
            if name is not None:
                self._users[name].add(layer)
                if node in written:
                    self._writers[name].add(layer)

    def hidden(self) -> Iterator[tuple[tuple[int, int], str]]:
        """Pairs of layers, one of which writes to a buffer that the other uses."""
        for name, writers in self._writers.items():
            for writer in writers - {EVERYWHERE}:
                for user in self._users[name] - {writer}:
                    # whom a result of all stages reaches is not known
                    pair = (0, self._last) if user == EVERYWHERE else (writer, user)
                    yield (min(pair), max(pair)), _CHANGED.format(name=name)
