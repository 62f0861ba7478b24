"""Schedules that would serve a plan better than its own."""

from __future__ import annotations

from collections.abc import Iterator

from partopt.documents.plan import Plan
from partopt.schedules import SCHEDULES, refusal
from partopt.schedules.layout import LOOPED, STRAIGHT
from partopt.simulator.closed_forms import Pipeline, idle_share, pipeline_of
from partopt.simulator.execution import Execution, execute
from partopt.simulator.finding import Finding
from partopt.simulator.restate import restated
from partopt.units import format_bytes, format_seconds

TRIED_ACTIONS = 300_000  # of an execution that is repeated under other schedules
BETTER_SCHEDULE = 0.02  # of the time: what another schedule must save to be worth the trouble


def alternatives(execution: Execution) -> Iterator[Finding]:
    """Of the schedules that these stages could run as they lie, what they would really take; of the
    others, the closed forms.
    """
    plan = execution.plan
    if plan.microbatches is None or plan.schedule not in SCHEDULES or len(plan.stages) == 1:
        return
    yield from _executed(execution, _same_layout(plan))
    of = pipeline_of(plan)
    now = idle_share(plan.schedule, of)
    others = {
        name: (idle_share(name, of._replace(v=2)), f"partopt plan --schedule {name} --chunks 2")
        for name in _other_layout(plan, of)
    }
    others = {name: found for name, found in others.items() if found[0] < now - BETTER_SCHEDULE}
    if others:
        waits = ", ".join(f"under {name} for {share:.1%}" for name, (share, _) in others.items())
        yield Finding(
            kind="chunks",
            severity="loss",
            value=now - min(share for share, _ in others.values()),
            unit="of the time",
            text=f"equal stages wait under {plan.schedule} for {now:.1%} of the time, {waits}",
            change=", or ".join(how for _, how in others.values()),
        )


def _executed(execution: Execution, names: list[str]) -> Iterator[Finding]:
    if len(execution.order.kind) > TRIED_ACTIONS:
        return
    now = execution.period_s
    tried = {name: execute(restated(execution.plan, name)) for name in names}
    better = {
        name: each for name, each in tried.items() if each.period_s < now * (1 - BETTER_SCHEDULE)
    }
    if better:
        would = ", ".join(
            (
                f"{name} {format_seconds(each.period_s)} and "
                f"{format_bytes(float(each.peak_memory_bytes.max()))}"
            )
            for name, each in better.items()
        )
        yield Finding(
            kind="schedule",
            severity="loss",
            value=1 - min(each.period_s for each in better.values()) / now,
            unit="of the time",
            text=(
                f"{execution.plan.schedule} takes {format_seconds(now)} a microbatch; the "
                f"same stages take under {would} a device"
            ),
            change=", or ".join(f"--schedule {name}" for name in better),
        )


def _same_layout(plan: Plan) -> list[str]:
    """Schedules with smaller bubbles that the stages can run as they lie."""
    if plan.schedule == "naive":
        return ["1f1b"]
    even, entry = len({stage.replicas for stage in plan.stages}) == 1, SCHEDULES[plan.schedule]
    if entry.split or not even:
        return []
    return {STRAIGHT: ["zb-h1"], LOOPED: ["interleaved-zb"]}.get(entry.shape, [])


def _other_layout(plan: Plan, of: Pipeline) -> list[str]:
    """The schedule that would give a device two stages, where it could run this model."""
    even, entry = len({stage.replicas for stage in plan.stages}) == 1, SCHEDULES[plan.schedule]
    looped = "interleaved-zb" if entry.split else "interleaved"
    able = (
        even
        and plan.schedule != "naive"
        and entry.shape == STRAIGHT
        and plan.stages[-1].stop >= 2 * of.P
    )
    return [looped] if able and refusal(looped, of.P, 2, of.M) is None else []
