"""The schedules that were tried for one problem, side by side."""

from __future__ import annotations

from collections.abc import Sequence

from partopt.documents.plan import Plan
from partopt.printable import shorten
from partopt.report.figures import speeds
from partopt.report.table import table
from partopt.report.width import stretch
from partopt.schedules import schedule
from partopt.schedules.layout import MIRRORED
from partopt.units import format_bytes, format_number, format_seconds

_GRID_WIDTH = 10
# by all of the stages, any of them
_RECOMPUTED = {(True, True): "always", (False, True): "some", (False, False): "never"}


def render(plans: Sequence[Plan]) -> str:
    """A line for the best plan under each schedule.

    GRID: pipelines side by side x devices of each, x stages of a device where it has several, or
    unequal replicas of the stages; BATCH: samples of a microbatch x M.
    """
    unit, rates = speeds([plan.predicted for plan in plans])
    headings = [
        "SCHEDULE",
        "GRID",
        "BATCH",
        "RECOMP.",
        "ITERATION",
        f"{unit.upper()}/S",
        "BUBBLE",
        "MEMORY",
        "FITS",
    ]
    return table(
        headings,
        [_cells(plan, rate) for plan, rate in zip(plans, rates, strict=True)],
        left=(0, 1, 2, 3, 8),
        gap=1,
        verdicts=(0, 8),
        spare=(3, 6, 4),
    )


def _grid(plan: Plan) -> str:
    if len({stage.replicas for stage in plan.stages}) > 1:
        return shorten(plan.shape, stretch(_GRID_WIDTH))
    held = plan.stages_by_rank()
    chunks = len(next(iter(held.values())))
    pipelines = plan.stages[0].replicas // (2 if schedule(plan.schedule).shape == MIRRORED else 1)
    return f"{pipelines}x{len(held) // pipelines}" + (f"x{chunks}" if chunks > 1 else "")


def _cells(plan: Plan, rate: float) -> list[str]:
    predicted = plan.predicted
    return [
        plan.schedule,
        _grid(plan),
        f"{plan.microbatch_size}x{plan.microbatches}",
        _RECOMPUTED[
            {stage.recompute for stage in plan.stages} == {True},
            any(stage.recompute for stage in plan.stages),
        ],
        format_seconds(predicted.iteration_s or 0.0),
        format_number(rate),
        f"{predicted.bubble:.1%}",
        format_bytes(plan.peak_memory_bytes),
        "yes" if plan.fits else "no",
    ]
