"""Building the events of a record from what calls are given and return."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import register_pytree_node, tree_flatten, tree_leaves
from torch.utils.hooks import RemovableHandle

from partopt.profiler.tensors import tensors_in
from partopt.runtime.events import (
    EVERYWHERE,
    READ_BETWEEN,
    Argument,
    Constant,
    Event,
    Key,
    Leaf,
    Likeness,
    Same,
    Tree,
)
from partopt.runtime.unit_reads import UnitReads

# results that say nothing of a tensor's values
_HARMLESS = (
    type(None),
    torch.Size,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    RemovableHandle,
    str,
    type,
)
_NUMBERS = (bool, int, float, complex)


@dataclass(frozen=True)
class Before:
    """A call before it runs: the leaves of its arguments, and how often each was written to.

    `run` are the arguments that the call really gets, `leaves` those that the model gave it.
    """

    leaves: list[Any]
    run: list[Any]
    versions: list[int]

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that the model gives it, and those that it gets."""
        return [each for each in [*self.leaves, *self.run] if isinstance(each, Tensor)]

    def written(self) -> list[int]:
        """The positions of the arguments that have been written to in place."""
        return [
            position
            for position, (leaf, version) in enumerate(zip(self.run, self.versions, strict=True))
            if isinstance(leaf, Tensor) and leaf._version != version
        ]


class NewTree(BaseException):
    """A result is of a dataclass that torch's trees did not know: it has to be recorded again.

    Not an Exception, so that no model takes it for an error of its own.
    """


def _register(kind: type) -> None:
    """Have torch's trees look into a dataclass."""

    def flatten(value: Any) -> tuple[list[Any], tuple[str, ...]]:
        names = [each.name for each in dataclasses.fields(kind) if hasattr(value, each.name)]
        return [getattr(value, name) for name in names], tuple(names)

    def rebuild(leaves: Iterable[Any], names: tuple[str, ...]) -> Any:
        value: Any = object.__new__(kind)  # __init__ may do more than to set its fields
        for name, leaf in zip(names, leaves, strict=True):
            object.__setattr__(value, name, leaf)
        return value

    register_pytree_node(kind, flatten, rebuild)


class EventBuilder:
    """The events so far, and which result each tensor is.

    What calls read beside their arguments, `reads` sees.
    """

    def __init__(self, model: nn.Module, reads: UnitReads) -> None:
        self.events: list[Event] = []
        self.likeness: dict[Key, Likeness] = {}
        self._reads = reads
        self._parameters = {id(each): name for name, each in model.named_parameters()}
        self._keys: dict[int, Key] = {}
        self._kept: list[Any] = []  # so that ids are not used again

    def before(self, given: Any, run: Any) -> Before:
        """Note the arguments of a call that comes next."""
        leaves = tree_leaves(run)
        versions = [each._version if isinstance(each, Tensor) else 0 for each in leaves]
        return Before(tree_leaves(given), leaves, versions)

    def is_tied(self, before: Before) -> bool:
        """Whether the call reads a parameter, or what a layer made."""
        return any(
            id(tensor) in self._parameters or self.maker(tensor) != EVERYWHERE
            for tensor in before.tensors
        )

    def note_hidden(self, before: Before, last: int) -> None:
        """Note what the call is given that a layer left in an object; `last` is the last layer."""
        for tensor in before.tensors:
            maker = self.maker(tensor)
            if id(tensor) not in self._keys and maker != EVERYWHERE:
                self._reads.hidden[maker, last] = READ_BETWEEN

    def entered_before(self, tensor: Tensor) -> int:
        """How many layers had been entered when every stage made `tensor`."""
        key = self._keys.get(id(tensor))
        before = self.events[: 0 if key is None else key.event]
        return max((event.layer for event in before), default=EVERYWHERE) + 1

    def maker(self, tensor: Tensor) -> int:
        """The layer that made a tensor, or in whose memory it lies."""
        key = self._keys.get(id(tensor))
        if key is not None:
            return self.events[key.event].layer
        maker = self._reads.maker(tensor)
        return EVERYWHERE if maker is None else maker

    def add(
        self,
        before: Before,
        name: str,
        unit: str | None,
        layer: int,
        output: Any,
        seen: Sequence[tuple[str, Any]],
        touched: set[str],
    ) -> None:
        """Add the event of a call that has returned `output`.

        Inside of it modules with hooks returned what is `seen`, and it `touched` parameters.
        """
        given = [id(each) for each in before.tensors]
        reads = frozenset(self._keys[each] for each in given if each in self._keys)
        own = {self._parameters[each] for each in given if each in self._parameters}
        leaves = _Leaves(before)
        tree = leaves.add(output)
        observed = tuple((module, leaves.add(value)) for module, value in seen)
        written = [(position, leaves.add_written(position)) for position in before.written()]
        self.events.append(
            Event(
                name,
                unit,
                layer,
                tree,
                observed,
                tuple(leaves.leaves),
                tuple(written),
                reads,
                frozenset(own | touched),
                frozenset(Likeness.of(before.leaves[position]).storage for position, _ in written),
                unit is None and layer != EVERYWHERE and leaves.has_value,
                leaves.opaque,
            )
        )
        self._tag(leaves.values, layer)

    def _tag(self, values: Sequence[Any], layer: int) -> None:
        event = len(self.events) - 1
        tensors: list[Tensor] = []
        first: set[int] = set()
        for number, value in enumerate(values):
            if isinstance(value, Tensor) and id(value) not in first:
                first.add(id(value))
                self._keys[id(value)] = Key(event, number)
                self.likeness[Key(event, number)] = Likeness.of(value)
                tensors.append(value)
        self._kept.extend(tensors)
        if layer != EVERYWHERE:
            self._reads.note_made(tensors, layer)


class _Leaves:
    """The leaves of an event's results, as they are added."""

    def __init__(self, before: Before) -> None:
        self.values: list[Any] = []
        self.leaves: list[Leaf] = []
        self.has_value = False
        self.opaque = ""
        self._first: dict[int, int] = {}
        self._arguments = {
            id(leaf): position
            for position, leaf in reversed(list(enumerate(before.leaves)))
            if not isinstance(leaf, (*_HARMLESS, *_NUMBERS))
        }
        self._before = before

    def add(self, value: Any) -> Tree:
        """Add what a call returned."""
        values, spec = tree_flatten(value)
        start = len(self.leaves)
        for each in values:
            self.leaves.append(self._leaf(each))
        self.values.extend(values)
        return Tree(spec, start, len(self.leaves))

    def add_written(self, position: int) -> int:
        """Add an argument that the call wrote to, and return its leaf."""
        argument = self._before.leaves[position]
        self.leaves.append(Argument(position, True))
        self.values.append(argument)
        return len(self.leaves) - 1

    def _leaf(self, value: Any) -> Leaf:
        if id(value) in self._arguments:
            return Argument(self._arguments[id(value)], isinstance(value, Tensor))
        if isinstance(value, Tensor):
            if id(value) in self._first:
                return Same(self._first[id(value)])
            self._first[id(value)] = len(self.leaves)
            return Likeness.of(value)
        if isinstance(value, _HARMLESS):
            return Constant(value)
        if dataclasses.is_dataclass(value) and tensors_in(value):
            _register(type(value))
            raise NewTree
        self.has_value = True
        if isinstance(value, _NUMBERS):
            return Constant(value)
        self.opaque = type(value).__name__
        return Constant(None)
