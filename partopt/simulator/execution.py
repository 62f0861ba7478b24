"""A plan executed by its schedule: every action, and the metrics derived from them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from partopt.cost.estimate import idle_share
from partopt.cost.plan import layout_of
from partopt.documents.plan import Plan
from partopt.schedules import order, schedule
from partopt.schedules.order import F, Order, in_flight
from partopt.simulator.engine import simulate
from partopt.simulator.memory import peak_memory_bytes
from partopt.simulator.metrics import LevelUse, Shares, level_use, longest_span_s, shares
from partopt.simulator.steady import (
    Steady,
    microbatches_to_settle,
    microbatches_to_tell,
    steady_state,
)
from partopt.simulator.timeline import Timeline
from partopt.simulator.work import Work, work_of

# actions after which an asynchronous plan that has not settled is taken at its mean pace
SETTLE_LIMIT = 300_000
# of the first run: where two whole cycles of all replicas are more, they are not waited for
FIRST_LIMIT = 3_000_000


@dataclass(frozen=True, eq=False)
class Execution:
    """A plan, and the run of an iteration or, asynchronous, of many microbatches.

    `start_s` to `end_s` is one iteration or, asynchronous, one cycle of its steady state.
    """

    plan: Plan
    order: Order
    work: Work
    timeline: Timeline
    steady: Steady | None
    start_s: float
    end_s: float

    @property
    def makespan_s(self) -> float:
        """Seconds from the first action to the end of the last."""
        return float(self.timeline.makespan)

    @cached_property
    def microbatches(self) -> int:
        """Microbatches that passed through."""
        return int(self.order.microbatch[self.order.kind == F].max()) + 1

    @property
    def period_s(self) -> float:
        """Seconds per microbatch: in steady state, or of an iteration over its microbatches."""
        return self.makespan_s / self.microbatches if self.steady is None else self.steady.period_s

    @cached_property
    def shares(self) -> Shares:
        """What every rank did between `start_s` and `end_s`."""
        return shares(self.timeline, self.work, self.start_s, self.end_s)

    @cached_property
    def level_use(self) -> list[LevelUse]:
        """How busy the links were between `start_s` and `end_s`."""
        return level_use(self.timeline, self.work, self.start_s, self.end_s)

    @property
    def bubble(self) -> float:
        """Idle share of the time of the ranks with work, between `start_s` and `end_s`."""
        return idle_share(self.plan, self.period_s)

    @property
    def longest_span_s(self) -> float:
        """The longest time from the first to the last computation of one rank."""
        return longest_span_s(self.timeline)

    @cached_property
    def peak_in_flight(self) -> NDArray[np.int64]:
        """The most microbatches that each rank holds at once, shape (ranks,).

        Those of all of its chunks count together.
        """
        return in_flight(self.order)

    @cached_property
    def peak_memory_bytes(self) -> NDArray[np.int64]:
        """Bytes that each rank holds at most, shape (ranks,)."""
        return peak_memory_bytes(self.order, self.plan)


def execute(plan: Plan, microbatches: int | None = None) -> Execution:
    """Execute `plan` under its schedule.

    It runs for one iteration or, asynchronous, for `microbatches`, by default as many as it takes
    to settle. Raises PartoptError where the schedule deadlocks or cannot run the plan.
    """
    entry = schedule(plan.schedule)
    work = work_of(plan, entry.recomputes)
    if not entry.asynchronous or microbatches is not None:
        return _run(plan, work, microbatches if entry.asynchronous else None)
    count = first_microbatches(plan)
    while True:
        execution = _run(plan, work, count)
        assert execution.steady is not None
        if execution.steady.settled or 4 * count * len(plan.stages) > SETTLE_LIMIT:
            return execution
        count *= 2


def first_microbatches(plan: Plan) -> int:
    """How many microbatches pass through an asynchronous plan at first.

    They are as many as it takes to settle. Where that is long, for numbers of replicas have a large
    common multiple, they are enough for a mean pace.
    """
    replicas = [stage.replicas for stage in plan.stages]
    depth = (plan.stages[0].warmup + 1) * replicas[0]
    to_settle, each = microbatches_to_settle(depth, replicas), 2 * len(plan.stages)
    if to_settle * each <= FIRST_LIMIT:
        return to_settle
    return min(to_settle, max(microbatches_to_tell(depth, replicas), SETTLE_LIMIT // each))


def _run(plan: Plan, work: Work, microbatches: int | None) -> Execution:
    actions = order(plan.schedule, layout_of(plan, microbatches))
    timeline = simulate(actions, work)
    if not schedule(plan.schedule).asynchronous:
        return Execution(plan, actions, work, timeline, None, 0.0, float(timeline.makespan))
    steady = steady_state(timeline, [stage.replicas for stage in plan.stages])
    return Execution(plan, actions, work, timeline, steady, steady.start_s, steady.end_s)
