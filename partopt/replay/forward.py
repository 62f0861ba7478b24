"""Running the forward of a model as one of its stages.

The model's forward runs. Events of the stage run in it; those of others return placeholders,
which know a shape, a number format and a device; and where an event of the stage is given a
placeholder it gets the tensor that was received. After the stage's last event the rest of the
forward is left to others.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _pop_mode_temporarily
from torch.utils._pytree import (
    SUPPORTED_NODES,
    tree_flatten,
    tree_leaves,
    tree_map_only,
    tree_unflatten,
)

from partopt.errors import ANSWER_IS_NO, PartoptError
from partopt.profiler.step import loss_of_output, run_forward
from partopt.profiler.tensors import Inputs, Loss
from partopt.replay.events import (
    EVERYWHERE,
    Argument,
    Constant,
    Event,
    Key,
    Likeness,
    Record,
    Same,
    Tree,
    is_question,
    name_of,
)
from partopt.replay.unit_calls import TakenUnits, fire_hooks, observe_hooked

ABSENT = Key(-1, 0)  # of an input of the model that a stage is not given
Fetch = Callable[["Placeholder"], Tensor]
Seen = list[tuple[str, Any]]  # what modules with hooks returned inside of a unit
Replaced = dict[int, tuple[Tensor, Key]]  # by the id of a tensor that another stage writes to


class Placeholder(Tensor):
    """A result of another stage; computing with it uses the tensor that `fetch` has received."""

    key: Key
    fetch: Fetch

    @staticmethod
    def __new__(cls, likeness: Likeness, *_: Any) -> Placeholder:
        """A tensor like `likeness`, without memory."""
        return Tensor._make_wrapper_subclass(
            cls,
            likeness.shape,
            strides=likeness.stride or None,
            dtype=likeness.dtype,
            device=likeness.device,
            requires_grad=likeness.gradient,
        )

    def __init__(self, _: Likeness, key: Key, fetch: Fetch) -> None:
        self.key, self.fetch = key, fetch

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the function on the tensors received, unless it asks for shape and format alone."""
        if is_question(func, args):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        given = tree_map_only(
            Placeholder, lambda placeholder: placeholder.fetch(placeholder), (args, kwargs or {})
        )
        return func(*given[0], **given[1])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """No operation goes without values; of an input that is not there `fetch` says so."""
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Placeholder) and leaf.key == ABSENT:
                leaf.fetch(leaf)
        raise RuntimeError(f"{func} reached a placeholder")

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Placeholder({tuple(self.key)})"


def absent(inputs: Inputs, stage: str) -> Inputs:
    """In place of inputs of the model that a stage is not given; PartoptError where needed."""

    def refuse(_: Placeholder) -> Tensor:
        raise PartoptError(
            f"{stage} computes with the model's inputs",
            "call it with `inputs`",
            code="inputs-missing",
        )

    return tree_map_only(
        Tensor, lambda tensor: Placeholder(Likeness.of(tensor), ABSENT, refuse), inputs
    )


class _StageEnds(BaseException):
    """The stage has run its last event; no Exception, which a model could take for its error."""


@dataclass(frozen=True)
class _Step:
    """An event as a stage meets it.

    A `stub` has the results of one that is another stage's. Of its own `fills` says whether it
    reads results of others, `wanted` are those that leave the stage, and `numbers` those of a unit
    that must be as they were.
    """

    event: Event
    stub: _Stub | None
    fills: bool
    wanted: list[Key]
    numbers: list[tuple[int, Any]]


class StageForward(TorchFunctionMode):
    """The forward of layers [start, stop) of a recorded model, of which the results `sends` leave.

    Each is called in the order of the record; where the model goes another way that is an error.
    """

    def __init__(
        self,
        model: nn.Module,
        record: Record,
        span: range,
        sends: tuple[Key, ...],
        loss_fn: Loss | None,
    ) -> None:
        super().__init__()
        self._model, self._record, self._span = model, record, span
        self._loss_fn = loss_fn or loss_of_output
        self._names = {module: name for name, module in model.named_modules()}
        self._ends_model = span.stop == len(record.layers)
        wanted = defaultdict(list)
        for key in sends:
            wanted[key.event].append(key)
        self._steps = [self._step(number, wanted[number]) for number in range(len(record.events))]
        of_stage = [number for number, event in enumerate(record.events) if event.layer in span]
        self._stop = len(self._steps) if self._ends_model else max(of_stage, default=-1) + 1
        self._units = TakenUnits(model, [key.name for key in record.layers], self._unit)
        self._begin(None)

    def _step(self, number: int, wanted: list[Key]) -> _Step:
        event = self._record.events[number]
        if not self._runs(event.layer):
            return _Step(event, _Stub(event, number, self._fetch), False, [], [])
        fills = any(not self._runs(self._record.made_by(key)) for key in event.reads)
        returned = event.leaves[: event.output.stop] if event.unit is not None else ()
        numbers = [
            (index, leaf.value)
            for index, leaf in enumerate(returned)
            if isinstance(leaf, Constant) and isinstance(leaf.value, bool | int | float | complex)
        ]
        return _Step(event, None, fills, wanted, numbers)

    def _runs(self, layer: int) -> bool:
        return layer == EVERYWHERE or layer in self._span

    def _begin(self, received: Mapping[Key, Tensor] | None) -> None:
        self._inside, self._next, self._received = False, 0, received
        self._replaced: Replaced = {}
        self._made: dict[Key, Tensor] = {}

    def run(
        self, inputs: Inputs, received: Mapping[Key, Tensor]
    ) -> tuple[dict[Key, Tensor], Tensor | None]:
        """The results that leave the stage, of those that it makes; of the last stage the loss.

        Raises PartoptError where the forward takes another way than the recorded one.
        """

        def keep(placeholder: Placeholder) -> Tensor:
            """What was received, for checkpoints too, which run once more in the backward."""
            found = received.get(placeholder.key)
            return self._lookup(placeholder.key) if found is None else found

        self._begin(received)
        self._renew(received, keep)
        loss: Tensor | None = None
        try:
            with self._units, self, contextlib.suppress(_StageEnds):
                loss = self._loss_fn(run_forward(self._model, inputs), inputs)
            if self._next < self._stop:
                missing = self._steps[self._next].event
                layer = self._record.layer_name(missing.layer)
                raise _differs(f'it ends before "{missing.name}" of {layer}')
            return self._made, loss
        finally:
            self._renew(received, self._fetch)
            self._begin(None)

    def _renew(self, received: Mapping[Key, Tensor], fetch: Fetch) -> None:
        """Make the placeholders of what is received once more, which get tensors by `fetch`."""
        for key in received:
            stub = self._steps[key.event].stub
            assert stub is not None
            stub.make(key.leaf, fetch)

    def _unit(self, name: str, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run a unit where it is the stage's."""
        if self._inside:
            return forward(*args, **kwargs)

        def run(step: _Step, args: Any, kwargs: Any) -> tuple[Any, Seen]:
            self._inside = True
            try:
                with _pop_mode_temporarily():
                    if not (step.wanted and step.event.observed):
                        return forward(*args, **kwargs), []
                    with observe_hooked(self._names) as seen:
                        return forward(*args, **kwargs), seen
            finally:
                self._inside = False

        return self._meet(name, name, run, args, kwargs)

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the function between units where it is the stage's."""
        options = kwargs or {}
        if self._inside or is_question(func, args):
            return func(*args, **options)

        def run(_: _Step, args: Any, kwargs: Any) -> tuple[Any, Seen]:
            return func(*args, **kwargs), []

        return self._meet(None, name_of(func), run, args, options)

    def _meet(
        self,
        unit: str | None,
        name: str,
        run: Callable[[_Step, Any, Any], tuple[Any, Seen]],
        args: Any,
        kwargs: Any,
    ) -> Any:
        """What the model's call returns, which must be that of the next event."""
        if self._next == len(self._steps):
            raise _differs(f"{name} comes after the last of its {self._next} recorded calls")
        step = self._steps[self._next]
        self._next += 1
        event = step.event
        if event.unit != unit or event.name != name:
            layer = self._record.layer_name(event.layer)
            raise _differs(f'at {layer} it calls "{name}" and called "{event.name}"')
        if step.stub is not None:
            output, observed = step.stub.results(args, kwargs, self._replaced)
            for (module, _), value in zip(event.observed, observed, strict=True):
                fire_hooks(self._model.get_submodule(module), value)
            return output
        if step.fills or self._replaced:
            args, kwargs = _fill((args, kwargs), self._real)
        output, seen = run(step, args, kwargs)
        if step.wanted or step.numbers:
            results = find_results(event, output, seen, args, kwargs)
            self._made |= {key: results[key.leaf] for key in step.wanted}
            for leaf, recorded in step.numbers:
                if results[leaf] != recorded:
                    raise _differs(
                        f"{self._record.layer_name(event.layer)} returns {results[leaf]!r} and "
                        f"returned {recorded!r}, which other stages rely on"
                    )
        if self._next == self._stop and not self._ends_model:
            self._inside = True  # contexts that the model leaves are no calls of its forward
            raise _StageEnds
        return output

    def _real(self, tensor: Tensor) -> Tensor:
        """The tensor received for a placeholder, or for one that another stage has written to."""
        if isinstance(tensor, Placeholder):
            return tensor.fetch(tensor)
        other = self._replaced.get(id(tensor))
        return tensor if other is None else self._lookup(other[1])

    def _fetch(self, placeholder: Placeholder) -> Tensor:
        return self._lookup(placeholder.key)

    def _lookup(self, key: Key) -> Tensor:
        """The tensor received for a result of another stage."""
        if self._received is not None and key in self._received:
            return self._received[key]
        maker = self._record.layer_name(self._record.made_by(key))
        when = "" if self._received is not None else " after its forward"
        raise PartoptError(
            f"the stage of layers {self._span.start} to {self._span.stop - 1} reads{when} a tensor "
            f"of {maker} that it was not given as an argument: an object keeps it, or a checkpoint "
            "between layers",
            "switch off activation checkpointing in the model, or keep both in one stage",
            ANSWER_IS_NO,
            code="cannot-cut",
            layers=[maker],
        )


class _Stub:
    """The results of an event of another stage: placeholders, as nested as they were.

    The placeholders are made once, but for those that every microbatch renews. Writes of other
    stages give them other keys, all of them before the stage's events, and the same ones in
    every microbatch.
    """

    def __init__(self, event: Event, number: int, fetch: Fetch) -> None:
        self.event, self.number = event, number
        self.fresh: list[Any] = [None] * len(event.leaves)
        for index, leaf in enumerate(event.leaves):
            if isinstance(leaf, Constant):
                self.fresh[index] = leaf.value
            else:
                self.make(index, fetch)

    def make(self, index: int, fetch: Fetch) -> None:
        """Make the placeholder of a leaf, which gets its tensor by `fetch`."""
        leaf = self.event.leaves[index]
        if isinstance(leaf, Likeness):
            self.fresh[index] = Placeholder(leaf, Key(self.number, index), fetch)

    def results(self, args: Any, kwargs: Any, replaced: Replaced) -> tuple[Any, list[Any]]:
        """What the event returns, and what every module observed in it does."""
        leaves, named = list(self.fresh), set()
        arguments: list[Any] | None = None
        for index, leaf in enumerate(self.event.leaves):
            if isinstance(leaf, Same):
                leaves[index] = leaves[leaf.leaf]
            elif isinstance(leaf, Argument):
                arguments = tree_leaves((args, kwargs)) if arguments is None else arguments
                leaves[index] = arguments[leaf.position]
                if leaf.tensor and leaf.position not in named:
                    named.add(leaf.position)
                    _rename(leaves[index], Key(self.number, index), replaced)

        def nest(tree: Tree) -> Any:
            return tree_unflatten(leaves[tree.start : tree.stop], tree.spec)

        return nest(self.event.output), [nest(tree) for _, tree in self.event.observed]


def _rename(tensor: Tensor, key: Key, replaced: Replaced) -> None:
    """From here on, `tensor` is a result of another stage."""
    if isinstance(tensor, Placeholder):
        tensor.key = key
    else:
        replaced[id(tensor)] = (tensor, key)


def find_results(event: Event, output: Any, seen: Seen, args: Any, kwargs: Any) -> list[Any]:
    """The leaves of an event that has run, as the record numbers them."""
    leaves = tree_flatten(output)[0]
    for _, value in seen:
        leaves += tree_flatten(value)[0]
    if event.written:
        arguments = tree_leaves((args, kwargs))
        leaves += [arguments[position] for position, _ in event.written]
    return leaves


def _fill(value: Any, real: Callable[[Tensor], Tensor]) -> Any:
    """`value`, nested as arguments are, with `real(tensor)` for every tensor in it.

    What is most common is done without torch's general walk over trees.
    """
    if isinstance(value, Tensor):
        return real(value)
    kind = type(value)
    if kind is tuple or kind is list:
        return kind([_fill(part, real) for part in value])
    if kind is dict:
        return {key: _fill(part, real) for key, part in value.items()}
    return tree_map_only(Tensor, real, value) if kind in SUPPORTED_NODES else value


def _differs(what: str) -> PartoptError:
    return PartoptError(
        f"the forward differs from the recorded one: {what}",
        "every microbatch has to take the same way through the model: fix shapes and modes, and "
        "switch off what skips layers at random",
        ANSWER_IS_NO,
        code="calls-vary",
    )
