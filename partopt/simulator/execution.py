"""A plan executed by its schedule, or by a user's order, and the prediction from it."""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from partopt.cost.estimate import idle_share
from partopt.cost.figures import figures_of
from partopt.cost.pricing import under, with_counts_of, with_steps_of
from partopt.documents.actions import F, I
from partopt.documents.plan import Plan
from partopt.documents.simulation import LevelTime
from partopt.documents.stage import device_bytes
from partopt.errors import PartoptError
from partopt.schedules import ACTION_LIMIT, schedule
from partopt.schedules.order import Order, in_flight
from partopt.schedules.placement import STRAIGHT, placement_of
from partopt.schedules.torch_csv import from_csv
from partopt.simulator.kernel import simulate
from partopt.simulator.memory import peak_memory_bytes
from partopt.simulator.metrics import Shares, level_use, shares
from partopt.simulator.runs import NumberedPlan, Runs, number_plan, work_of
from partopt.simulator.steady import Steady, microbatches_at_first
from partopt.simulator.timeline import Timeline
from partopt.simulator.work import Work

_ALWAYS = 0.98  # of the time: a port that is used so much paces what goes through it
_ROUNDING = 1e-12


@dataclass(frozen=True, eq=False)
class Execution:
    """A plan, and the run of an iteration or, asynchronous, of many microbatches.

    `start_s` to `end_s` is one iteration or, asynchronous, one cycle of its steady state. The run
    is of one pipeline, which stands for `copies` that are alike.
    """

    plan: Plan
    order: Order
    work: Work
    timeline: Timeline
    steady: Steady | None
    start_s: float
    end_s: float
    copies: int = 1

    @property
    def makespan_s(self) -> float:
        """Seconds from the first action to the end of the last."""
        return float(self.timeline.makespan)

    @cached_property
    def microbatches(self) -> int:
        """Microbatches that passed through, in all pipelines."""
        return self.copies * (int(self.order.microbatch[self.order.kind == F].max()) + 1)

    @property
    def period_s(self) -> float:
        """Seconds per microbatch: in steady state, or of an iteration over its microbatches."""
        if self.steady is None:
            return self.makespan_s / self.microbatches
        return self.steady.period_s / self.copies

    @property
    def time_s(self) -> float:
        """Seconds of an iteration or, asynchronous, of a microbatch."""
        return self.makespan_s if self.steady is None else self.period_s

    @cached_property
    def shares(self) -> Shares:
        """What every rank did between `start_s` and `end_s`."""
        return shares(self.timeline, self.work, self.start_s, self.end_s)

    @cached_property
    def level_use(self) -> list[LevelTime]:
        """How busy the links were between `start_s` and `end_s`."""
        return level_use(self.timeline, self.work, self.start_s, self.end_s)

    @property
    def bubble(self) -> float:
        """Idle share of the time of the ranks with work, between `start_s` and `end_s`."""
        return idle_share(self.plan, self.period_s)

    @cached_property
    def peak_in_flight(self) -> NDArray[np.int64]:
        """The most microbatches that every rank holds at once, shape (ranks,).

        Those of all of its chunks count together.
        """
        return in_flight(self.order)

    @cached_property
    def peak_memory_bytes(self) -> NDArray[np.int64]:
        """Bytes that every rank holds at most, shape (ranks,)."""
        return peak_memory_bytes(self.order, self.plan, self.work.ranks)

    @property
    def fits(self) -> bool:
        """Whether every device has room for the most that it holds at once."""
        limit = self.plan.memory_limit_bytes
        return limit is None or int(self.peak_memory_bytes.max()) <= limit


def execute(plan: Plan, microbatches: int | None = None) -> Execution:
    """Execute `plan` under its schedule.

    It runs for one iteration or, asynchronous, for `microbatches`, by default as many as it takes
    to settle. Raises PartoptError where the schedule deadlocks or cannot run the plan.
    """
    return _execute(plan, *number_plan(plan, whole=True), microbatches)


def execute_pipeline(plan: Plan) -> Execution:
    """`execute`, of one pipeline where all of the plan's are alike: what it does they do.

    Raises PartoptError where that is too long to simulate, too.
    """
    runs, numbers = number_plan(plan)
    check_actions(plan, runs.first_count(numbers))
    return _execute(plan, runs, numbers)


def _execute(
    plan: Plan, runs: Runs, numbers: NumberedPlan, microbatches: int | None = None
) -> Execution:
    """Execute a plan in numbers."""
    run, steady = runs.settle(numbers, microbatches)
    timeline, copies = run.timeline, numbers.pipeline.copies
    span = (steady.start_s, steady.end_s) if steady else (0.0, float(timeline.makespan))
    return Execution(plan, run.order, run.work, timeline, steady, *span, copies)


def first_microbatches(plan: Plan) -> int:
    """How many microbatches pass through an asynchronous plan at first."""
    return microbatches_at_first(plan.stages[0].warmup, [stage.replicas for stage in plan.stages])


def microbatches_in(text: str, plan: Plan) -> int:
    """The microbatches that a CSV passes through all pipelines of the plan.

    The largest number in it gives them. Raises PartoptError where it has no actions.
    """
    numbers = [int(found) for found in re.findall(r"[0-9]{1,7}[FBIW]([0-9]{1,7})", text)]
    if not numbers:
        raise PartoptError(
            "it has no actions",
            "a cell is a stage, one of F B I W and a microbatch, like 2F0",
            code="no-actions",
        )
    return (max(numbers) + 1) * plan.stages[0].replicas


def execute_csv(text: str, name: str, plan: Plan, microbatches: int) -> Execution:
    """Execute a user's order, `text` called `name`, on the stages of `plan`.

    The text is a compute-only CSV as torch executes it, and one iteration of a synchronous
    schedule. Raises PartoptError that names the cell, or the rank and the action, where it is
    malformed, does not match this plan or deadlocks.
    """
    synchronous = replace(plan.with_layout(schedule=name), microbatches=microbatches)
    synchronous = with_steps_of(synchronous, plan)
    actions = from_csv(text, placement_of(synchronous))
    alike = "zb-h1" if (actions.kind == I).any() else "1f1b"  # with backwards in two parts or whole
    waits = (name, alike) if plan.waits else ()  # as under the plan's schedule
    synchronous = synchronous.with_engine(allreduce="overlap", waits=waits)
    counted = with_counts_of(actions, synchronous, schedule(alike))
    work = work_of(counted.with_layout(schedule=alike))
    timeline = simulate(actions, work)
    return Execution(counted, actions, work, timeline, None, 0.0, float(timeline.makespan))


def check_actions(plan: Plan, count: int | None = None) -> None:
    """Raise PartoptError where an iteration, or settling, is too long to simulate.

    It passes `count` microbatches, by default those of all pipelines of the plan.
    """
    S, M = len(plan.stages), plan.microbatches
    if 2 * S * (count or M or first_microbatches(plan)) <= ACTION_LIMIT:
        return
    if M is not None:
        raise PartoptError(
            f"{M} microbatches are more than {ACTION_LIMIT:,} actions to simulate",
            "give fewer `microbatches`",
            code="too-many-actions",
            limit=ACTION_LIMIT,
        )
    raise PartoptError(
        f"{S:,} stages on {len(plan.stages_by_rank()):,} devices: until {plan.schedule} settles, "
        f"there are more than {ACTION_LIMIT:,} actions to simulate",
        "use fewer devices, or a schedule with a flush: `schedule=1f1b`",
        code="too-many-actions",
        limit=ACTION_LIMIT,
    )


def simulate_plan(plan: Plan) -> Plan:
    """The plan with its prediction taken from its simulation.

    That is the period, iteration, speed and bubble, and what binds the period. Where devices hold
    several stages, what they keep in flight is counted too.
    """
    counted = plan if schedule(plan.schedule).shape == STRAIGHT else under(plan)
    execution = execute_pipeline(counted)
    return with_prediction(dataclasses.replace(execution, plan=with_memory(execution)))


def with_prediction(execution: Execution) -> Plan:
    """The simulated plan, predicting what the simulation found."""
    plan, period = execution.plan, execution.period_s
    estimate = plan.predicted.estimate
    if abs(period - estimate.period_s) < _ROUNDING * period:
        # the simulation confirms it; adding in another order changed the last digits
        period = estimate.period_s
    predicted = replace(
        plan.predicted,
        period_s=period,
        iteration_s=None if plan.microbatches is None else period * plan.microbatches,
        samples_per_s=plan.microbatch_size / period,
        figures=figures_of(plan.microbatch_size / period, plan.profile, plan.topology),
        bubble=execution.bubble,
        speedup_over_one_device=estimate.one_device_s / period,
        bound_by=_bound_by(execution, period),
    )
    return replace(plan, predicted=predicted)


def _bound_by(execution: Execution, period_s: float) -> str:
    """What binds the period.

    Where an asynchronous plan is slower than every load on it allows, either a port carries several
    of them, or nothing is always busy and it is bound by the microbatches in flight. Where the
    slowest device works for less than half of an iteration, filling and draining the pipeline binds
    it. Otherwise it is what the formulas say.
    """
    plan, estimate = execution.plan, execution.plan.predicted.estimate
    if execution.steady is not None and period_s > estimate.period_s * (1 + 1e-3):
        for use in execution.level_use:
            if use.transfer_share + use.allreduce_share > _ALWAYS:
                return f"ports of {use.level}"
        return "microbatches in flight"
    filling = (
        plan.microbatches is not None
        and not schedule(plan.schedule).one_at_a_time
        and plan.slowest_device_s < execution.period_s / 2
        and "compute" in estimate.bound_by
    )
    return "fill and drain of the pipeline" if filling else estimate.bound_by


def with_memory(execution: Execution) -> Plan:
    """The simulated plan with the memory that its order takes.

    The formulas only approximate it where a device holds several stages. What a device needs
    above or below what its stages hold is added to the activations of the first of them.
    """
    plan, peaks = execution.plan, execution.peak_memory_bytes
    # by the first stage of a device: the most that any of its replicas needs
    missing: dict[int, int] = {}
    by_rank = defaultdict[int, list[int]](list)
    for s, ranks in enumerate(execution.work.ranks):
        for rank in ranks:
            by_rank[rank].append(s)
    for rank, held in by_rank.items():
        more = int(peaks[rank]) - device_bytes([plan.stages[s] for s in held])
        missing[held[0]] = max(missing.get(held[0], more), more)
    stages = list(plan.stages)
    for s, more in missing.items():
        memory = stages[s].memory
        activations = max(0, memory.activations_bytes + more)
        total = memory.total_bytes + activations - memory.activations_bytes
        changed = replace(memory, activations_bytes=activations, total_bytes=total)
        stages[s] = replace(stages[s], memory=changed)
    return replace(plan, stages=stages)
