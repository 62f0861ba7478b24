"""The best plan on each number of devices, side by side."""

from __future__ import annotations

from collections.abc import Sequence

from partopt import documents
from partopt.documents.plan import Plan
from partopt.report.table import shorten, table


class Row(documents.Part, frozen=True, kw_only=True):
    """The best plan on a number of devices.

    `efficiency` is the speed-up over one device, a device.
    """

    devices: int
    planner: str
    shape: str
    microbatches: int | None
    period_s: float
    samples_per_s: float
    speedup_over_one_device: float
    efficiency: float
    bound_by: str
    fits: bool


class Scaling(documents.Part, frozen=True, kw_only=True):
    """Plans for the same model on ever more devices."""

    schema: str = "partopt.scaling/1"
    rows: list[Row]


def scaling(plans: Sequence[Plan]) -> Scaling:
    """The table of `plans`, each on its own number of devices, in their order."""
    return Scaling(
        rows=[
            Row(
                devices=plan.topology.devices,
                planner=plan.planner,
                shape=plan.shape,
                microbatches=plan.microbatches,
                period_s=plan.predicted.period_s,
                samples_per_s=plan.predicted.samples_per_s,
                speedup_over_one_device=plan.predicted.speedup_over_one_device,
                efficiency=plan.predicted.speedup_over_one_device / plan.topology.devices,
                bound_by=plan.predicted.bound_by,
                fits=plan.fits,
            )
            for plan in plans
        ]
    )


def render(found: Scaling) -> str:
    """The table, 80 columns wide at most; M only where an iteration has a number of
    microbatches.
    """
    synchronous = any(row.microbatches for row in found.rows)
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
        headings, [_cells(row, synchronous) for row in found.rows], left=tuple(left), gap=1
    )


def _cells(row: Row, synchronous: bool) -> list[str]:
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
