"""Seconds of layers and stages in a trace, one number for each pass of a microbatch.

A forward belongs to the layer whose range began last, so that what runs between two layers is the
first one's. A backward belongs to the layer of the forward operation with its sequence number, and
one without (an accumulation of gradients) to the layer of the backward before it.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from partopt.documents.profile import Profile
from partopt.errors import PartoptError
from partopt.importers.torch_profile.ranges import Range, actions, layer_ranges
from partopt.importers.torch_profile.trace import RANGES, Event, Trace
from partopt.importers.torch_profile.work import Work, work_of

_STEP, _OPTIMIZER = "ProfilerStep#", "Optimizer."
_UPDATE = "Optimizer.step#"
_WARM = 3  # steps, of which the first is left out


class Pass(NamedTuple):
    """One pass of a microbatch through a layer: `(layer, turn)`."""

    layer: int
    turn: int


@dataclass(frozen=True)
class Tally:
    """Seconds of every pass by kind (F, B; of stages also I and W) and by layer or stage.

    `again` are the layers that a backward computes a second time; `outside_s` of the `computed_s`
    are in no layer and no optimizer.
    """

    seconds: dict[str, dict[int, list[float]]]
    optimizer: list[float] = field(default_factory=list)
    again: frozenset[int] = frozenset()
    computed_s: float = 0.0
    outside_s: float = 0.0
    left_out: bool = False

    @classmethod
    def together(cls, tallies: Iterable[Tally]) -> Tally:
        """The passes of several processes."""
        parts = list(tallies)
        seconds: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
        for part in parts:
            for kind, found in part.seconds.items():
                for index, passes in found.items():
                    seconds[kind][index] += passes
        return cls(
            {kind: dict(found) for kind, found in seconds.items()},
            [each for part in parts for each in part.optimizer],
            frozenset().union(*(part.again for part in parts)),
            sum(part.computed_s for part in parts),
            sum(part.outside_s for part in parts),
            any(part.left_out for part in parts),
        )


def layer_passes(trace: Trace, onto: Profile) -> Tally:
    """The passes of the layers of `onto`. Raises PartoptError where no backward was recorded."""
    work = work_of(trace)
    ranges, again = layer_ranges(trace, work, onto)
    updates = [event for event in trace.of(*RANGES) if event.name.startswith(_OPTIMIZER)]
    forward, backward = _sweep(trace, work, ranges, updates)
    turns = sorted({key.turn for key, seconds in backward.items() if seconds > 0})
    trained = {turn: number for number, turn in enumerate(turns)}
    if ranges and not trained:
        raise PartoptError(
            f"{trace.where}: no backward of these layers",
            "record whole training steps, forward and backward",
            code="no-backward-in-trace",
        )
    numbered = [each for each in ranges if each.turn in trained]
    begin = _first_warm(trace, [(each.event, trained[each.turn]) for each in numbered])
    kept = [Pass(each.layer, each.turn) for each in numbered if each.event.start >= begin]
    names = {event.name for event in again}
    return Tally(
        {"F": _by_layer(forward, kept), "B": _by_layer(backward, kept)},
        [_inside(work, event) for event in updates if event.name.startswith(_UPDATE)],
        frozenset(each.layer for each in ranges if each.event.name in names),
        computed := sum(each.seconds for each in work) - sum(_inside(work, e) for e in updates),
        max(computed - sum(forward.values()) - sum(backward.values()), 0.0),
        begin > float("-inf"),
    )


def _sweep(
    trace: Trace, work: list[Work], ranges: list[Range], updates: list[Event]
) -> tuple[dict[Pass, float], dict[Pass, float]]:
    """Seconds of the forward and the backward of every pass, all work in order of time."""
    forward: dict[Pass, float] = defaultdict(float)
    backward: dict[Pass, float] = defaultdict(float)
    owners: dict[int, Pass] = {}
    last: dict[int | str, Pass | None] = {}
    current: Pass | None = None
    marks = [(mark, None) for mark in [*updates, *_steps(trace)]]
    begins = [(each.event, Pass(each.layer, each.turn)) for each in ranges]
    begun = sorted([*marks, *begins], key=lambda pair: pair[0].start)
    starts, at = [event.start for event, _ in begun], 0
    for each in work:
        while at < len(starts) and starts[at] <= each.start:
            current, at = begun[at][1], at + 1
        if each.backward:
            current = None
            owner = owners.get(-1 if each.sequence is None else each.sequence)
            last[each.thread] = owner = owner or last.get(each.thread)
            if owner:
                backward[owner] += each.seconds
        elif current:
            forward[current] += each.seconds
            owners.update(dict.fromkeys(each.sequences, current))
    return forward, backward


def stage_passes(trace: Trace) -> Tally:
    """The passes of the stages: whatever was computed while an action ran, on any thread."""
    found, work = actions(trace), work_of(trace)
    if not found:
        raise PartoptError(
            f"{trace.where}: no action of a pipeline: no range such as PP:0F0",
            "torch names them where its runtime executes a schedule (load_csv, interleaved and "
            "zero-bubble schedules); without `plan` the ranges of layers are read",
            code="stages-not-in-trace",
        )
    turns: dict[str, int] = defaultdict(int)
    numbered = []
    for action in found:
        numbered.append((action.event, turns[action.event.name]))
        turns[action.event.name] += 1
    begin = _first_warm(trace, numbered)
    seconds: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for action in found:
        if action.event.start >= begin:
            seconds[action.kind][action.stage].append(_inside(work, action.event))
    updates = [event for event in trace.of(*RANGES) if event.name.startswith(_UPDATE)]
    return Tally(
        {kind: dict(stages) for kind, stages in seconds.items()},
        [_inside(work, event) for event in updates],
        left_out=begin > float("-inf"),
    )


def _steps(trace: Trace) -> list[Event]:
    return [event for event in trace.of(*RANGES) if event.name.startswith(_STEP)]


def _first_warm(trace: Trace, turns: list[tuple[Event, int]]) -> float:
    """When the first of three or more steps has ended; without steps the first of as many turns."""
    steps = _steps(trace)
    if len(steps) >= _WARM:
        return steps[1].start
    if steps or max((turn for _, turn in turns), default=0) < _WARM - 1:
        return float("-inf")
    return min(event.start for event, turn in turns if turn == 1)


def _inside(work: list[Work], event: Event) -> float:
    """Seconds of the work that starts while the event runs."""
    low = bisect.bisect_left(work, event.start, key=lambda each: each.start)
    high = bisect.bisect_left(work, event.end, key=lambda each: each.start)
    return sum(each.seconds for each in work[low:high])


def _by_layer(seconds: dict[Pass, float], kept: list[Pass]) -> dict[int, list[float]]:
    found: dict[int, list[float]] = defaultdict(list)
    for each in kept:
        found[each.layer].append(seconds.get(each, 0.0))
    return dict(found)
