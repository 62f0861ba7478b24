"""What a stage does at each event, worked out once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from partopt.runtime.events import (
    EVERYWHERE,
    Argument,
    Constant,
    Event,
    Key,
    Likeness,
    Record,
    Same,
    Tree,
)
from partopt.runtime.placeholder import Fetch, Placeholder

Replaced = dict[int, tuple[Tensor, Key]]  # by the id of a tensor that another stage writes to


@dataclass(frozen=True)
class Step:
    """An event as a stage meets it.

    `runs` says whether the stage runs it, `fills` whether it reads results of others. `wanted` are
    the results that leave the stage, `numbers` those of a unit that must be as they were.
    """

    event: Event
    number: int
    runs: bool
    fills: bool
    wanted: tuple[Key, ...]
    numbers: tuple[tuple[int, Any], ...]
    stub: Stub | None


class Stub:
    """The results of an event of another stage: placeholders, as nested as they were.

    The placeholders are made once, but for those that each microbatch renews. Writes of other
    stages give them other keys, all of them before the stage's own events, and the same ones in
    each microbatch.
    """

    def __init__(self, event: Event, number: int, fetch: Fetch) -> None:
        self.event = event
        self._number = number
        self._fresh: list[Any] = [
            Placeholder(leaf, Key(number, index), fetch)
            if isinstance(leaf, Likeness)
            else leaf.value
            if isinstance(leaf, Constant)
            else None
            for index, leaf in enumerate(event.leaves)
        ]
        self._takes_arguments = any(isinstance(leaf, Argument) for leaf in event.leaves)
        # most events return one tensor
        alone = len(event.leaves) == 1 and not event.observed and event.output.spec.is_leaf()
        self._alone = alone and isinstance(event.leaves[0], Likeness)

    def renew(self, index: int, fetch: Fetch) -> None:
        """Make a leaf's placeholder once more, which gets its tensor by `fetch`."""
        leaf = self.event.leaves[index]
        if isinstance(leaf, Likeness):
            self._fresh[index] = Placeholder(leaf, Key(self._number, index), fetch)

    def output(self, args: Any, kwargs: Any, replaced: Replaced) -> tuple[Any, list[Any]]:
        """What the event returns, and what each module observed in it does."""
        if self._alone:
            return self._fresh[0], []
        leaves = self._resolve(
            tree_leaves((args, kwargs)) if self._takes_arguments else [], replaced
        )
        return _nest(self.event.output, leaves), [
            _nest(tree, leaves) for _, tree in self.event.observed
        ]

    def _resolve(self, arguments: list[Any], replaced: Replaced) -> list[Any]:
        leaves = list(self._fresh)
        named: set[int] = set()
        for index, leaf in enumerate(self.event.leaves):
            if isinstance(leaf, Same):
                leaves[index] = leaves[leaf.leaf]
            elif isinstance(leaf, Argument):
                leaves[index] = arguments[leaf.position]
                if leaf.tensor and leaf.position not in named:
                    named.add(leaf.position)
                    _rename(leaves[index], Key(self._number, index), replaced)
        return leaves


def _rename(tensor: Tensor, key: Key, replaced: Replaced) -> None:
    """From here on, `tensor` is a result of another stage."""
    if isinstance(tensor, Placeholder):
        tensor.key = key
    else:
        replaced[id(tensor)] = (tensor, key)


def _nest(tree: Tree, leaves: list[Any]) -> Any:
    return tree_unflatten(leaves[tree.start : tree.stop], tree.spec)


def find_results(
    event: Event, output: Any, seen: list[tuple[str, Any]], args: Any, kwargs: Any
) -> list[Any]:
    """The leaves of an event that has run, as the record numbers them."""
    leaves = tree_flatten(output)[0]
    for _, value in seen:
        leaves += tree_flatten(value)[0]
    if event.written:
        arguments = tree_leaves((args, kwargs))
        leaves += [arguments[position] for position, _ in event.written]
    return leaves


def steps_of(
    record: Record, start: int, stop: int, wanted: Mapping[int, tuple[Key, ...]], fetch: Fetch
) -> list[Step]:
    """What the stage of layers [start, stop) does at each event."""

    def runs(layer: int) -> bool:
        return layer == EVERYWHERE or start <= layer < stop

    steps = []
    for number, event in enumerate(record.events):
        own = runs(event.layer)
        numbers = tuple(
            (index, leaf.value)
            for index, leaf in enumerate(event.leaves)
            if event.unit is not None
            and index < event.output.stop
            and isinstance(leaf, Constant)
            and isinstance(leaf.value, bool | int | float | complex)
        )
        steps.append(
            Step(
                event,
                number,
                own,
                any(not runs(record.made_by(key)) for key in event.reads),
                wanted.get(number, ()),
                numbers if own else (),
                None if own else Stub(event, number, fetch),
            )
        )
    return steps
