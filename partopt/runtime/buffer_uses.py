"""Which layers use the buffers of a model: every stage has buffers of its own."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from partopt.profiler.operations import Operation, Watch, storages_in
from partopt.runtime.events import EVERYWHERE, storage_of

# running statistics that an operator with these flags changes, whatever its schema says
_STATISTICS = ("running_mean", "running_var", "input_running_mean", "input_running_var")
_FLAGS = ("training", "use_input_stats")


class BufferUses:
    """The layers that read and write the buffers of a model that has so many layers."""

    def __init__(self, buffers: Mapping[str, Tensor], layers: int) -> None:
        self._names = {storage_of(each): name for name, each in buffers.items()}
        self._last = layers - 1
        self._users: defaultdict[str, set[int]] = defaultdict(set)
        self._writers: defaultdict[str, set[int]] = defaultdict(set)
        self._late: defaultdict[str, set[int]] = defaultdict(set)

    def names(self, tensors: Iterable[Tensor]) -> set[str]:
        """The buffers in which tensors lie."""
        places = map(storage_of, tensors)
        return {self._names[place] for place in places if place in self._names}

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


def written_by(schema: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments of an operator with this schema that it writes to, as that says or not."""
    given = dict(zip((each.name for each in schema.arguments), args, strict=False)) | dict(kwargs)
    mutable = {
        each.name for each in schema.arguments if each.alias_info and each.alias_info.is_write
    }
    if any(given.get(flag) for flag in _FLAGS):
        mutable |= set(_STATISTICS)
    return [each for name, each in given.items() if name in mutable and each is not None]


class BufferWatch(Watch):
    """While it is active, it collects the buffers that are `used`, and those `written` to."""

    def __init__(self, uses: BufferUses) -> None:
        super().__init__()
        self._uses = uses
        self.used: set[str] = set()
        self.written: set[str] = set()

    def before(self, call: Operation) -> None:
        """Note the buffers that the operation uses."""
        written = written_by(call.func._schema, call.arguments, call.options)
        self.used |= self._uses.names(call.read)
        self.written |= self._uses.names(storages_in(written))
