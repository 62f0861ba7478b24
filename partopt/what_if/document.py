"""An execution as a document, with the changes made to the plan before it ran.

The document holds the part of the timeline that a page draws. A timeline is drawn whole where a
microbatch's turn is wide enough to be read, and otherwise as its beginning, a part of its middle
and its end. This is decided here for every drawing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from partopt.cost.figures import figures_of
from partopt.documents.actions import KINDS, A, B, F, I, Slots, U
from partopt.documents.plan import Plan
from partopt.documents.simulation import (
    DrawnTimeline,
    DrawnWindow,
    Finding,
    Planned,
    RankTime,
    RankTimeline,
    SimulationDocument,
    Varied,
)
from partopt.errors import PartoptError
from partopt.schedules import SCHEDULES
from partopt.simulator.execution import Execution
from partopt.simulator.metrics import longest_span_s
from partopt.simulator.timeline import Timeline, drawn_ranks, exchanges, slots
from partopt.units import format_bandwidth, format_bytes, format_seconds

Seconds = NDArray[np.float64]
What = Literal["all", "beginning", "steady", "middle", "end"]

_LISTED = 11  # characters of a long list at its beginning, and at its end
ROWS = 32  # ranks on a page
COLUMNS = 68  # characters of a row on a page of 80
DRAWN_LIMIT = 100_000  # actions of all drawn ranks: 5 MB of a document
_NARROWEST, _READABLE = 3, 6  # characters of a turn that may be drawn, and that name its actions
# of a figure: ranks, actions of them, and columns of a terminal's characters, three points each
_FIGURE_ROWS, _FIGURE_ACTIONS, _FIGURE_COLUMNS = 64, 10_000, 140
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
        fits=execution.fits,
        changed=changes(before, plan),
        planned=Planned(
            period_s=before.predicted.period_s,
            iteration_s=before.predicted.iteration_s,
            samples_per_s=before.predicted.samples_per_s,
            bubble=before.predicted.bubble,
            peak_memory_bytes=before.peak_memory_bytes,
        ),
        levels=execution.level_use,
        advice=list(findings),
        ranks=[
            _rank_time(execution, rank, stages)
            for rank, stages in sorted(plan.stages_by_rank().items())
        ],
        topology=plan.topology,
        timeline=drawn_timeline(execution.timeline, drawn_windows(execution)),
        variation=varied or msgspec.UNSET,
    )


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


_WAITS = {True: "serial", False: "overlap"}


def changes(before: Plan, after: Plan) -> list[str]:
    """The conditions that differ between two plans of the same stages.

    Example: `bandwidth of cluster 1.25 GB/s -> 3.13 GB/s`.
    """
    entry = SCHEDULES.get(after.schedule)
    pairs: list[tuple[str, ...]] = [("schedule", before.schedule, after.schedule)]
    if after.microbatches is not None:
        then = "none" if before.microbatches is None else str(before.microbatches)
        pairs.append(("microbatches", then, str(after.microbatches)))
    if (before.schedule, before.microbatches) == (after.schedule, after.microbatches):
        warmups = [[stage.warmup for stage in plan.stages] for plan in (before, after)]
        if warmups[0] != warmups[1]:
            pairs.append(("warm-up", _list_numbers(warmups[0]), _list_numbers(warmups[1])))
    for levels in zip(before.topology.own_levels, after.topology.own_levels, strict=True):
        name = levels[0].name
        rates = [format_bandwidth(level.bandwidth_bytes_per_s) for level in levels]
        latencies = [format_seconds(level.latency_s) for level in levels]
        pairs.append((f"bandwidth of {name}", *rates))
        pairs.append((f"latency of {name}", *latencies))
        pairs.append((f"links of {name}", *(str(level.links) for level in levels)))
    limits = [plan.memory_limit_bytes for plan in (before, after)]
    texts = ["unknown" if limit is None else format_bytes(limit) for limit in limits]
    waits = [_WAITS[plan.waits] for plan in (before, after)]
    pairs += [("memory of a device", *texts), ("transfers", *waits)]
    if entry is not None and entry.asynchronous:
        pairs.append(("all-reduces", before.engine.allreduce, after.engine.allreduce))
    return [f"{what} {old} -> {new}" for what, old, new in pairs if old != new]


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
    starts, end_s = _starts(timeline, (F,)), execution.makespan_s
    full_s = float(_starts(timeline, (B, I))[0])  # when the pipeline is full
    if steady is not None:
        end_s = min(end_s, full_s + max(full_s, 2 * (execution.end_s - execution.start_s)))
    turn_s = _turn_s(timeline, starts)
    if end_s <= columns / _NARROWEST * turn_s:
        what: What = "all" if end_s == execution.makespan_s else "beginning"
        return [DrawnWindow(what=what, begin_s=0.0, end_s=end_s)]
    third_s = columns / 3 * turn_s
    span = min(max(full_s, third_s / _READABLE), third_s / _NARROWEST)
    windows = [DrawnWindow(what="beginning", begin_s=0.0, end_s=span)]
    # the middle, or a cycle, from a forward of the first stage on where one begins near by
    middle = (end_s - span) / 2
    if steady is not None:
        middle = max(span, min(execution.start_s, execution.end_s - span))
    near = starts[(starts <= middle) & (starts >= max(span, middle - turn_s))]
    begin = float(near.max(initial=0.0)) or middle
    what = "steady" if _passes_both(timeline, begin, begin + span) else "middle"
    windows.append(DrawnWindow(what=what, begin_s=begin, end_s=begin + span))
    if steady is None:
        windows.append(DrawnWindow(what="end", begin_s=end_s - span, end_s=end_s))
    return windows


def _starts(timeline: Timeline, kinds: Sequence[int]) -> Seconds:
    """When the first stage begins the actions of these kinds, in order."""
    order = timeline.order
    return np.sort(timeline.start[(order.stage == 0) & np.isin(order.kind, kinds)])


def _turn_s(timeline: Timeline, starts: Seconds) -> float:
    """Seconds from one microbatch to the next in the middle of a timeline.

    The busiest rank needs so much for one, or the first stage begins one so often, at `starts`.
    """
    order, n = timeline.order, len(starts)
    took = np.where(order.kind == A, 0.0, timeline.end - timeline.start)
    sums = np.concatenate([[0.0], np.cumsum(took, dtype=np.float64)])
    pace = float(starts[3 * n // 4] - starts[n // 4]) / max(1, 3 * n // 4 - n // 4)
    passed = int(order.microbatch.max()) + 1
    return max(pace, float(np.diff(sums[order.rows]).max()) / passed)


def _passes_both(timeline: Timeline, begin_s: float, end_s: float) -> bool:
    """Whether all stages have about as many forwards as backwards in an interval."""
    order = timeline.order
    inside, stages = (timeline.end > begin_s) & (timeline.start < end_s), 1 + int(order.stage.max())
    forwards, backwards = (
        np.bincount(order.stage[inside & np.isin(order.kind, kinds)], minlength=stages)
        for kinds in ((F,), (B, I))
    )
    return bool((np.maximum(forwards, backwards) <= 2 * np.minimum(forwards, backwards)).all())


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
    inside = {}
    for rank in ranks:
        drawn = slots(timeline, rank)
        # all-reduces are shown while they are exchanged, not while a rank waits for them
        seen = _overlaps(drawn.start, drawn.end, shown) & (drawn.kind != A)
        inside[rank] = Slots._make(column[seen] for column in drawn)
    if sum(len(drawn.kind) for drawn in inside.values()) > limit:
        return None
    return DrawnTimeline(
        windows=windows,
        note=note,
        ranks=[_rank(timeline, rank, drawn, shown) for rank, drawn in inside.items()],
    )


def figure_timeline(
    execution: Execution, window: tuple[float, float] | None = None
) -> DrawnTimeline:
    """What a figure draws: the timeline, or the seconds of it in `window`.

    Of a timeline of very many actions that is the beginning. Raises PartoptError where there is
    nothing or too much to draw.
    """
    windows = drawn_windows(execution, _FIGURE_COLUMNS)
    spans = [(windows[0].begin_s, windows[-1].end_s), (windows[0].begin_s, windows[0].end_s)]
    for begin, end in spans if window is None else [window]:
        shown = DrawnWindow(what="all", begin_s=begin, end_s=end)
        drawn = drawn_timeline(execution.timeline, [shown], _FIGURE_ROWS, _FIGURE_ACTIONS)
        if drawn is not None:
            break
    else:
        raise PartoptError(
            f"a figure of more than {_FIGURE_ACTIONS:,} actions is more than anyone can see",
            "choose a shorter window",
            code="too-many-actions",
            limit=_FIGURE_ACTIONS,
        )
    if not any(rank.start_s and rank.start_s[0] < end for rank in drawn.ranks):
        raise PartoptError(
            "there is nothing to draw",
            "choose a window in which something happens",
            code="nothing-to-draw",
        )
    return drawn


def _overlaps(start: Seconds, end: Seconds, windows: Seconds) -> NDArray[np.bool_]:
    """Which intervals share time with a window, `windows` of shape (w, 2)."""
    both = (end[:, None] > windows[:, 0]) & (start[:, None] < windows[:, 1])
    return np.asarray(both.any(axis=1))


def _rank(timeline: Timeline, rank: int, drawn: Slots, windows: Seconds) -> RankTimeline:
    """A rank's actions as `2F0 2B0`, joined ones as `2F3&5B1`."""
    order, first = timeline.order, drawn.pair != 2
    starts, ends = exchanges(timeline, rank)
    seen = _overlaps(starts, ends, windows)
    names = [
        f"{'&' if pair == 2 else ' '}{stage}{KINDS[kind]}{'' if kind == U else microbatch}"
        for kind, stage, microbatch, pair in zip(
            *(column.tolist() for column in (drawn[:3] + drawn[4:5])), strict=True
        )
    ]
    return RankTimeline(
        rank=rank,
        stages=np.unique(order.stage[order.rows[rank] : order.rows[rank + 1]]).tolist(),
        actions="".join(names)[1:],
        start_s=drawn.start[first].tolist(),
        end_s=drawn.end[first].tolist(),
        allreduce_start_s=np.sort(starts[seen]).tolist(),
        allreduce_end_s=np.sort(ends[seen]).tolist(),
    )
