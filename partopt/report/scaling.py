"""The best plan on each number of devices, side by side."""

from __future__ import annotations

import msgspec

from partopt.documents.scaling import Scaling, ScalingRow
from partopt.printable import shorten
from partopt.report.basis import basis_lines
from partopt.report.figures import (
    bought,
    bought_text,
    format_money,
    has_price,
    speed_text,
    speeds,
    tokens_per_sample,
)
from partopt.report.table import label_lines, table
from partopt.report.width import stretch
from partopt.units import format_number


def render(scaling: Scaling) -> str:
    """The table, and what it rests on where that is an estimate.

    BATCH: samples of a microbatch x M, where an iteration has a number of microbatches. PER 1.00:
    samples for one unit of money, where a price is known, in place of the speed-up.
    """
    priced = any(has_price(row.figures) for row in scaling.rows)
    unit, rates = speeds(scaling.rows)
    headings = [
        "DEVICES",
        "BATCH",
        f"{unit.upper()}/S",
        "PER 1.00" if priced else "x ONE",
        "EFFICIENCY",
        "PLANNER",
        "SHAPE",
        "BOUND BY",
        "FITS",
    ]
    left = (1, *range(len(headings) - 4, len(headings)))
    rows = table(
        headings,
        [_cells(row, rate, priced) for row, rate in zip(scaling.rows, rates, strict=True)],
        left=left,
        gap=1,
        verdicts=(8,),
        spare=(4, 1),
    )
    below = label_lines([*_choices(scaling), *basis_lines(scaling.estimated)])
    return "\n\n".join(filter(None, [rows, below]))


def _cells(row: ScalingRow, rate: float, priced: bool) -> list[str]:
    return [
        str(row.devices),
        f"{row.microbatch_size}" + (f"x{row.microbatches}" if row.microbatches else ""),
        format_number(rate),
        bought(row.figures) if priced else f"{row.speedup_over_one_device:.2f}",
        f"{row.efficiency:.0%}",
        shorten(row.planner, stretch(13, 0.4)),
        shorten(row.shape, stretch(9, 0.6)),
        row.bound_by,
        "yes" if row.fits else "no",
    ]


def _choices(scaling: Scaling) -> list[tuple[str, str]]:
    """The fastest and the cheapest number of devices that fits, where a price is known."""
    cheapest = scaling.cheapest
    if cheapest is None:
        return []
    fastest = max((row for row in scaling.rows if row.fits), key=lambda row: row.samples_per_s)
    return [("fastest", _choice(fastest)), ("cheapest", _choice(cheapest))]


def _choice(row: ScalingRow) -> str:
    figures = row.figures
    assert not isinstance(figures, msgspec.UnsetType)
    speed = speed_text(row.samples_per_s, tokens_per_sample(row))
    price = format_money(figures.price_per_hour or 0.0)
    devices = "1 device" if row.devices == 1 else f"{row.devices} devices"
    return f"{devices} at {price} an hour: {speed}, {bought_text(figures)}"
