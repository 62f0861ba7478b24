"""Several plans of one problem side by side."""

from __future__ import annotations

from collections.abc import Sequence

from partopt.documents.comparison import Comparison, ComparisonRow
from partopt.documents.plan import Plan
from partopt.printable import shorten
from partopt.report.basis import basis_lines
from partopt.report.figures import bought, has_price, speeds
from partopt.report.table import label_lines, paragraph, table
from partopt.report.topology import cluster_lines, price_lines, speedup_text
from partopt.report.width import stretch
from partopt.units import format_bytes, format_number, format_seconds

_TIMES = "x ONE, x DP: times one device, data parallelism."
_LEGENDS = {
    "VAR": f"{_TIMES} VAR: variance of stages, ms^2.",
    "PER 1.00": f"{_TIMES} PER 1.00: samples for 1.00.",
    "PRICE": f"{_TIMES} PRICE: period longer than the best.",
}

_PLANNER = 13  # columns of a planner's name, `data_parallel` the longest


def render(comparison: Comparison) -> str:
    """The model and the cluster, and the plans as a table."""
    head = [
        (
            "model",
            f"{comparison.model}: {comparison.layers} layers, microbatch "
            f"{comparison.microbatch_size}, schedule {comparison.schedule}",
        ),
        *cluster_lines(comparison.topology),
        *price_lines(comparison.topology),
        *basis_lines(comparison.estimated),
    ]
    last = _last_column(comparison)
    return "\n\n".join([label_lines(head), _table(comparison, last), paragraph(_LEGENDS[last])])


def _last_column(comparison: Comparison) -> str:
    """What the last column shows: what a trainer costs, what money buys, or the variance."""
    if any(row.price is not None for row in comparison.rows):
        return "PRICE"
    return "PER 1.00" if any(has_price(row.figures) for row in comparison.rows) else "VAR"


def _table(comparison: Comparison, last: str) -> str:
    unit, rates = speeds(comparison.rows)
    headings = [
        "PLANNER",
        "SHAPE",
        "STAGES",
        "PERIOD",
        f"{unit.upper()}/S",
        "x ONE",
        "x DP",
        "MEMORY",
        "FITS",
        last,
    ]
    rows = [_cells(row, rate, last) for row, rate in zip(comparison.rows, rates, strict=True)]
    return table(headings, rows, left=(0, 1, 8), gap=1, verdicts=(0, 8), spare=(9, 2, 6))


def _cells(row: ComparisonRow, rate: float, last: str) -> list[str]:
    return [
        shorten(row.planner, stretch(17, 0.5, _PLANNER)),
        shorten(row.shape, stretch(8, 0.5)),
        str(row.stages),
        format_seconds(row.period_s),
        format_number(rate),
        f"{row.speedup_over_one_device:.2f}",
        "-" if row.speedup_over_data_parallel is None else f"{row.speedup_over_data_parallel:.2f}",
        format_bytes(row.peak_memory_bytes),
        "yes" if row.fits else "no",
        _last_cell(row, last),
    ]


def _last_cell(row: ComparisonRow, last: str) -> str:
    if last == "PRICE":
        return "" if row.price is None else f"{row.price:+.1%}"
    return bought(row.figures) if last == "PER 1.00" else _variance(row.stage_variance_s2 * 1e6)


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
    """A line for each of `others`, plans of the same problem.

    It says how the other plan compares with `plan`, and whether it fits.
    """
    rows = [
        [
            other.planner,
            shorten(other.shape, stretch(12)),
            format_seconds(other.predicted.period_s),
            speedup_text(other.predicted.speedup_over_one_device, other.topology),
            format_bytes(other.peak_memory_bytes),
            _verdict(plan, other),
        ]
        for other in others
    ]
    return table(
        ["BESIDE IT", "SHAPE", "PERIOD", "SPEED", "MEMORY", ""],
        rows,
        left=(0, 1, 5),
        verdicts=(5,),
        spare=(3,),
    )


def _verdict(plan: Plan, other: Plan) -> str:
    if not other.fits:
        return "does not fit"
    return "faster" if other.predicted.samples_per_s > plan.predicted.samples_per_s else ""
