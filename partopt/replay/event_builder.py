"""Building the events of a record from what calls are given, read and return."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import register_pytree_node, tree_flatten, tree_leaves
from torch.utils.hooks import RemovableHandle

from partopt.profiler.operations import Operation, StorageMap, Watch, storages_in
from partopt.profiler.tensors import Inputs, local_tensors, tensors_in
from partopt.replay.events import (
    EVERYWHERE,
    IN_AN_OBJECT,
    READ_BETWEEN,
    Argument,
    Constant,
    Event,
    Key,
    Leaf,
    Likeness,
    Same,
    Tree,
    storage_of,
)

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
class Call:
    """A call before it runs: the leaves of its arguments, and how often they were written to.

    `run` are the arguments that the call really gets, `leaves` those that the model gave it.
    """

    leaves: list[Any]
    run: list[Any]
    versions: list[int]

    @classmethod
    def of(cls, given: Any, run: Any) -> Call:
        """The call that comes next with these arguments."""
        leaves = tree_leaves(run)
        versions = [leaf._version if isinstance(leaf, Tensor) else 0 for leaf in leaves]
        return cls(tree_leaves(given), leaves, versions)

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that the model gives it, and those that it gets."""
        return [leaf for leaf in [*self.leaves, *self.run] if isinstance(leaf, Tensor)]

    def written(self) -> list[int]:
        """The positions of the arguments that have been written to in place."""
        return [
            position
            for position, (leaf, version) in enumerate(zip(self.run, self.versions, strict=True))
            if isinstance(leaf, Tensor) and leaf._version != version
        ]


@dataclass
class Touched:
    """What operations used: parameters and buffers by their names, and the buffers written to."""

    parameters: set[str] = field(default_factory=set)
    buffers: set[str] = field(default_factory=set)
    written: set[str] = field(default_factory=set)


class UnitWatch(Watch):
    """Sees what operations read and write, and knows which layer made which storage.

    A stage follows tensors by the arguments of calls. What a unit reads beside them, because an
    earlier one left it in an object, no other stage could be sent: `hidden` are pairs of the layer
    that made such a tensor and the one that read it, and how.
    """

    def __init__(self, model: nn.Module, inputs: Inputs) -> None:
        super().__init__()
        self.hidden: dict[tuple[int, int], str] = {}
        self._buffers = {storage_of(buffer): name for name, buffer in model.named_buffers()}
        self._makers = StorageMap()
        self._constants = StorageMap()  # names of parameters in a storage; "" of others
        self._layer: int | None = None
        self._given: set[int] = set()
        self._touched = Touched()
        for part in storages_in([*model.buffers(), *local_tensors(inputs)]):
            self._constants.set(part, ("",))
        for name, parameter in model.named_parameters():
            for part in storages_in(parameter):
                known = self._constants.get(part) or ()
                self._constants.set(part, (*known, name))

    def maker(self, tensor: Tensor) -> int | None:
        """The layer that made the storage of `tensor`; None where none did."""
        found = [self._makers.get(part) for part in storages_in(tensor)]
        return next((layer for layer in found if layer is not None), None)

    def note_made(self, value: Any, layer: int) -> None:
        """Note that `layer` made the tensors in a value, unless their storages are known."""
        for tensor in storages_in(value):
            if self._constants.get(tensor) is None and self._makers.get(tensor) is None:
                self._makers.set(tensor, layer)

    @contextlib.contextmanager
    def of(self, layer: int | None, given: Sequence[Tensor] = ()) -> Iterator[Touched]:
        """Watch the unit that is `layer`, or what comes between units, of which buffers alone."""
        outer = self._layer, self._touched, self._given
        given_storages = {storage_of(part) for part in storages_in(list(given))}
        self._layer, self._touched, self._given = layer, Touched(), given_storages
        try:
            with self:
                yield self._touched
        finally:
            self._layer, self._touched, self._given = outer

    def before(self, call: Operation) -> None:
        """Note what the operation reads and writes."""
        touched, layer = self._touched, self._layer
        written = written_by(call.func._schema, call.arguments, call.options)
        touched.buffers |= self._names(call.read)
        touched.written |= self._names(storages_in(written))
        if layer is None:
            return
        for tensor in call.read:
            names, maker = self._constants.get(tensor), self._makers.get(tensor)
            if names is not None:
                touched.parameters.update(name for name in names if name)
            elif maker not in (None, layer) and storage_of(tensor) not in self._given:
                self.hidden[maker, layer] = IN_AN_OBJECT

    def after(self, call: Operation) -> None:
        """Note what it made."""
        if self._layer is not None:
            self.note_made(call.result, self._layer)

    def _names(self, tensors: Iterable[Tensor]) -> set[str]:
        places = map(storage_of, tensors)
        return {self._buffers[place] for place in places if place in self._buffers}


# running statistics that an operator with these flags changes, whatever its schema says
_STATISTICS = {"running_mean", "running_var", "input_running_mean", "input_running_var"}
_FLAGS = ("training", "use_input_stats")


def written_by(schema: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments of an operator with this schema that it writes to, as that says or not."""
    names = (argument.name for argument in schema.arguments)
    given = dict(zip(names, args, strict=False)) | dict(kwargs)
    mutable = {
        argument.name
        for argument in schema.arguments
        if argument.alias_info and argument.alias_info.is_write
    }
    if any(given.get(flag) for flag in _FLAGS):
        mutable |= _STATISTICS
    return [value for name, value in given.items() if name in mutable and value is not None]


class NewTree(BaseException):
    """A result is of a dataclass that torch's trees did not know: it has to be recorded again.

    Not an Exception, so that no model takes it for one of its errors.
    """


class EventBuilder:
    """The events so far, and which result every tensor is.

    What calls read beside their arguments, `watch` sees.
    """

    def __init__(self, model: nn.Module, watch: UnitWatch) -> None:
        self.events: list[Event] = []
        self.likeness: dict[Key, Likeness] = {}
        self._watch = watch
        self._parameters = {id(parameter): name for name, parameter in model.named_parameters()}
        self._keys: dict[int, Key] = {}
        self._kept: list[Any] = []  # so that ids are not used again

    def is_tied(self, call: Call) -> bool:
        """Whether the call reads a parameter, or what a layer made."""
        return any(
            id(tensor) in self._parameters or self.maker(tensor) != EVERYWHERE
            for tensor in call.tensors
        )

    def note_hidden(self, call: Call, last: int) -> None:
        """Note what the call is given that a layer left in an object; `last` is the last layer."""
        for tensor in call.tensors:
            maker = self.maker(tensor)
            if id(tensor) not in self._keys and maker != EVERYWHERE:
                self._watch.hidden[maker, last] = READ_BETWEEN

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
        maker = self._watch.maker(tensor)
        return EVERYWHERE if maker is None else maker

    def add(
        self,
        call: Call,
        name: str,
        layer: int,
        output: Any,
        seen: Sequence[tuple[str, Any]] | None = None,
        touched: Iterable[str] = (),
    ) -> None:
        """Add the event of a call that has returned `output`, of a unit or between units.

        Inside a unit modules with hooks returned what is `seen`, and it `touched` parameters.
        """
        given = [id(tensor) for tensor in call.tensors]
        parameters = {
            self._parameters[tensor_id] for tensor_id in given if tensor_id in self._parameters
        }
        leaves = _Leaves(call)
        output_tree = leaves.add(output)
        observed = tuple((module, leaves.add(value)) for module, value in seen or ())
        written = tuple((position, leaves.add_written(position)) for position in call.written())
        self.events.append(
            Event(
                name=name,
                unit=None if seen is None else name,
                layer=layer,
                output=output_tree,
                observed=observed,
                leaves=tuple(leaves.leaves),
                written=written,
                reads=frozenset(
                    self._keys[tensor_id] for tensor_id in given if tensor_id in self._keys
                ),
                parameters=frozenset(parameters.union(touched)),
                storages_written=frozenset(
                    Likeness.of(call.leaves[position]).storage for position, _ in written
                ),
                value=seen is None and layer != EVERYWHERE and leaves.has_value,
                opaque=leaves.opaque,
            )
        )
        first: dict[int, Tensor] = {}
        for number, value in enumerate(leaves.values):
            if isinstance(value, Tensor) and id(value) not in first:
                first[id(value)] = value
                key = Key(len(self.events) - 1, number)
                self._keys[id(value)], self.likeness[key] = key, Likeness.of(value)
        self._kept.extend(first.values())
        if layer != EVERYWHERE:
            self._watch.note_made(list(first.values()), layer)


class _Leaves:
    """The leaves of an event's results, as they are added."""

    def __init__(self, call: Call) -> None:
        self.values: list[Any] = []
        self.leaves: list[Leaf] = []
        self.has_value = False
        self.opaque = ""
        self._given = call.leaves
        self._first: dict[int, int] = {}
        self._arguments = {
            id(leaf): position
            for position, leaf in reversed(list(enumerate(call.leaves)))
            if not isinstance(leaf, (*_HARMLESS, *_NUMBERS))
        }

    def add(self, value: Any) -> Tree:
        """Add what a call returned."""
        values, spec = tree_flatten(value)
        start = len(self.leaves)
        for leaf in values:
            self.leaves.append(self._leaf(leaf))
        self.values.extend(values)
        return Tree(spec, start, len(self.leaves))

    def add_written(self, position: int) -> int:
        """Add an argument that the call wrote to, and return its leaf."""
        self.leaves.append(Argument(position, True))
        self.values.append(self._given[position])
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


def _register(kind: type) -> None:
    """Have torch's trees look into a dataclass."""

    def flatten(value: Any) -> tuple[list[Any], tuple[str, ...]]:
        names = [field.name for field in dataclasses.fields(kind) if hasattr(value, field.name)]
        return [getattr(value, name) for name in names], tuple(names)

    def rebuild(leaves: Iterable[Any], names: tuple[str, ...]) -> Any:
        value: Any = object.__new__(kind)  # __init__ may do more than to set its fields
        for name, leaf in zip(names, leaves, strict=True):
            object.__setattr__(value, name, leaf)
        return value

    register_pytree_node(kind, flatten, rebuild)
