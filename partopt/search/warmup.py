"""How many forwards come before the first backward, searched in the simulator.

The schedule's warm-up fills a pipeline whose messages take no time. Latency, links that are
shared and all-reduces that are waited for ask for more microbatches in flight. They take memory;
where that is short, stages hold what Little's law asks for.

    r_s   replicas of stage s
    w_s   its warm-up: forwards of a replica before its first backward
    M     microbatches of an iteration
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from msgspec.structs import replace

from partopt.cost.memory import kept_by, with_counts
from partopt.cost.messages import transfer_s
from partopt.cost.pricing import under
from partopt.cost.problem import Progress, ignore_progress
from partopt.documents.plan import Plan
from partopt.documents.stage import Stage
from partopt.errors import PartoptError
from partopt.schedules import schedule
from partopt.schedules.entry import Counts
from partopt.schedules.one_f_one_b import blocking_warmups
from partopt.search.effort import NORMAL, SearchParams
from partopt.simulator.execution import (
    Execution,
    execute_pipeline,
    simulate_plan,
    with_memory,
    with_prediction,
)

# A warm-up of all stages: (factor, number) is `factor` times the replicas behind a stage and so
# many more, over its replicas; ("pace", factor) is what is in flight at so many times the shortest
# period that the memory allows.
WarmupRule = tuple[float | str, float]
WARMUP_RULES: tuple[WarmupRule, ...] = (
    (1, 0),
    (2, 0),
    ("pace", 1.0),
    ("pace", 1.2),
    (1, 1),
    (1, 2),
    (1.5, 0),
    (3, 0),
    (4, 0),
    (6, 0),
)
# stages times microbatches of an iteration or, asynchronous, in flight: above, one simulation takes
# too long to try several
SEARCH_LIMIT = 100_000
WORTHWHILE = 1e-3  # of the period: what more memory must at least save
HALVINGS = 20  # of the interval in which the shortest period lies
ENDLESS = 2**31  # microbatches in flight where nothing limits them


@dataclass(frozen=True)
class Stages:
    """What warm-ups depend on, of every stage.

    `room` is the most microbatches in flight, `busy_s` the seconds of one, `wait_s` those of its
    message to the next stage and of its gradient back.
    """

    replicas: Sequence[int]
    room: Sequence[int]
    busy_s: Sequence[float]
    wait_s: Sequence[float]
    microbatches: int | None

    def warmups(self, rule: WarmupRule, extra: Sequence[int] = ()) -> tuple[int, ...]:
        """w_s of one rule, by `extra` deeper; no more than fit, nor than the stage before takes in.

        0 of the last stage, unless the rule is a pace.
        """
        factor, number = rule
        held = self._at_pace(number) if isinstance(factor, str) else []
        M, found, least = self.microbatches, list[int](), ENDLESS
        for s, r in enumerate(self.replicas):
            behind = sum(self.replicas[s + 1 :])
            if isinstance(factor, str):
                warmup = held[s] - 1
            else:
                warmup = int((factor * behind + r - 1 + number) // r) if behind else 0
            warmup = min(warmup + (extra[s] if extra and behind else 0), self.room[s] - 1)
            if M is not None:
                warmup = min(warmup, -(-M // r) - 1)
            if s and isinstance(factor, str) and M is None:
                # its first backward needs w r + 1 microbatches before any stage before it has one
                warmup = min(warmup, (least - 1) // r)
            elif s and (M is not None or found[-1] + 1 == self.room[s - 1]):
                warmup = min(warmup, (found[-1] + 1) * self.replicas[s - 1] // r - 1)
            found.append(max(0, warmup))
            least = min(least, (found[-1] + 1) * r)
        return tuple(found)

    def _at_pace(self, factor: float) -> list[int]:
        """Microbatches in flight at `factor` times the shortest period that the memory allows."""
        short = max(busy_s / r for busy_s, r in zip(self.busy_s, self.replicas, strict=True))
        enough = sum(self.busy_s) + sum(self.wait_s)
        for _ in range(HALVINGS):
            middle = (short + enough) / 2
            held = self._held_at(middle)
            fits = all(in_flight <= most for in_flight, most in zip(held, self.room, strict=True))
            short, enough = (short, middle) if fits else (middle, enough)
        return self._held_at(enough * factor) if enough else [1] * len(self.replicas)

    def _held_at(self, period_s: float) -> list[int]:
        """Microbatches in flight at a period.

        By Little's law: the period times what a replica holds is how long it holds a microbatch.
        Replicas take turns, so that between two microbatches there are whole periods.
        """
        held, away_s = list[int](), 0.0
        stages = list(zip(self.replicas, self.busy_s, self.wait_s, strict=True))
        for r, busy_s, wait_s in reversed(stages):
            away_s += busy_s + wait_s
            held.append(max(1, math.ceil(away_s / (r * period_s) * (1 - 1e-9))))
            away_s = max(away_s, (held[-1] - 1) * r * period_s + busy_s)
        return held[::-1]


def stages_of(plan: Plan) -> Stages | None:
    """The stages of a plan; None where one has no room for a microbatch."""
    limit, stages, topology, room = plan.memory_limit_bytes, plan.stages, plan.topology, []
    for stage in stages:
        most = ENDLESS
        if limit is not None:
            one, two = (_bytes(stage, held, plan) for held in (1, 2))
            if one > limit:
                return None
            most = 1 + (limit - one) // (two - one) if two > one else ENDLESS
            most -= most > 1 and _bytes(stage, most, plan) > limit  # every term is rounded
        room.append(most)
    waits_s = [
        2
        * transfer_s(
            (stage.input_bytes + stage.gradient_bytes) / 2,
            topology.common_level(before.ranks[-1], stage.ranks[0]),
            topology,
        )
        for before, stage in pairwise(stages)
    ]
    replicas, busy_s = [stage.replicas for stage in stages], [stage.compute_s for stage in stages]
    return Stages(replicas, room, busy_s, [*waits_s, 0.0], plan.microbatches)


def _bytes(stage: Stage, held: int, plan: Plan) -> int:
    """Bytes on a device of the stage with `held` microbatches in flight."""
    counts = Counts(held - 1, held, 1)  # schedules that take warm-ups do whole backwards
    return with_counts(stage, counts, schedule(plan.schedule), kept_by(plan)).memory.total_bytes


def fits_by_order(execution: Execution) -> bool:
    """Whether every device has room; by the order where the formulas approximate what it keeps."""
    plan, entry = execution.plan, schedule(execution.plan.schedule)
    return execution.fits if entry.split or entry.recomputes else plan.fits


class Trial(NamedTuple):
    """A plan executed at one warm-up, and whether it fits."""

    execution: Execution
    fits: bool

    @property
    def period_s(self) -> float:
        """Seconds per microbatch."""
        return self.execution.period_s

    @property
    def actions(self) -> int:
        """How many were simulated."""
        return len(self.execution.order.kind) * self.execution.copies

    @property
    def warmups(self) -> tuple[int, ...]:
        """w_s of every stage."""
        return tuple(stage.warmup for stage in self.execution.plan.stages)


def simulate_with_best_warmup(
    plan: Plan, params: SearchParams = NORMAL, progress: Progress = ignore_progress
) -> Plan:
    """`simulate_plan`, under a schedule that takes warm-ups at that with the shortest period.

    That warm-up keeps to the memory of a device where any does. Nothing is searched where the
    plan's warm-up reaches what its loads allow, or where `params` have enough. Where another is
    better, the plan says in `predicted.formula_period_s` what the usual one would have given.
    Raises PartoptError where the schedule cannot run the plan, whatever the warm-up.
    """
    if not schedule(plan.schedule).takes_warmup:
        return simulate_plan(plan)
    usual = try_warmup(plan)
    best = _best(plan, usual, params.warmup_actions, progress)
    return _predicted(best, usual) if best else simulate_plan(plan)  # which says why


def simulate_at_warmup(plan: Plan, warmups: Sequence[int]) -> Plan:
    """`simulate_plan` at these `warmups`, as `simulate_with_best_warmup` gives it where it
    chooses these.

    Raises PartoptError where the schedule cannot run the plan so.
    """
    usual = [stage.warmup for stage in plan.stages]
    if not schedule(plan.schedule).takes_warmup or list(warmups) == usual:
        return simulate_plan(plan)
    execution = execute_pipeline(under(plan, warmups=warmups))
    return _predicted(Trial(execution, fits_by_order(execution)), try_warmup(plan))


def try_warmup(plan: Plan, warmup: Sequence[int] | None = None) -> Trial | None:
    """The plan executed at a warm-up, by default at that of the plan; None where it deadlocks.

    It can while it waits for all-reduces.
    """
    try:
        execution = execute_pipeline(plan if warmup is None else under(plan, warmups=warmup))
    except PartoptError:
        return None
    return Trial(execution, fits_by_order(execution))


def _predicted(best: Trial, usual: Trial | None) -> Plan:
    """The plan of `best` with its prediction, and the period of `usual` where that is another."""
    found = with_prediction(dataclasses.replace(best.execution, plan=with_memory(best.execution)))
    if usual is not None and best.warmups == usual.warmups:
        return found
    formula_s = usual.period_s if usual is not None and usual.fits else None
    return replace(found, predicted=replace(found.predicted, formula_period_s=formula_s))


def _best(plan: Plan, usual: Trial | None, most: float, progress: Progress) -> Trial | None:
    """The best of `usual` and of those of `WARMUP_RULES` that fit, ever deeper ones.

    They end where nothing can be gained, or where `most` actions are simulated and one fits. One
    that does not fit where none does, and None where all deadlock.
    """
    stages, replicas = stages_of(plan), [stage.replicas for stage in plan.stages]
    spent = 0 if usual is None else usual.actions
    enough_s = plan.predicted.estimate.period_s * (1 + WORTHWHILE)
    best = usual if usual is not None and usual.fits else None
    for warmups in map(stages.warmups, WARMUP_RULES) if stages is not None else ():
        progress("simulating warm-ups", 0, 1)
        in_flight = max((w + 1) * r for w, r in zip(warmups, replicas, strict=True))
        long = len(replicas) * (plan.microbatches or in_flight) > SEARCH_LIMIT
        if best is not None and (long or spent > most or best.period_s <= enough_s):
            continue
        found = try_warmup(plan, warmups)
        spent += 0 if found is None else found.actions
        gained_s = math.inf if best is None else best.period_s * (1 - WORTHWHILE)
        if found is not None and found.fits and found.period_s < gained_s:
            best = found
    if best is None:
        return usual or try_warmup(plan, blocking_warmups(replicas))
    return best if best is usual else _leaner(plan, usual, best, most - spent, progress)


def _leaner(plan: Plan, usual: Trial | None, best: Trial, left: float, progress: Progress) -> Trial:
    """`best`, or the same period to WORTHWHILE with fewer microbatches in flight.

    The warm-up is bisected between that of `usual`, by default none, and of `best`, until as many
    actions as are `left` are simulated.
    """
    low = usual.warmups if usual is not None and usual.fits else (0,) * len(plan.stages)
    high, allowed_s = best.warmups, best.period_s * (1 + WORTHWHILE)
    steps = max(b - a for a, b in zip(low, high, strict=True))
    short, enough = 0, steps
    while enough - short > 1 and left > 0:
        progress("simulating warm-ups", 0, 1)
        middle = (enough + short) // 2
        warmups = [
            min(b, a + -(-max(0, b - a) * middle // steps)) for a, b in zip(low, high, strict=True)
        ]
        found = try_warmup(plan, warmups)
        left -= best.actions
        if found is not None and found.fits and found.period_s <= allowed_s:
            best, enough = found, middle
        else:
            short = middle
    return best
