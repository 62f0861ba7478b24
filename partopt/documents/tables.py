"""What planning prints as tables: plans side by side, flows, the checks of a plan."""

from __future__ import annotations

from typing import Annotated

import msgspec

from partopt import documents
from partopt.documents.engine import Layout
from partopt.documents.profile import Bytes, Count, Index, Seconds
from partopt.documents.stage import Figures, Positive
from partopt.documents.topology import Topology


class ComparisonRow(documents.StrictStruct, frozen=True, kw_only=True, omit_defaults=True):
    """One plan of a comparison. `stage_variance_s2` is the variance of the stages' C / r.

    Of a plan within what a trainer can say, `price` is how much longer its period is than that of
    the fastest that fits, as a share of this.
    """

    planner: str
    shape: str
    stages: Count
    period_s: Positive
    samples_per_s: Seconds
    figures: Figures | msgspec.UnsetType = msgspec.UNSET
    speedup_over_one_device: Seconds
    speedup_over_data_parallel: Seconds | None
    peak_memory_bytes: Bytes
    fits: bool
    stage_variance_s2: float
    price: float | None = None


class Comparison(documents.Document, frozen=True, kw_only=True):
    """Plans for the same model and cluster, fastest first.

    `estimated` is as in a plan's profile.
    """

    schema: str = "partopt.comparison/1"
    model: str
    layers: Count
    microbatch_size: Count
    schedule: str
    estimated: str | None = None
    topology: Topology
    rows: Annotated[list[ComparisonRow], msgspec.Meta(min_length=1)]


class Run(documents.StrictStruct, frozen=True, kw_only=True):
    """What training on many tokens takes: days, hours of all devices, money if a price is known."""

    days: Positive
    device_hours: Positive
    cost: Positive | msgspec.UnsetType = msgspec.UNSET


class ScalingRow(documents.StrictStruct, frozen=True, kw_only=True):
    """The best plan on a number of devices.

    `efficiency` is the speed-up over one device, divided by the devices; of groups of ranks the
    speed-up over one group, divided by the groups. Of a transformer's `layout`, which one device
    may not hold, one device stands for its share of the first row; beside products and attention
    most of its time is a `part`, that share of it. A `run` is of the table's tokens. Where fewer
    devices are faster by over 1 %, those of the fastest such row are `faster_on`.
    """

    devices: Annotated[int, msgspec.Meta(ge=1, le=2**53)]  # as exact as a picture draws it
    planner: str
    shape: str
    layout: Layout | msgspec.UnsetType = msgspec.UNSET
    microbatch_size: Count
    microbatches: Count | None
    period_s: Positive
    samples_per_s: Seconds
    figures: Figures | msgspec.UnsetType = msgspec.UNSET
    speedup_over_one_device: Seconds
    efficiency: Seconds
    bound_by: str
    part: str | msgspec.UnsetType = msgspec.UNSET
    part_share: float | msgspec.UnsetType = msgspec.UNSET
    run: Run | msgspec.UnsetType = msgspec.UNSET
    faster_on: Count | msgspec.UnsetType = msgspec.UNSET
    fits: bool

    @property
    def iteration_s(self) -> float:
        """Seconds of an iteration, of a microbatch where there is none."""
        return self.microbatch_size * (self.microbatches or 1) / self.samples_per_s


class Scaling(documents.Document, frozen=True, kw_only=True):
    """Plans for the same model on ever more devices; `estimated` is as in a plan's profile.

    Rows may have runs of so many `tokens`. Then `chosen` are the devices that are best for a number
    of days or a budget. Of a range of sizes so many were `looked_at`: all others are slower and
    cost more than one of the rows.
    """

    schema: str = "partopt.scaling/1"
    estimated: str | None = None
    tokens: Positive | msgspec.UnsetType = msgspec.UNSET
    chosen: Count | msgspec.UnsetType = msgspec.UNSET
    looked_at: Count | msgspec.UnsetType = msgspec.UNSET
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


class FlowTime(documents.StrictStruct, frozen=True, kw_only=True):
    """A flow of a plan, as its `communication` has it, with what it takes and what that costs.

    `ranks` are those that take part; `times` is how often it is in an iteration or, asynchronous,
    for each microbatch. One `takes_s`, alone on its level, and `share` is of the time, for
    which one of its senders is busy with it. `critical` tells whether the time gets longer where
    this flow alone is slower, `per_second` by how many seconds for each second that a sender is
    longer busy, and `saved` is the share of the time that would be saved if it had no bytes; null
    where that was not tried, or the plan does not settle.
    """

    kind: str
    source: Index | None
    destination: Index | None
    stage: Index | None
    parameters: list[str]
    ranks: Annotated[list[Index], msgspec.Meta(min_length=1)]
    bytes: Bytes
    per: str
    times: Seconds
    level: str
    takes_s: Seconds
    share: Seconds
    critical: bool | None
    per_second: float | None
    saved: Seconds | None


class Flows(documents.Document, frozen=True, kw_only=True):
    """All flows of a plan. `slower` is the share by which each was made slower on its own."""

    schema: str = "partopt.flows/1"
    model: str
    estimated: str | None = None
    planner: str
    shape: str
    schedule: str
    microbatch_size: Count
    microbatches: Count | None
    cluster: str
    period_s: Positive
    iteration_s: Seconds | None
    slower: Seconds
    flows: list[FlowTime]

    @property
    def unknown(self) -> int:
        """Of how many flows it is not known what they cost."""
        return sum(flow.critical is None for flow in self.flows)


class VerificationRow(documents.StrictStruct, frozen=True, kw_only=True):
    """One check: the time it took, its numbers, and the fields that differ, with both values."""

    check: str
    passed: bool
    took_s: Seconds
    text: str
    differences: list[str]


class Verification(documents.Document, frozen=True, kw_only=True):
    """The checks of one plan; `claim` is what is known of it where all of them hold.

    `estimated` is as in the plan's profile.
    """

    schema: str = "partopt.verification/1"
    estimated: str | None = None
    verified: bool
    claim: str
    checks: list[VerificationRow]

    @property
    def ok(self) -> bool:
        """Whether all checks hold."""
        return self.verified

    @property
    def failed(self) -> list[str]:
        """The checks that do not hold."""
        return [row.check for row in self.checks if not row.passed]
