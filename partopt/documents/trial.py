"""The trial (`partopt.trial/1`): schedules executed on equal stages, without a profile."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import msgspec

from partopt import documents
from partopt.documents.profile import Count, Index, Seconds
from partopt.documents.simulation import DrawnTimeline, timeline_faults
from partopt.errors import PartoptError

InFlight = Annotated[list[Index], msgspec.Meta(min_length=1)]  # of each device


class ClosedForm(documents.Part, frozen=True, kw_only=True):
    """What the formulas say of a schedule, where messages take no time.

    `formula` is the time in an iteration, `bubble_s`, for which each device waits, in P devices, M
    microbatches and the times of a stage; `bubble` is its share. It holds where `condition` says,
    everywhere where that is empty. `agrees` tells whether the execution agrees, and `reason` why it
    does not.
    """

    formula: str
    condition: str
    bubble_s: float
    bubble: float
    iteration_s: Seconds
    in_flight: InFlight
    agrees: bool
    reason: str


class Tried(documents.Part, frozen=True, kw_only=True):
    """A schedule as it ran.

    `chunks` are the stages of a device, `waits` tells whether devices wait for messages. `bubble`
    is the idle share of an iteration; an asynchronous schedule has none, its share is that of the
    steady state and `iteration_s` the time in which as many microbatches pass. `in_flight` are the
    most microbatches that each device holds, `activations` the most that it keeps of them, in what
    its stages keep of one.
    """

    schedule: str
    asynchronous: bool
    chunks: Count
    waits: bool
    iteration_s: Seconds
    bubble: float
    in_flight: InFlight
    activations: Annotated[list[Seconds], msgspec.Meta(min_length=1)]
    closed_form: ClosedForm


class Refused(documents.Part, frozen=True, kw_only=True):
    """A schedule that cannot run so, and why."""

    schedule: str
    message: str
    hint: str


class TrialDocument(documents.Document, frozen=True, kw_only=True):
    """Schedules on `stages` equal devices, in the order in which they were asked for.

    The seconds are of all stages of a device together. `timeline` is that of one schedule; null of
    several, and where it has too many actions.
    """

    schema: str = "partopt.trial/1"
    stages: Count
    microbatches: Count
    forward_s: Seconds
    backward_s: Seconds
    weight_gradient_s: Seconds
    transfer_s: Seconds
    recompute: bool
    tried: list[Tried]
    refused: list[Refused]
    timeline: DrawnTimeline | None = None

    def inconsistencies(self) -> Iterator[PartoptError]:
        """Faults that the types do not express."""
        yield from timeline_faults(self.timeline)
