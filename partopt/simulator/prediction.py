"""The prediction of a plan, taken from its simulation instead of the formulas."""

from __future__ import annotations

import dataclasses

from msgspec.structs import replace

from partopt.cost.figures import figures_of
from partopt.cost.plan import under
from partopt.documents.plan import Plan
from partopt.documents.stage import Stage, device_bytes
from partopt.errors import PartoptError
from partopt.schedules import ACTION_LIMIT, schedule
from partopt.schedules.layout import STRAIGHT
from partopt.simulator.execution import Execution, execute, first_microbatches

_ALWAYS = 0.98  # of the time: a port that is used so much paces what goes through it
_ROUNDING = 1e-12


def check_actions(plan: Plan) -> None:
    """Raise PartoptError where an iteration, or settling, is too long to simulate."""
    S, M = len(plan.stages), plan.microbatches
    if 2 * S * (M or first_microbatches(plan)) <= ACTION_LIMIT:
        return
    if M is not None:
        raise PartoptError(
            f"{M} microbatches are more than {ACTION_LIMIT:,} actions to simulate",
            "give fewer `microbatches`",
            code="too-many-actions",
            microbatches=M,
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
    check_actions(plan)
    counted = plan if schedule(plan.schedule).shape == STRAIGHT else under(plan)
    execution = execute(counted)
    return with_prediction(dataclasses.replace(execution, plan=with_memory(execution)))


def with_prediction(execution: Execution) -> Plan:
    """The simulated plan, predicting what the simulation found.

    Where an asynchronous plan is slower than every load on it allows, either a port carries several
    of them, or nothing is always busy and it is bound by the microbatches in flight.
    """
    plan, period = execution.plan, execution.period_s
    estimate = plan.predicted.estimate
    if abs(period - estimate.period_s) < _ROUNDING * period:
        # the simulation confirms it; adding in another order changed the last digits
        period = estimate.period_s
    limited = execution.steady is not None and period > estimate.period_s * (1 + 1e-3)
    predicted = replace(
        plan.predicted,
        period_s=period,
        iteration_s=None if plan.microbatches is None else period * plan.microbatches,
        samples_per_s=plan.microbatch_size / period,
        figures=figures_of(plan.microbatch_size / period, plan.profile, plan.topology),
        bubble=execution.bubble,
        speedup_over_one_device=estimate.one_device_s / period,
        bound_by=_bound_by(execution) if limited else _paced_by(execution),
    )
    return replace(plan, predicted=predicted)


def _paced_by(execution: Execution) -> str:
    """What binds the period: what the formulas say, or the fill and drain of the pipeline.

    The latter where filling and draining an iteration takes longer than its slowest device works.
    """
    estimate, plan = execution.plan.predicted.estimate, execution.plan
    filling = (
        plan.microbatches is not None
        and not schedule(plan.schedule).one_at_a_time
        and plan.slowest_device_s < execution.period_s / 2
    )
    return (
        "fill and drain of the pipeline"
        if filling and "compute" in estimate.bound_by
        else estimate.bound_by
    )


def _bound_by(execution: Execution) -> str:
    busy = [
        use.level
        for use in execution.level_use
        if use.transfer_share + use.allreduce_share > _ALWAYS
    ]
    return f"ports of {busy[0]}" if busy else "microbatches in flight"


def with_memory(execution: Execution) -> Plan:
    """The simulated plan with the memory that its order takes.

    The formulas only approximate it where a device holds several stages. What a device needs
    above or below what its stages hold is added to the activations of the first of them.
    """
    plan, peaks = execution.plan, execution.peak_memory_bytes
    # by the first stage of a device: the most that any of its replicas needs
    missing: dict[int, int] = {}
    for rank, stages in plan.stages_by_rank().items():
        more = int(peaks[rank]) - device_bytes([plan.stages[s] for s in stages])
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
