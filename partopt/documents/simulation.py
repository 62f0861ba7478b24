"""A plan executed (`partopt.simulation/1`), and schedules on equal stages (`partopt.trial/1`).

A simulation has the time and the memory of a plan, and what would help; a trial has no profile.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import msgspec

from partopt import documents
from partopt.documents.profile import Bytes, Count, Index, Seconds
from partopt.documents.reading import fault_at
from partopt.documents.stage import Figures, Positive
from partopt.documents.topology import Topology
from partopt.errors import PartoptError

_ACTION = "[0-9]{1,9}(?:[FBIWR][0-9]{1,9}|U)"
_SLOTS = re.compile(rf"(?:{_ACTION}(?:&{_ACTION})?(?: |$))*")


class RankTime(documents.StrictStruct, frozen=True, kw_only=True):
    """Where the time of a rank goes between `window_start_s` and `window_end_s`.

    `idle_s` is the sum of the three fields after it.
    """

    rank: Index
    stages: Annotated[list[Index], msgspec.Meta(min_length=1)]
    compute_s: Seconds
    transfer_s: Seconds
    allreduce_s: Seconds
    idle_s: Seconds
    waiting_for_activations_s: Seconds
    waiting_for_gradients_s: Seconds
    finished_s: Seconds
    peak_in_flight: Index
    peak_memory_bytes: Bytes


class LevelTime(documents.StrictStruct, frozen=True, kw_only=True):
    """How busy a level is between `window_start_s` and `window_end_s`.

    The shares are those of its busiest port; `sent_bytes` is what was sent over the level.
    """

    level: str
    transfer_share: float
    allreduce_share: float
    sent_bytes: float


class Finding(documents.StrictStruct, frozen=True, kw_only=True):
    """Something to point at.

    With a `fault` the plan cannot run, a `loss` costs time, a `risk` may cost some that is not
    simulated. `value`, in `unit`, is the number on which it rests. A change that helps has been
    executed: `verb` is the function of the library to call with the plan, `options` all that it is
    called with, `speedup` the samples/s with the change over those without it, `peak_memory_bytes`
    what the fullest device then needs, and `change` says both and what else it takes. Where nothing
    that was tried helps, `verb` and `change` are empty.
    """

    code: str
    severity: Literal["fault", "loss", "risk"]
    value: float
    unit: str
    text: str
    verb: Literal["simulate", ""]
    options: dict[str, Any]
    change: str
    speedup: float | None
    peak_memory_bytes: Bytes | None


class Planned(documents.StrictStruct, frozen=True, kw_only=True):
    """What the plan predicted for itself, as it was."""

    period_s: Seconds
    iteration_s: Seconds | None
    samples_per_s: Seconds
    bubble: float
    peak_memory_bytes: Bytes


class RankTimeline(documents.StrictStruct, frozen=True, kw_only=True):
    """What a rank does in a stretch of time.

    `actions` are slots in order, `2F0 2B0`: stage, kind, microbatch; `2F3&5B1` are two at once.
    `start_s` and `end_s` are those of each slot, and of each all-reduce of its stages
    `allreduce_start_s` and `allreduce_end_s`.
    """

    rank: Index
    stages: list[Index]
    actions: str
    start_s: list[float]
    end_s: list[float]
    allreduce_start_s: list[float]
    allreduce_end_s: list[float]


class DrawnWindow(documents.StrictStruct, frozen=True, kw_only=True):
    """The seconds of a timeline that are drawn.

    They are all of it, its beginning, its end, or a part of its middle, which is `steady` where
    every stage runs forwards and backwards in turn.
    """

    what: Literal["all", "beginning", "steady", "middle", "end"]
    begin_s: Seconds
    end_s: Seconds


class DrawnTimeline(documents.StrictStruct, frozen=True, kw_only=True):
    """What a page draws of a timeline: some ranks in `windows`, which follow each other.

    `note` says which ranks where they are not all.
    """

    windows: Annotated[list[DrawnWindow], msgspec.Meta(min_length=1)]
    note: str
    ranks: list[RankTimeline]


class RankFactor(documents.StrictStruct, frozen=True, kw_only=True):
    """A rank whose actions take `factor` times their time."""

    rank: Index
    factor: Positive


class RankSensitivity(documents.StrictStruct, frozen=True, kw_only=True):
    """What it costs that one rank is slower.

    `loss` is by which share an iteration, or a microbatch of an asynchronous schedule, takes
    longer; `per_second` the seconds that it takes longer for each second of the rank's work.
    """

    rank: Index
    loss: float
    per_second: float


class Varied(documents.StrictStruct, frozen=True, kw_only=True):
    """The plan on devices that vary.

    `plain_s`, `p50_s` and `p95_s` are seconds of an iteration or, asynchronous, of a microbatch:
    without variation, and percentiles of the `draws`, in each of which `microbatches` pass. The
    losses are over `plain_s`. `sensitivity` has the ranks that were made slower by the share
    `slower`, one at a time and without jitter, the one that costs most first.
    """

    jitter: Seconds
    slow: list[RankFactor]
    seed: Index
    draws: Count
    microbatches: Count
    plain_s: Seconds
    p50_s: Seconds
    p95_s: Seconds
    p50_loss: float
    p95_loss: float
    slower: float
    sensitivity: Annotated[list[RankSensitivity], msgspec.Meta(min_length=1)]


class SimulationDocument(documents.Document, frozen=True, kw_only=True):
    """A plan executed.

    The window is the iteration or, asynchronous, one cycle of the steady state, in which
    `cycle_microbatches` pass. `timeline` is null where it has too many actions. `estimated` is as
    in a plan's profile.
    """

    schema: str = "partopt.simulation/1"
    model: str
    layers: Count
    parameter_bytes: Bytes
    estimated: str | None = None
    planner: str
    stages: Count
    shape: str
    schedule: str
    microbatch_size: Count
    microbatches: Count
    makespan_s: Positive
    iteration_s: Seconds | None
    period_s: Positive
    bubble: float
    longest_span_s: Seconds
    samples_per_s: Seconds
    figures: Figures | msgspec.UnsetType = msgspec.UNSET
    settled: bool | None
    cycle_microbatches: Count | None
    window_start_s: Seconds
    window_end_s: Seconds
    peak_memory_bytes: Bytes
    fits: bool
    changed: list[str]
    planned: Planned
    levels: list[LevelTime]
    advice: list[Finding]
    ranks: Annotated[list[RankTime], msgspec.Meta(min_length=1)]
    topology: Topology
    timeline: DrawnTimeline | None
    variation: Varied | msgspec.UnsetType = msgspec.UNSET

    @property
    def memory_limit_bytes(self) -> int | None:
        """The limit of one device; `None` where none is known."""
        return self.topology.device.memory_bytes

    @property
    def window_s(self) -> float:
        """Seconds from `window_start_s` to `window_end_s`."""
        return self.window_end_s - self.window_start_s

    @property
    def fullest(self) -> RankTime:
        """The rank that needs most memory; of equal ones the lowest."""
        return max(self.ranks, key=lambda rank: rank.peak_memory_bytes)

    def inconsistencies(self) -> Iterator[PartoptError]:
        """Faults that the types do not express."""
        names = [level.name for level in self.topology.levels]
        if [use.level for use in self.levels] != names:
            yield fault_at("levels", "not the levels of the topology", f"name {', '.join(names)}")
        if self.window_end_s <= self.window_start_s:
            yield fault_at("window_end_s", "not after window_start_s", "give the window a length")
        yield from timeline_faults(self.timeline)


InFlight = Annotated[list[Index], msgspec.Meta(min_length=1)]  # of every device


class ClosedForm(documents.StrictStruct, frozen=True, kw_only=True):
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


class Tried(documents.StrictStruct, frozen=True, kw_only=True):
    """A schedule as it ran, and a `summary` of it.

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
    summary: str | msgspec.UnsetType = msgspec.UNSET


class Refused(documents.StrictStruct, frozen=True, kw_only=True):
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


def timeline_faults(timeline: DrawnTimeline | None) -> Iterator[PartoptError]:
    """What cannot be drawn of a document's timeline."""
    if timeline is not None:
        times = [time for window in timeline.windows for time in (window.begin_s, window.end_s)]
        if times != sorted(times):
            yield fault_at(
                "timeline.windows", "not one after the other", "give them in their order"
            )
    for index, row in enumerate(timeline.ranks if timeline else []):
        yield from _row_faults(row, f"timeline.ranks[{index}]")


def _row_faults(row: RankTimeline, where: str) -> Iterator[PartoptError]:
    """Actions that cannot be read, and lists of unequal length."""
    slots = row.actions.split()
    if not _SLOTS.fullmatch(row.actions):
        yield fault_at(
            f"{where}.actions", "not actions", "write 2F0 2B0, and 2F3&5B1 of two at once"
        )
    elif not {int(stage) for stage in re.findall(r"[0-9]+(?=[A-Z])", row.actions)} <= {*row.stages}:
        yield fault_at(f"{where}.actions", "of other stages than the rank's", "name its stages")
    if not len(slots) == len(row.start_s) == len(row.end_s):
        yield fault_at(f"{where}.start_s", "not one for each slot", "give each slot both times")
    if len(row.allreduce_start_s) != len(row.allreduce_end_s):
        yield fault_at(f"{where}.allreduce_end_s", "not one for each start", "give both times")
