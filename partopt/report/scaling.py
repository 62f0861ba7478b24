"""The best plan on each number of devices, side by side."""

from __future__ import annotations

from partopt.documents.scaling import Scaling, ScalingRow
from partopt.report.table import shorten, table


def render(scaling: Scaling) -> str:
    """The table, at most 80 columns wide.

    The column M is there only where an iteration has a number of microbatches.
    """
    synchronous = any(row.microbatches for row in scaling.rows)
    headings = [
        "DEVICES",
        *(["M"] if synchronous else []),
        "SAMPLES/S",
        "x ONE",
        "EFFICIENCY",
        "PLANNER",
        "SHAPE",
        "BOUND BY",
        "FITS",
    ]
    left = range(len(headings) - 4, len(headings))
    return table(
        headings, [_cells(row, synchronous) for row in scaling.rows], left=tuple(left), gap=1
    )


def _cells(row: ScalingRow, synchronous: bool) -> list[str]:
    return [
        str(row.devices),
        *([str(row.microbatches)] if synchronous else []),
        f"{row.samples_per_s:,.4g}",
        f"{row.speedup_over_one_device:.2f}",
        f"{row.efficiency:.0%}",
        shorten(row.planner, 13),
        shorten(row.shape, 9),
        row.bound_by,
        "yes" if row.fits else "no",
    ]
