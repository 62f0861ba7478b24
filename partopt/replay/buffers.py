"""The buffers of a model: kept while a forward runs once more, and which layers use them.

Every stage has its buffers, such as running statistics.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from partopt.replay.events import EVERYWHERE

# A slot: the dictionary of a module that holds a buffer, the buffer's key there, its full name
Slot = tuple[dict[str, Tensor | None], str, str]


def buffer_slots(
    model: nn.Module, chosen: Callable[[str], bool] = lambda _name: True
) -> list[Slot]:
    """The slots of the buffers whose names are `chosen`."""
    found = []
    for prefix, module in model.named_modules():
        for key, buffer in module._buffers.items():
            name = f"{prefix}.{key}" if prefix else key
            if buffer is not None and chosen(name):
                found.append((module._buffers, key, name))
    return found


class BufferState:
    """The buffers in these slots as they are now."""

    def __init__(self, slots: list[Slot]) -> None:
        self._kept = [
            (holder, key, name, buffer, buffer.detach().clone())
            for holder, key, name in slots
            if (buffer := holder[key]) is not None
        ]

    def changed(self) -> list[str]:
        """Names of the buffers that have other values since."""
        found = []
        for holder, key, name, buffer, before in self._kept:
            now = holder[key]
            same = now is not None and now.shape == before.shape and torch.equal(now, before)
            if not (buffer.is_meta or same):
                found.append(name)
        return found

    def replaced(self) -> dict[str, Tensor]:
        """The tensors that stand where there were others, by the names of the buffers."""
        pairs = ((name, holder[key], buffer) for holder, key, name, buffer, _ in self._kept)
        return {name: now for name, now, was in pairs if now is not None and now is not was}

    def restore(self) -> None:
        """Give the slots their buffers back, and the buffers their values."""
        for holder, key, _, buffer, before in self._kept:
            holder[key] = buffer
            if not buffer.is_meta:
                buffer.data.copy_(before)  # its version stays: a backward may need it


class BufferUses:
    """The layers that read and write the buffers of a model that has so many layers."""

    def __init__(self, layers: int) -> None:
        self._last = layers - 1
        self._users: defaultdict[str, set[int]] = defaultdict(set)
        self._writers: defaultdict[str, set[int]] = defaultdict(set)
        self._late: defaultdict[str, set[int]] = defaultdict(set)

    def note(self, used: set[str], written: set[str], layer: int) -> None:
        """Note the buffers that a layer uses, and which of them it writes to."""
        for name in written:
            self._writers[name].add(layer)
        # what is changed everywhere alike is not thereby read
        for name in used - written if layer == EVERYWHERE else used:
            self._users[name].add(layer)

    def note_late(self, written: set[str], entered: int) -> None:
        """Note what every stage writes to that comes so far, into so many layers."""
        for name in written:
            self._late[name].add(entered)

    def hidden(self) -> Iterator[tuple[tuple[int, int], str]]:
        """Pairs of layers, one of which writes to a buffer that the other uses, and how."""
        for name, writers in self._writers.items():
            for writer in writers - {EVERYWHERE}:
                for user in self._users[name] - {writer}:
                    if user == EVERYWHERE:  # whom it reaches is not known
                        text = f'{{1}} may read the buffer "{name}", which a layer changes'
                        yield (0, self._last), text
                    else:
                        reader, other = ("{1}", "{0}") if user > writer else ("{0}", "{1}")
                        text = f'{reader} reads the buffer "{name}", which {other} changes'
                        yield (min(user, writer), max(user, writer)), text
        for name, places in self._late.items():
            for entered in places:
                for user in {max(user, 0) for user in self._users[name]}:
                    if user < entered:
                        text = f'{{0}} reads the buffer "{name}", which changes behind it'
                        yield (user, min(entered, self._last)), text
