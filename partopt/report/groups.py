"""Profiles of groups side by side, as people read them."""

from __future__ import annotations

from pathlib import PurePath

from partopt.documents.group_comparison import GroupComparison, GroupRow
from partopt.report.basis import basis_of_several
from partopt.report.figures import bought, has_price, speeds
from partopt.report.table import label_lines, table
from partopt.report.topology import cluster_lines, price_lines
from partopt.units import format_bytes, format_number

_LEFT = ("PROFILE", "BATCH", "SHAPE", "FITS", "PLANNER", "SCHEDULE")
_SPARE = ("PLANNER", "GROUP")


def render(comparison: GroupComparison) -> str:
    """The model and the cluster, and the best plan of each profile as a table.

    BATCH: samples of a microbatch x M, where an iteration has a number of microbatches. PER 1.00:
    samples for one unit of money, where a price is known.
    """
    priced = any(has_price(row.figures) for row in comparison.rows)
    head = [
        ("model", f"{comparison.model}: {comparison.layers} layers"),
        *cluster_lines(comparison.topology),
        *price_lines(comparison.topology),
        *basis_of_several([(row.profile, row.estimated) for row in comparison.rows]),
    ]
    unit, rates = speeds(comparison.rows)
    headings = [
        "PROFILE",
        "GROUP",
        "BATCH",
        "SHAPE",
        f"{unit.upper()}/S",
        *(["PER 1.00"] if priced else []),
        "MEMORY",
        "FITS",
        "PLANNER",
        "SCHEDULE",
    ]
    rows = [_cells(row, rate, priced) for row, rate in zip(comparison.rows, rates, strict=True)]
    left, fits, spare = (
        [headings.index(name) for name in names] for names in (_LEFT, ["FITS"], _SPARE)
    )
    return "\n\n".join(
        [label_lines(head), table(headings, rows, left=left, verdicts=fits, spare=spare)]
    )


def _cells(row: GroupRow, rate: float, priced: bool) -> list[str]:
    return [
        PurePath(row.profile).name.removesuffix(".json"),
        str(row.ranks),
        f"{row.microbatch_size}" + (f"x{row.microbatches}" if row.microbatches else ""),
        row.shape,
        format_number(rate),
        *([bought(row.figures)] if priced else []),
        format_bytes(row.peak_memory_bytes),
        "yes" if row.fits else "no",
        row.planner,
        row.schedule,
    ]
