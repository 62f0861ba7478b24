"""The part of a timeline that a page draws, for the simulation's document."""

from __future__ import annotations

import numpy as np

from partopt.documents.simulation import DrawnTimeline, RankTimeline
from partopt.schedules.order import KINDS, A, B, I, U
from partopt.simulator.execution import Execution
from partopt.simulator.slots import Slots, drawn_ranks, exchanges, slots
from partopt.simulator.timeline import Timeline

ROWS = 32  # ranks on a page
# actions of all drawn ranks: 5 MB of a document, and each is narrower than a character on a page
DRAWN_LIMIT = 100_000
# of the window: so much after it is kept too, since the last column of a page ends later
_AFTER = 1 / 8


def drawn_window(execution: Execution) -> tuple[float, float]:
    """Start and end in seconds of what to draw.

    It is the whole iteration; for an asynchronous plan the time until the pipeline is full, and
    then as long again or two cycles, whichever is longer.
    """
    if execution.steady is None:
        return 0.0, execution.makespan_s
    order, timeline = execution.order, execution.timeline
    first_back = (order.stage == 0) & ((order.kind == B) | (order.kind == I))
    full = float(timeline.start[first_back].min())
    cycle = execution.end_s - execution.start_s
    return 0.0, min(execution.makespan_s, full + max(full, 2 * cycle))


def drawn_timeline(
    timeline: Timeline, window: tuple[float, float], rows: int = ROWS, limit: int = DRAWN_LIMIT
) -> DrawnTimeline | None:
    """At most `rows` ranks of the timeline in the seconds of `window`.

    None where they have more actions than `limit`.
    """
    ranks, note = drawn_ranks(timeline.order, rows)
    shown = window[0], window[1] + _AFTER * (window[1] - window[0])
    inside = {rank: _within(slots(timeline, rank), shown) for rank in ranks}
    if sum(len(own.kind) for own in inside.values()) > limit:
        return None
    return DrawnTimeline(
        begin_s=window[0],
        end_s=window[1],
        note=note,
        ranks=[_rank(timeline, rank, own, shown) for rank, own in inside.items()],
    )


def _within(own: Slots, window: tuple[float, float]) -> Slots:
    """The actions in the window, without all-reduces.

    All-reduces are shown while they are exchanged, not while a rank waits for them.
    """
    inside = (own.end > window[0]) & (own.start < window[1]) & (own.kind != A)
    return Slots._make(column[inside] for column in own)


def _rank(timeline: Timeline, rank: int, own: Slots, window: tuple[float, float]) -> RankTimeline:
    order, first = timeline.order, own.pair != 2
    starts, ends = exchanges(timeline, rank)
    seen = (ends > window[0]) & (starts < window[1])
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
