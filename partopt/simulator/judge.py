"""A plan executed by its schedule: what it would really do, in place of what the formulas say."""

from __future__ import annotations

from dataclasses import dataclass
from dataclasses import replace as replaced
from functools import cached_property

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from partopt.cost.period import utilisation
from partopt.documents.plan import Plan, Stage
from partopt.errors import PartoptError
from partopt.schedules import order, schedule
from partopt.schedules.in_flight import in_flight
from partopt.schedules.layout import STRAIGHT
from partopt.schedules.order import F, Order
from partopt.simulator.execute import simulate
from partopt.simulator.memory import peak_memory_bytes
from partopt.simulator.metrics import LevelUse, Shares, level_use, longest_span_s, shares
from partopt.simulator.restate import layout_of, restated
from partopt.simulator.steady import Steady, microbatches_to_settle, steady_state
from partopt.simulator.timeline import Timeline
from partopt.simulator.work import Work, work_of

ACTION_LIMIT = 20_000_000  # of one simulation: some 2 GB and half a minute
# actions after which an asynchronous plan that has not settled is taken at its mean pace
SETTLE_LIMIT = 300_000
_ALWAYS = 0.98  # of the time: a port that is used so much paces what goes through it
_ROUNDING = 1e-12


@dataclass(frozen=True, eq=False)
class Simulation:
    """A plan and what became of it.

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
        computes = [stage.compute_s for stage in self.plan.stages]
        return max(0.0, 1.0 - utilisation(computes, len(self.plan.stages_by_rank()), self.period_s))

    @property
    def longest_span_s(self) -> float:
        """The longest time from the first to the last computation of one rank."""
        return longest_span_s(self.timeline)

    @cached_property
    def peak_in_flight(self) -> NDArray[np.int64]:
        """Microbatches that each rank holds at most, those of all of its chunks together; shape
        (ranks,).
        """
        return in_flight(self.order)

    @cached_property
    def peak_memory_bytes(self) -> NDArray[np.int64]:
        """Bytes that each rank holds at most, shape (ranks,)."""
        return peak_memory_bytes(self.order, self.plan)


def simulation_of(plan: Plan, microbatches: int | None = None) -> Simulation:
    """Execute `plan` under its schedule: an iteration or, asynchronous, `microbatches` or as many
    as it takes to settle.

    Raises PartoptError where the schedule deadlocks or cannot run the plan.
    """
    if not schedule(plan.schedule).asynchronous:
        return _run(plan, None)
    if microbatches is not None:
        return _run(plan, microbatches)
    replicas = [stage.replicas for stage in plan.stages]
    count = microbatches_to_settle((plan.stages[0].warmup + 1) * replicas[0], replicas)
    while True:
        simulation = _run(plan, count)
        assert simulation.steady is not None
        if simulation.steady.settled or 4 * count * len(plan.stages) > SETTLE_LIMIT:
            return simulation
        count *= 2


def _run(plan: Plan, microbatches: int | None) -> Simulation:
    entry = schedule(plan.schedule)
    actions = order(plan.schedule, layout_of(plan, microbatches))
    work = work_of(plan, entry.recomputes)
    timeline = simulate(actions, work)
    if not entry.asynchronous:
        return Simulation(plan, actions, work, timeline, None, 0.0, float(timeline.makespan))
    steady = steady_state(timeline, [stage.replicas for stage in plan.stages])
    return Simulation(plan, actions, work, timeline, steady, steady.start_s, steady.end_s)


def check_actions(plan: Plan) -> None:
    """PartoptError where an iteration is too long to simulate."""
    if len(plan.stages) * 2 * (plan.microbatches or 1) > ACTION_LIMIT:
        raise PartoptError(
            f"{plan.microbatches} microbatches are more than {ACTION_LIMIT:,} actions to simulate",
            "give fewer",
        )


def judged(plan: Plan) -> Plan:
    """The plan with what it predicts taken from its simulation: period, iteration, speed and
    bubble; and what binds it.

    Where devices hold several stages, what they keep in flight is counted too.
    """
    check_actions(plan)
    counted = plan if schedule(plan.schedule).shape == STRAIGHT else restated(plan)
    simulation = simulation_of(counted)
    return with_prediction(replaced(simulation, plan=with_memory(simulation)))


def with_prediction(simulation: Simulation) -> Plan:
    """The simulated plan, predicting what the simulation found.

    Where an asynchronous plan is slower than every load on it allows, either a port carries several
    of them, or nothing is always busy and it is bound by the microbatches in flight.
    """
    plan, period = simulation.plan, simulation.period_s
    estimate = plan.predicted.estimate
    if abs(period - estimate.period_s) < _ROUNDING * period:
        # the simulation confirms it; adding in another order changed the last digits
        period = estimate.period_s
    limited = simulation.steady is not None and period > estimate.period_s * (1 + 1e-3)
    predicted = replace(
        plan.predicted,
        period_s=period,
        iteration_s=None if plan.microbatches is None else period * plan.microbatches,
        samples_per_s=plan.microbatch_size / period,
        bubble=simulation.bubble,
        speedup_over_one_device=estimate.one_device_s / period,
        bound_by=_bound_by(simulation) if limited else _paced_by(simulation),
    )
    return replace(plan, predicted=predicted)


def _paced_by(simulation: Simulation) -> str:
    """What the formulas say, unless an iteration is filled and drained for longer than its slowest
    device works.
    """
    estimate, plan = simulation.plan.predicted.estimate, simulation.plan
    filling = (
        plan.microbatches is not None
        and not schedule(plan.schedule).one_at_a_time
        and plan.slowest_device_s < simulation.period_s / 2
    )
    return (
        "fill and drain of the pipeline"
        if filling and "compute" in estimate.bound_by
        else estimate.bound_by
    )


def _bound_by(simulation: Simulation) -> str:
    busy = [
        use.level
        for use in simulation.level_use
        if use.transfer_share + use.allreduce_share > _ALWAYS
    ]
    return f"ports of {busy[0]}" if busy else "microbatches in flight"


def with_memory(simulation: Simulation) -> Plan:
    """The simulated plan with the memory that its order takes, where the formulas only come near:
    what is recomputed ahead of a late W.

    What a device needs beside or below the sum of its stages is put to the activations of the first
    of them.
    """
    plan, peaks = simulation.plan, simulation.peak_memory_bytes
    # by the first stage of a device; of its replicas the one that needs most
    missing: dict[int, int] = {}
    for rank, stages in plan.stages_by_rank().items():
        more = int(peaks[rank]) - sum(plan.stages[s].memory.total_bytes for s in stages)
        missing[stages[0]] = max(missing.get(stages[0], more), more)
    return replace(
        plan,
        stages=[_with_activations(stage, missing.get(s, 0)) for s, stage in enumerate(plan.stages)],
    )


def _with_activations(stage: Stage, more: int) -> Stage:
    own = stage.memory
    more = max(more, -own.activations_bytes)
    return replace(
        stage,
        memory=replace(
            own, activations_bytes=own.activations_bytes + more, total_bytes=own.total_bytes + more
        ),
    )
