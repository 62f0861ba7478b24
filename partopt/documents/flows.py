"""The flows: what a plan sends and exchanges, and what their times cost (`partopt.flows/1`)."""

from __future__ import annotations

from typing import Annotated

import msgspec

from partopt import documents
from partopt.documents.profile import Bytes, Count, Index, Seconds


class FlowTime(documents.Part, frozen=True, kw_only=True):
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
    period_s: Annotated[float, msgspec.Meta(gt=0)]
    iteration_s: Seconds | None
    slower: Seconds
    flows: list[FlowTime]

    @property
    def tried(self) -> bool:
        """Whether it was tried what the flows cost."""
        return all(flow.critical is not None for flow in self.flows)
