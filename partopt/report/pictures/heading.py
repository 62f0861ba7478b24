"""What stands above pictures of plans and of what they do."""

from __future__ import annotations

from partopt.documents.plan import Plan
from partopt.report.basis import basis_text
from partopt.report.pictures.look import Heading
from partopt.simulator.execution import Execution
from partopt.units import format_seconds


def heading_of_timeline(execution: Execution) -> Heading:
    """The heading of a plan's timeline."""
    parts = _parts(execution.plan, execution.microbatches, execution.period_s, execution.bubble)
    ranks = len(execution.plan.stages_by_rank())
    about = (
        f"Timeline of {ranks} ranks and {execution.microbatches} microbatches: a row for each "
        "rank, a box for each of its actions."
    )
    return Heading(parts, _sentences(about, parts, execution.plan.profile.estimated))


def heading_of_plan(plan: Plan, about: str) -> Heading:
    """The heading of a plan; `about` is a sentence of what the picture shows."""
    predicted = plan.predicted
    parts = _parts(plan, plan.microbatches, predicted.period_s, predicted.bubble)
    return Heading(parts, _sentences(about, parts, plan.profile.estimated))


def _parts(plan: Plan, microbatches: int | None, period_s: float, bubble: float) -> tuple[str, ...]:
    """The model, the schedule, devices, microbatches, the time, and the idle share of devices."""
    each = plan.topology.group_ranks
    devices, used = plan.topology.devices * each, len(plan.stages_by_rank()) * each
    groups = "" if each == 1 else f" in groups of {each}"
    time = f"{format_seconds(period_s)} a microbatch"
    if plan.microbatches is not None and microbatches is not None:
        time = f"{format_seconds(period_s * microbatches)} an iteration"
    return (
        plan.profile.name,
        plan.schedule,
        (f"{devices}" if used == devices else f"{used} of {devices}") + f" devices{groups}",
        *([f"{microbatches} microbatches"] if microbatches else []),
        time,
        f"idle {bubble:.1%}",
    )


def _sentences(about: str, parts: tuple[str, ...], estimated: str | None) -> str:
    """What a picture shows, its heading, and what its times rest on."""
    basis = "" if estimated is None else f"; {basis_text(estimated)}"
    return f"{about} {', '.join(parts)}{basis}."
