"""The part of a timeline that a page draws, for the simulation's document.

A timeline is drawn whole where a microbatch's turn is wide enough to be read, and otherwise as its
beginning, a part of its middle and its end. This is decided here for every drawing.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from partopt.documents.simulation import DrawnTimeline, DrawnWindow, RankTimeline
from partopt.schedules.order import KINDS, A, B, F, I, U
from partopt.simulator.execution import Execution
from partopt.simulator.slots import Slots, drawn_ranks, exchanges, slots
from partopt.simulator.timeline import Timeline

Seconds = NDArray[np.float64]

ROWS = 32  # ranks on a page
COLUMNS = 68  # characters of a row on a page of 80
DRAWN_LIMIT = 100_000  # actions of all drawn ranks: 5 MB of a document
_NARROWEST, _READABLE = 3, 6  # characters of a turn that may be drawn, and that name its actions
# of a window: so much after it is kept too, since the last column of a page ends later
_AFTER = 1 / 8


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
