"""The scaling: the best plan on each number of devices, side by side (`partopt.scaling/1`)."""

from __future__ import annotations

from typing import Annotated

import msgspec

from partopt import documents
from partopt.documents.figures import Figures
from partopt.documents.profile import Count, Seconds


class ScalingRow(documents.Part, frozen=True, kw_only=True):
    """The best plan on a number of devices.

    `efficiency` is the speed-up over one device, divided by the devices; of groups of ranks the
    speed-up over one group, divided by the groups.
    """

    devices: Annotated[int, msgspec.Meta(ge=1, le=2**53)]  # as exact as a picture draws it
    planner: str
    shape: str
    microbatch_size: Count
    microbatches: Count | None
    period_s: Annotated[float, msgspec.Meta(gt=0)]
    samples_per_s: Seconds
    figures: Figures | msgspec.UnsetType = msgspec.UNSET
    speedup_over_one_device: Seconds
    efficiency: Seconds
    bound_by: str
    fits: bool


class Scaling(documents.Document, frozen=True, kw_only=True):
    """Plans for the same model on ever more devices; `estimated` is as in a plan's profile."""

    schema: str = "partopt.scaling/1"
    estimated: str | None = None
    rows: Annotated[list[ScalingRow], msgspec.Meta(min_length=1)]

    @property
    def cheapest(self) -> ScalingRow | None:
        """The row that fits with most samples for the money, of equal ones the first.

        None where no price is known, or nothing fits.
        """
        bought = {
            index: row.figures.samples_per_money
            for index, row in enumerate(self.rows)
            if row.fits and row.figures and row.figures.samples_per_money
        }
        return self.rows[max(bought, key=lambda index: bought[index])] if bought else None
