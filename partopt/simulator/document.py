"""An execution as a document, with the changes made to the plan before it ran.

The document holds the part of the timeline that a page draws. A timeline is drawn whole where a
microbatch's turn is wide enough to be read, and otherwise as its beginning, a part of its middle
and its end. This is decided here for every drawing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from partopt.cost.figures import figures_of
from partopt.documents.plan import Plan
from partopt.documents.simulation import (
    DrawnTimeline,
    DrawnWindow,
    Finding,
    LevelTime,
    Planned,
    RankTime,
    RankTimeline,
    SimulationDocument,
    Varied,
)
from partopt.schedules import SCHEDULES
from partopt.schedules.order import KINDS, A, B, F, I, U
from partopt.simulator.execution import Execution
from partopt.simulator.metrics import longest_span_s
from partopt.simulator.timeline import Slots, Timeline, drawn_ranks, exchanges, slots
from partopt.units import format_bandwidth, format_bytes, format_seconds

Seconds = NDArray[np.float64]

_LISTED = 11  # characters of a long list at its beginning, and at its end
ROWS = 32  # ranks on a page
COLUMNS = 68  # characters of a row on a page of 80
DRAWN_LIMIT = 100_000  # actions of all drawn ranks: 5 MB of a document
_NARROWEST, _READABLE = 3, 6  # characters of a turn that may be drawn, and that name its actions
# of a window: so much after it is kept too, since the last column of a page ends later
_AFTER = 1 / 8


def document_of(
    execution: Execution,
    before: Plan,
    findings: Sequence[Finding],
    varied: Varied | None = None,
) -> SimulationDocument:
    """The document of `execution` with the advice `findings`; `before` is the unchanged plan.

    `varied` is what becomes of it where devices vary.
    """
    plan, steady, peak = execution.plan, execution.steady, int(execution.peak_memory_bytes.max())
    limit = plan.memory_limit_bytes
    return SimulationDocument(
        model=plan.profile.name,
        layers=plan.stages[-1].stop,
        parameter_bytes=plan.profile.parameter_bytes,
        estimated=plan.profile.estimated,
        planner=plan.planner,
        stages=len(plan.stages),
        shape=plan.shape,
        schedule=plan.schedule,
        microbatch_size=plan.microbatch_size,
        microbatches=execution.microbatches,
        makespan_s=execution.makespan_s,
        iteration_s=None if steady else execution.makespan_s,
        period_s=execution.period_s,
        bubble=execution.bubble,
        longest_span_s=longest_span_s(execution.timeline),
        samples_per_s=plan.microbatch_size / execution.period_s,
        figures=figures_of(plan.microbatch_size / execution.period_s, plan.profile, plan.topology),
        settled=steady.settled if steady else None,
        cycle_microbatches=steady.microbatches if steady else None,
        window_start_s=execution.start_s,
        window_end_s=execution.end_s,
        peak_memory_bytes=peak,
        fits=limit is None or peak <= limit,
        changed=changes(before, plan),
        planned=_promises(before),
        levels=_level_times(execution),
        advice=list(findings),
        ranks=[
            _rank_time(execution, rank, stages)
            for rank, stages in sorted(plan.stages_by_rank().items())
        ],
        topology=plan.topology,
        timeline=drawn_timeline(execution.timeline, drawn_windows(execution)),
        variation=varied or msgspec.UNSET,
    )


def _promises(plan: Plan) -> Planned:
    return Planned(
        period_s=plan.predicted.period_s,
        iteration_s=plan.predicted.iteration_s,
        samples_per_s=plan.predicted.samples_per_s,
        bubble=plan.predicted.bubble,
        peak_memory_bytes=plan.peak_memory_bytes,
    )


def _level_times(execution: Execution) -> list[LevelTime]:
    return [
        LevelTime(
            level=use.level,
            transfer_share=use.transfer_share,
            allreduce_share=use.allreduce_share,
            sent_bytes=use.bytes,
        )
        for use in execution.level_use
    ]


def _rank_time(execution: Execution, rank: int, stages: list[int]) -> RankTime:
    shares = execution.shares
    return RankTime(
        rank=rank,
        stages=stages,
        compute_s=float(shares.compute_s[rank]),
        transfer_s=float(shares.transfer_s[rank]),
        allreduce_s=float(shares.allreduce_s[rank]),
        idle_s=float(shares.idle_s[rank]),
        waiting_for_activations_s=float(shares.forward_s[rank]),
        waiting_for_gradients_s=float(shares.gradient_s[rank]),
        finished_s=float(shares.end_s[rank]),
        peak_in_flight=int(execution.peak_in_flight[rank]),
        peak_memory_bytes=int(execution.peak_memory_bytes[rank]),
    )


def changes(before: Plan, after: Plan) -> list[str]:
    """The conditions that differ between two plans of the same stages.

    Example: `bandwidth of cluster 1.25 GB/s -> 3.13 GB/s`.
    """
    return [f"{what} {old} -> {new}" for what, old, new in _pairs(before, after) if old != new]


def _pairs(before: Plan, after: Plan) -> Iterator[tuple[str, str, str]]:
    yield "schedule", before.schedule, after.schedule
    if after.microbatches is not None:
        yield (
            "microbatches",
            "none" if before.microbatches is None else str(before.microbatches),
            str(after.microbatches),
        )
    if (before.schedule, before.microbatches) == (after.schedule, after.microbatches):
        old, new = ([stage.warmup for stage in plan.stages] for plan in (before, after))
        if old != new:
            yield "warm-up", _list_numbers(old), _list_numbers(new)
    yield from _level_pairs(before, after)
    yield "memory of a device", _limit(before), _limit(after)
    yield "transfers", before.comm, after.comm
    if after.schedule in SCHEDULES and SCHEDULES[after.schedule].asynchronous:
        yield "all-reduces", before.allreduce, after.allreduce


def _level_pairs(before: Plan, after: Plan) -> Iterator[tuple[str, str, str]]:
    for old_level, new_level in zip(
        before.topology.own_levels, after.topology.own_levels, strict=True
    ):
        old_rate, new_rate = old_level.bandwidth_bytes_per_s, new_level.bandwidth_bytes_per_s
        yield (
            f"bandwidth of {new_level.name}",
            format_bandwidth(old_rate),
            format_bandwidth(new_rate),
        )
        yield (
            f"latency of {new_level.name}",
            format_seconds(old_level.latency_s),
            format_seconds(new_level.latency_s),
        )
        yield f"links of {new_level.name}", str(old_level.links), str(new_level.links)


def _limit(plan: Plan) -> str:
    limit = plan.memory_limit_bytes
    return "unknown" if limit is None else format_bytes(limit)


def _list_numbers(numbers: Sequence[int]) -> str:
    text = ",".join(map(str, numbers))
    return text if len(text) <= 2 * _LISTED + 2 else f"{text[:_LISTED]}..{text[-_LISTED:]}"


def drawn_windows(execution: Execution, columns: int = COLUMNS) -> list[DrawnWindow]:
    """What to draw in so many columns.

    It is the whole iteration or, asynchronous, the time until the pipeline is full, and then as
    long again or two cycles, whichever is longer. Where a turn would be narrower than three
    characters of these, it is the beginning, the middle and, synchronous, the end, all equally
    long.
    """
    timeline, steady = execution.timeline, execution.steady
    turn_s, full_s = _turn_s(timeline), _first_backward_s(timeline)
    end_s = execution.makespan_s
    if steady is not None:
        end_s = min(end_s, full_s + max(full_s, 2 * (execution.end_s - execution.start_s)))
    if end_s <= columns / _NARROWEST * turn_s:
        return [_window("all" if end_s == execution.makespan_s else "beginning", 0.0, end_s)]
    each = columns / 3 * turn_s
    span = min(max(full_s, each / _READABLE), each / _NARROWEST)
    if steady is None:
        return [
            _window("beginning", 0.0, span),
            _middle(timeline, (end_s - span) / 2, span, turn_s),
            _window("end", end_s - span, end_s),
        ]
    return [
        _window("beginning", 0.0, span),
        _middle(timeline, max(span, min(execution.start_s, execution.end_s - span)), span, turn_s),
    ]


def _window(what: str, begin_s: float, end_s: float) -> DrawnWindow:
    return DrawnWindow(what=what, begin_s=begin_s, end_s=end_s)  # type: ignore[arg-type]


def _turn_s(timeline: Timeline) -> float:
    """Seconds from one microbatch to the next in the middle of a timeline.

    The busiest rank needs so much for each, or the first stage begins one so often.
    """
    order = timeline.order
    took = np.where(order.kind == A, 0.0, timeline.end - timeline.start)
    sums = np.concatenate([[0.0], np.cumsum(took, dtype=np.float64)])
    begun = np.sort(timeline.start[(order.kind == F) & (order.stage == 0)])
    n = len(begun)
    pace = float(begun[3 * n // 4] - begun[n // 4]) / max(1, 3 * n // 4 - n // 4)
    passed = int(order.microbatch[order.kind == F].max()) + 1
    return max(pace, float(np.diff(sums[order.rows]).max()) / passed)


def _first_backward_s(timeline: Timeline) -> float:
    """When the first stage begins its first backward: the pipeline is full."""
    order = timeline.order
    first_back = (order.stage == 0) & ((order.kind == B) | (order.kind == I))
    return float(timeline.start[first_back].min())


def _middle(timeline: Timeline, begin_s: float, span_s: float, turn_s: float) -> DrawnWindow:
    """A window of `span_s` within a turn before `begin_s`, from a forward of the first stage on."""
    order, stages = timeline.order, 1 + int(timeline.order.stage.max())
    forward, backward = order.kind == F, (order.kind == B) | (order.kind == I)
    starts = timeline.start[forward & (order.stage == 0)]
    near = starts[(starts <= begin_s) & (starts >= max(span_s, begin_s - turn_s))]
    begin = float(near.max(initial=0.0)) or begin_s
    inside = (timeline.end > begin) & (timeline.start < begin + span_s)
    forwards, backwards = (
        np.bincount(order.stage[inside & which], minlength=stages) for which in (forward, backward)
    )
    steady = (np.maximum(forwards, backwards) <= 2 * np.minimum(forwards, backwards)).all()
    return _window("steady" if steady else "middle", begin, begin + span_s)


def drawn_timeline(
    timeline: Timeline,
    windows: list[DrawnWindow],
    rows: int = ROWS,
    limit: int = DRAWN_LIMIT,
) -> DrawnTimeline | None:
    """At most `rows` ranks of the timeline in the seconds of the `windows`.

    None where they have more actions than `limit`.
    """
    ranks, note = drawn_ranks(timeline.order, rows)
    shown = np.array([(w.begin_s, w.end_s + _AFTER * (w.end_s - w.begin_s)) for w in windows])
    inside = {rank: _within(slots(timeline, rank), shown) for rank in ranks}
    if sum(len(own.kind) for own in inside.values()) > limit:
        return None
    return DrawnTimeline(
        windows=windows,
        note=note,
        ranks=[_rank(timeline, rank, own, shown) for rank, own in inside.items()],
    )


def _overlaps(start: Seconds, end: Seconds, windows: Seconds) -> NDArray[np.bool_]:
    """Which intervals share time with a window, `windows` of shape (w, 2)."""
    both = (end[:, None] > windows[:, 0]) & (start[:, None] < windows[:, 1])
    return np.asarray(both.any(axis=1))


def _within(own: Slots, windows: Seconds) -> Slots:
    """The actions in the windows, without all-reduces.

    All-reduces are shown while they are exchanged, not while a rank waits for them.
    """
    inside = _overlaps(own.start, own.end, windows) & (own.kind != A)
    return Slots._make(column[inside] for column in own)


def _rank(timeline: Timeline, rank: int, own: Slots, windows: Seconds) -> RankTimeline:
    order, first = timeline.order, own.pair != 2
    starts, ends = exchanges(timeline, rank)
    seen = _overlaps(starts, ends, windows)
    return RankTimeline(
        rank=rank,
        stages=np.unique(order.stage[order.rows[rank] : order.rows[rank + 1]]).tolist(),
        actions=_names(own),
        start_s=own.start[first].tolist(),
        end_s=own.end[first].tolist(),
        allreduce_start_s=np.sort(starts[seen]).tolist(),
        allreduce_end_s=np.sort(ends[seen]).tolist(),
    )


def _names(own: Slots) -> str:
    """`2F0 2B0`, joined ones as `2F3&5B1`."""
    names = [
        f"{'' if place == 0 else '&' if pair == 2 else ' '}{stage}{KINDS[kind]}"
        f"{'' if kind == U else microbatch}"
        for place, (kind, stage, microbatch, pair) in enumerate(
            zip(*(column.tolist() for column in (own[:3] + own[4:5])), strict=True)
        )
    ]
    return "".join(names)
