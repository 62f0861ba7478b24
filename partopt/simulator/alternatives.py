"""Schedules that would serve a plan better than its own."""

from __future__ import annotations

from collections.abc import Iterator

from partopt.documents.plan import Plan
from partopt.documents.simulation import Finding
from partopt.schedules import SCHEDULES, refusal
from partopt.schedules.layout import LOOPED, STRAIGHT
from partopt.simulator.case import Case, finding
from partopt.simulator.change import suggest
from partopt.simulator.closed_forms import Pipeline, idle_share, pipeline_of
from partopt.simulator.execution import Execution, execute
from partopt.simulator.restate import with_conditions
from partopt.units import format_bytes, format_seconds

TRIED_ACTIONS = 300_000  # of an execution that is repeated under another schedule
BETTER_SCHEDULE = 0.02  # of the time: what another schedule must save to be worth the trouble


def other_schedules(case: Case) -> Iterator[Finding]:
    """Schedules that would be faster than the plan's.

    One that the stages can run on their present ranks is simulated; one with two stages on each
    device is estimated by the closed forms.
    """
    plan = case.plan
    if plan.microbatches is None or plan.schedule not in SCHEDULES or len(plan.stages) == 1:
        return
    same, other = _same_layout(plan), _other_layout(plan, pipeline_of(plan))
    if same is not None and len(case.execution.order.kind) <= TRIED_ACTIONS:
        yield from _compare(case.execution, same)
    if other is not None:
        yield from _estimate(plan, other)


def _compare(execution: Execution, name: str) -> Iterator[Finding]:
    """The same stages on the same ranks under the schedule `name`, where that is faster."""
    now_s, other = execution.period_s, execute(with_conditions(execution.plan, name))
    if other.period_s >= now_s * (1 - BETTER_SCHEDULE):
        return
    memory = format_bytes(float(other.peak_memory_bytes.max()))
    yield finding(
        "schedule",
        "loss",
        1 - other.period_s / now_s,
        "of the time",
        f"{execution.plan.schedule} takes {format_seconds(now_s)} a microbatch; the same stages "
        f"take under {name} {format_seconds(other.period_s)} and {memory} a device",
        suggest("simulate", schedule=name),
    )


def _estimate(plan: Plan, name: str) -> Iterator[Finding]:
    """The idle time under the schedule `name` with two stages on each device, where it is less."""
    of = pipeline_of(plan)
    now, then = idle_share(plan.schedule, of), idle_share(name, of._replace(v=2))
    if then >= now - BETTER_SCHEDULE:
        return
    yield finding(
        "chunks",
        "loss",
        now - then,
        "of the time",
        f"equal stages wait under {plan.schedule} for {now:.1%} of the time, under {name} for "
        f"{then:.1%}",
        suggest("solve", schedule=name, chunks=2),
    )


def _same_layout(plan: Plan) -> str | None:
    """The schedule with smaller bubbles that the stages can run on their present ranks."""
    even, entry = len({stage.replicas for stage in plan.stages}) == 1, SCHEDULES[plan.schedule]
    if entry.one_at_a_time:
        return "1f1b"
    if entry.split or not even:
        return None
    able = (n for n, other in SCHEDULES.items() if other.split and other.shape == entry.shape)
    return next(able, None)


def _other_layout(plan: Plan, of: Pipeline) -> str | None:
    """The schedule that would give a device two stages, where it could run this model."""
    even, entry = len({stage.replicas for stage in plan.stages}) == 1, SCHEDULES[plan.schedule]
    able = (
        even
        and not entry.one_at_a_time
        and entry.shape == STRAIGHT
        and plan.stages[-1].stop >= 2 * of.P
    )
    looped = (
        name
        for name, other in SCHEDULES.items()
        if (other.shape, other.split) == (LOOPED, entry.split)
        and refusal(name, of.P, 2, of.M) is None
    )
    return next(looped, None) if able else None
