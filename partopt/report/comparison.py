"""Several plans of one problem side by side."""

from __future__ import annotations

from collections.abc import Sequence

from partopt import documents
from partopt.cost.period import stage_variance
from partopt.documents.plan import Plan
from partopt.report.table import shorten, table
from partopt.units import format_bytes, format_seconds


class Row(documents.Part, frozen=True, kw_only=True):
    """One plan of a comparison. `stage_variance_s2` is the variance of the stages' C / r."""

    planner: str
    shape: str
    stages: int
    period_s: float
    samples_per_s: float
    speedup_over_one_device: float
    speedup_over_data_parallel: float | None
    peak_memory_bytes: int
    fits: bool
    stage_variance_s2: float


class Comparison(documents.Part, frozen=True, kw_only=True):
    """Plans for the same model and cluster, fastest first."""

    schema: str = "partopt.comparison/1"
    rows: list[Row]


def compare(plans: dict[str, Plan], data_parallel: Plan | None) -> Comparison:
    """The comparison of `plans` by name; ties keep their order.

    `data_parallel` is None where the schedule cannot have it.
    """
    base_s = data_parallel.predicted.period_s if data_parallel else None
    rows = [
        Row(
            planner=name,
            shape=plan.shape,
            stages=len(plan.stages),
            period_s=plan.predicted.period_s,
            samples_per_s=plan.predicted.samples_per_s,
            speedup_over_one_device=plan.predicted.speedup_over_one_device,
            speedup_over_data_parallel=None if base_s is None else base_s / plan.predicted.period_s,
            peak_memory_bytes=plan.peak_memory_bytes,
            fits=plan.fits,
            stage_variance_s2=stage_variance(plan),
        )
        for name, plan in plans.items()
    ]
    return Comparison(rows=sorted(rows, key=lambda row: row.period_s))


def render(comparison: Comparison) -> str:
    """The comparison as a table of 80 columns; its variance is in ms^2."""
    headings = [
        "PLANNER",
        "SHAPE",
        "STAGES",
        "PERIOD",
        "SAMPLES/S",
        "x ONE",
        "x DP",
        "MEMORY",
        "FITS",
        "VAR",
    ]
    return table(headings, [_cells(row) for row in comparison.rows], left=(0, 1, 8), gap=1)


def _cells(row: Row) -> list[str]:
    return [
        shorten(row.planner, 13),
        shorten(row.shape, 8),
        str(row.stages),
        format_seconds(row.period_s),
        f"{row.samples_per_s:,.{0 if row.samples_per_s >= 1000 else 2}f}",
        f"{row.speedup_over_one_device:.2f}",
        "-" if row.speedup_over_data_parallel is None else f"{row.speedup_over_data_parallel:.2f}",
        format_bytes(row.peak_memory_bytes),
        "yes" if row.fits else "no",
        _variance(row.stage_variance_s2 * 1e6),
    ]


def _variance(value: float) -> str:
    """Three digits where that is enough; never more than five characters, up to 1e+99."""
    return (
        f"{value:.0f}"
        if 100 <= value < 99999.5
        else f"{value:.3g}"
        if value < 100
        else f"{value:.0e}"
    )


def render_beside(plan: Plan, others: Sequence[Plan]) -> str:
    """A line for each of `others`, plans of the same problem: how it compares with `plan`, and
    whether it fits.
    """
    rows = [
        [
            other.planner,
            shorten(other.shape, 12),
            format_seconds(other.predicted.period_s),
            f"{other.predicted.speedup_over_one_device:.2f} times one device",
            format_bytes(other.peak_memory_bytes),
            _verdict(plan, other),
        ]
        for other in others
    ]
    return table(["BESIDE IT", "SHAPE", "PERIOD", "SPEED", "MEMORY", ""], rows, left=(0, 1, 5))


def _verdict(plan: Plan, other: Plan) -> str:
    if not other.fits:
        return "does not fit"
    return "faster" if other.predicted.samples_per_s > plan.predicted.samples_per_s else ""
