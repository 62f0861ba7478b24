"""How many forwards come before the first backward, searched by simulation.

The formula fills a pipeline whose messages take no time. Latency, links that are shared and
all-reduces that are waited for ask for more microbatches in flight; each costs memory, and where
that does not hold the formula's, each stage has as many as it holds.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

from msgspec.structs import replace

from partopt.cost.memory import kept_by, with_counts
from partopt.cost.plan import under
from partopt.documents.plan import Plan
from partopt.documents.stage import Stage
from partopt.errors import PartoptError
from partopt.schedules import schedule
from partopt.schedules.entry import Counts
from partopt.schedules.one_f_one_b import blocking_warmups
from partopt.search.turns import warmups_in_turns
from partopt.simulator.execution import Execution, execute
from partopt.simulator.prediction import (
    check_actions,
    simulate_plan,
    with_memory,
    with_prediction,
)

# r_s    replicas of stage s
# w_s    its warm-up, forwards of each replica before its first backward
# M      microbatches of an iteration

# stages times microbatches of an iteration or, asynchronous, in flight: above, one simulation takes
# too long to try several
SEARCH_LIMIT = 100_000
WORTHWHILE = 1e-3  # of the period: what more memory must at least save
Depth = tuple[float, int]  # factor and more of `warmups`
DEPTHS: tuple[Depth, ...] = (
    (1, 0),
    (1, 1),
    (1, 2),
    (1, 3),
    (1.5, 0),
    (1.5, 1),
    (2, 0),
    (2, 1),
    (3, 0),
    (4, 0),
    (6, 0),
    (8, 0),
)
_ENDLESS = 2**31  # a warm-up that nothing limits
_PATIENCE = 4  # depths in a row that gain nothing, after which no deeper ones are tried


class Trial(NamedTuple):
    """A plan executed at one warm-up, and whether it fits."""

    execution: Execution
    fits: bool

    @property
    def period_s(self) -> float:
        """Seconds per microbatch."""
        return self.execution.period_s

    @property
    def warmups(self) -> list[int]:
        """w_s of each stage."""
        return [stage.warmup for stage in self.execution.plan.stages]


def warmups(replicas: Sequence[int], factor: float = 1.0, more: int = 0) -> list[int]:
    """w_s = floor((factor * sum of r_t over t > s, + r_s - 1 + more) / r_s), 0 of the last stage.

    PipeDream's with factor 1 and nothing more.
    """
    return [
        *(
            int((factor * sum(replicas[s + 1 :]) + r - 1 + more) // r)
            for s, r in enumerate(replicas[:-1])
        ),
        0,
    ]


def warmups_within(
    most: Sequence[int], replicas: Sequence[int], factor: float, more: int
) -> list[int]:
    """`warmups`, of each stage no deeper than its `most`."""
    wanted = warmups(replicas, factor, more)
    return [min(each) for each in zip(wanted, most, strict=True)]


def simulate_with_best_warmup(plan: Plan, patience_s: float = math.inf) -> Plan:
    """`simulate_plan`, under a schedule that takes warm-ups at that with the shortest period.

    That warm-up keeps to the limit `memory_bytes` of a device where any does. Nothing is searched
    where the formula's warm-up reaches what the loads of the plan allow. Where another is better,
    the plan says in `predicted.formula_period_s` what the formula's would have given. Raises
    PartoptError where the schedule cannot run the plan, whatever the warm-up.
    """
    if not schedule(plan.schedule).takes_warmup:
        return simulate_plan(plan)
    check_actions(plan)
    trials = WarmupTrials(plan)
    usual = trials.at(None)
    best = best_trial(trials, usual, patience_s)
    if best is None:
        return simulate_plan(plan)  # which says why
    return _as_found(best, usual)


def simulate_at_warmup(plan: Plan, own: Sequence[int]) -> Plan:
    """`simulate_plan` at the warm-ups `own`, as `simulate_with_best_warmup` gives it where it
    chooses these.

    Raises PartoptError where the schedule cannot run the plan so.
    """
    usual = [stage.warmup for stage in plan.stages]
    if not schedule(plan.schedule).takes_warmup or list(own) == usual:
        return simulate_plan(plan)
    check_actions(plan)
    changed = under(plan, warmups=own)
    check_actions(changed)
    execution = execute(changed)
    return _as_found(Trial(execution, fits_by_order(execution)), WarmupTrials(plan).at(None))


def _as_found(best: Trial, usual: Trial | None) -> Plan:
    """The plan of `best` with its prediction, and the period of `usual` where that is another."""
    found = with_prediction(dataclasses.replace(best.execution, plan=with_memory(best.execution)))
    if best is usual:
        return found
    formula_s = usual.period_s if usual is not None and usual.fits else None
    return replace(found, predicted=replace(found.predicted, formula_period_s=formula_s))


class WarmupTrials:
    """Executes a plan at one warm-up after another; `executions` and `actions` are how many."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.replicas = [stage.replicas for stage in plan.stages]
        self.executions = self.actions = 0

    def at(self, warmup: Sequence[int] | None) -> Trial | None:
        """The plan at a warm-up, where None is its own.

        None where it deadlocks, as it can while it waits for all-reduces.
        """
        self.executions += 1
        changed = self.plan if warmup is None else under(self.plan, warmups=warmup)
        try:
            execution = execute(changed)
        except PartoptError:
            return None
        self.actions += len(execution.order.kind)
        return Trial(execution, fits_by_order(execution))

    @cached_property
    def most(self) -> list[int] | None:
        """The deepest warm-up of each stage that its microbatches and its memory allow.

        None where a stage has no room for one microbatch.
        """
        limit, M = self.plan.memory_limit_bytes, self.plan.microbatches
        most = []
        for stage in self.plan.stages:
            own = _ENDLESS if M is None else max(0, -(-M // stage.replicas) - 1)
            if limit is not None:
                least, two = (_bytes(stage, held, self.plan) for held in (1, 2))
                if least > limit:
                    return None
                own = min(own, (limit - least) // (two - least)) if two > least else own
                # every term is rounded
                own -= own > 0 and _bytes(stage, own + 1, self.plan) > limit
            most.append(own)
        return most

    @property
    def too_long(self) -> bool:
        """Whether one simulation takes too long to try several."""
        passing = self.plan.microbatches or sum(self.replicas)
        return len(self.replicas) * passing > SEARCH_LIMIT


def _bytes(stage: Stage, held: int, plan: Plan) -> int:
    """Bytes on a device of the stage with `held` microbatches in flight."""
    counts = Counts(held - 1, held, 1)  # schedules that take warm-ups do whole backwards
    return with_counts(stage, counts, schedule(plan.schedule), kept_by(plan)).memory.total_bytes


def fits_by_order(execution: Execution) -> bool:
    """Whether every device has room; by the order where the formulas approximate what it keeps."""
    plan, entry = execution.plan, schedule(execution.plan.schedule)
    if plan.memory_limit_bytes is None or not (entry.split or entry.recomputes):
        return plan.fits
    return int(execution.peak_memory_bytes.max()) <= plan.memory_limit_bytes


def best_trial(
    trials: WarmupTrials, usual: Trial | None, patience_s: float = math.inf
) -> Trial | None:
    """The best of `usual`, at the plan's own warm-up, and of others that fit.

    Where a microbatch takes more than `patience_s` seconds at the first that fits, it is that one.

    None where all that was tried deadlocks; one that does not fit where none does.
    """
    plan, most = trials.plan, trials.most
    allowed_s = plan.predicted.estimate.period_s * (1 + WORTHWHILE)
    if usual is not None and usual.fits and (usual.period_s <= allowed_s or trials.too_long):
        return usual
    first = usual if most is None or (usual and usual.fits) else _shallower(trials, usual, most)
    if most is None or trials.too_long or (first is not None and not first.fits):
        return first or trials.at(blocking_warmups(trials.replicas))
    if first is not None and first.period_s > patience_s:
        return first
    best = _deepen(trials, first, most, allowed_s)
    return best if best is None or best is first else _leaner(trials, first, best)


def warmups_that_fit(plan: Plan, most: Sequence[int]) -> list[int]:
    """w_s of the plan, but no more than `most`, and no more than comes in.

    A stage takes in no more than the one before holds, (w_s + 1) r_s microbatches.
    """
    stages = plan.stages
    held = [min(stage.warmup, own) for stage, own in zip(stages, most, strict=True)]
    for s in range(1, len(held)):
        if held[s - 1] < stages[s - 1].warmup:
            taken_in = (held[s - 1] + 1) * stages[s - 1].replicas // stages[s].replicas
            held[s] = min(held[s], max(0, taken_in - 1))
    return held


def _shallower(trials: WarmupTrials, usual: Trial | None, most: Sequence[int]) -> Trial | None:
    """The plan at as deep a warm-up as fits, where it deadlocks there at what stages hold in turns.

    `usual` where it deadlocks at both.
    """
    held = warmups_that_fit(trials.plan, most)
    if held == [stage.warmup for stage in trials.plan.stages]:
        return usual
    for own in (held, warmups_in_turns(trials.plan, most)):
        found = trials.at(own)
        if found is not None and found.fits:
            return found
    return usual


def _deepen(
    trials: WarmupTrials, first: Trial | None, most: Sequence[int], allowed_s: float
) -> Trial | None:
    """The best of `first`, of ever deeper warm-ups, and of shallower ones; all hold at most `most`.

    The search ends when one is as fast as the loads of the plan allow. Where the formula's warm-up
    deadlocks, the first tried is one that cannot, whether it fits or not.
    """
    best = first or trials.at(blocking_warmups(trials.replicas))
    start = first.warmups if first else [stage.warmup for stage in trials.plan.stages]
    for depths in _depths(start, most, trials.plan):
        in_vain = 0  # depths tried since the last gain
        for depth in depths:
            if best is not None and best.period_s <= allowed_s:
                return best
            if in_vain == _PATIENCE:
                break
            found = trials.at(depth)
            in_vain += 1
            if (
                found is not None
                and found.fits
                and (best is None or found.period_s < best.period_s * (1 - WORTHWHILE))
            ):
                best, in_vain = found, 0
    return best


def _depths(
    start: Sequence[int], most: Sequence[int], plan: Plan
) -> Iterator[list[tuple[int, ...]]]:
    """Warm-ups that are deeper than `start` in some stage, and those that are nowhere.

    Where memory makes `start` shallower than the plan's own, at last what stages hold in turns.
    """
    replicas = [stage.replicas for stage in plan.stages]
    every = {tuple(warmups_within(most, replicas, *depth)): None for depth in DEPTHS}
    every.pop(tuple(start), None)
    for deeper in (True, False):
        yield [
            depth
            for depth in every
            if any(new > old for new, old in zip(depth, start, strict=True)) == deeper
        ]
    if any(w < stage.warmup for w, stage in zip(start, plan.stages, strict=True)):
        yield [tuple(warmups_in_turns(plan, most))]


def _leaner(trials: WarmupTrials, first: Trial | None, best: Trial) -> Trial:
    """`best`, or the same period to WORTHWHILE with fewer microbatches in flight.

    The warm-up is bisected between that of `first`, by default the plan's own, and of `best`.
    """
    low = first.warmups if first else [stage.warmup for stage in trials.plan.stages]
    high = best.warmups
    allowed_s = best.period_s * (1 + WORTHWHILE)
    steps = max(b - a for a, b in zip(low, high, strict=True))
    enough, short = steps, 0
    while enough - short > 1:
        middle = (enough + short) // 2
        found = trials.at(
            [
                min(b, a + -(-max(0, b - a) * middle // steps))
                for a, b in zip(low, high, strict=True)
            ],
        )
        if found is not None and found.fits and found.period_s <= allowed_s:
            best, enough = found, middle
        else:
            short = middle
    return best
