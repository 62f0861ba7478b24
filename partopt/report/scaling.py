"""The best plan on each number of devices, side by side."""

from __future__ import annotations

from partopt.documents.scaling import Scaling, ScalingRow
from partopt.report.basis import basis_lines
from partopt.report.table import label_lines, shorten, table


def render(scaling: Scaling) -> str:
    """The table, at most 80 columns wide, and what it rests on where that is an estimate.

    BATCH: samples of a microbatch x M, where an iteration has a number of microbatches.
    """
    headings = [
        "DEVICES",
        "BATCH",
        "SAMPLES/S",
        "x ONE",
        "EFFICIENCY",
        "PLANNER",
        "SHAPE",
        "BOUND BY",
        "FITS",
    ]
    left = (1, *range(len(headings) - 4, len(headings)))
    rows = table(headings, [_cells(row) for row in scaling.rows], left=left, gap=1)
    return "\n\n".join(filter(None, [rows, label_lines(basis_lines(scaling.estimated))]))


def _cells(row: ScalingRow) -> list[str]:
    return [
        str(row.devices),
        f"{row.microbatch_size}" + (f"x{row.microbatches}" if row.microbatches else ""),
        f"{row.samples_per_s:,.4g}",
        f"{row.speedup_over_one_device:.2f}",
        f"{row.efficiency:.0%}",
        shorten(row.planner, 13),
        shorten(row.shape, 9),
        row.bound_by,
        "yes" if row.fits else "no",
    ]
