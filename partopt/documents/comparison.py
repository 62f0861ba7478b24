"""The comparison: several plans of one problem side by side (`partopt.comparison/1`)."""

from __future__ import annotations

from typing import Annotated

import msgspec

from partopt import documents
from partopt.documents.figures import Figures
from partopt.documents.profile import Bytes, Count, Seconds
from partopt.documents.topology import Topology


class ComparisonRow(documents.Part, frozen=True, kw_only=True, omit_defaults=True):
    """One plan of a comparison. `stage_variance_s2` is the variance of the stages' C / r.

    Of a plan within what a trainer can say, `price` is how much longer its period is than that of
    the fastest that fits, as a share of this.
    """

    planner: str
    shape: str
    stages: Count
    period_s: Annotated[float, msgspec.Meta(gt=0)]
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
