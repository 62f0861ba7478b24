"""Where the time of every rank goes, and how busy the links are."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from partopt.cost.messages import parting_levels
from partopt.documents.actions import A, B, F, I, U
from partopt.documents.simulation import LevelTime
from partopt.simulator.timeline import Timeline
from partopt.simulator.work import Work

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Shares:
    """Seconds of every rank in an interval, by what it did or waited for.

    Each has shape (ranks,); together they add up to the interval.

    `forward_s` and `gradient_s` are spent waiting for another stage to compute an activation or a
    gradient, `transfer_s` for it to arrive or, with serial transfers, for the rank's messages;
    `allreduce_s` for gradients to be exchanged; `end_s` with nothing left to do.
    """

    compute_s: Floats
    forward_s: Floats
    gradient_s: Floats
    transfer_s: Floats
    allreduce_s: Floats
    end_s: Floats

    @property
    def idle_s(self) -> Floats:
        """Seconds in which a rank waits for others to compute."""
        return self.forward_s + self.gradient_s + self.end_s


def shares(timeline: Timeline, work: Work, start_s: float, end_s: float) -> Shares:
    """What every rank did between `start_s` and `end_s`."""
    order = timeline.order
    ranks = np.repeat(np.arange(order.ranks), np.diff(order.rows))

    def seconds(begin: Floats, end: Floats, chosen: NDArray[np.bool_] | None = None) -> Floats:
        inside = np.maximum(0.0, np.minimum(end, end_s) - np.maximum(begin, start_s))
        return np.bincount(
            ranks, inside if chosen is None else inside * chosen, minlength=order.ranks
        ).astype(np.float64)

    # when the rank of every action ended the one before; 0 for the rank's first
    before = np.concatenate([[0.0], timeline.end[:-1]])
    before[order.rows[:-1][np.diff(order.rows) > 0]] = 0.0
    ready = np.minimum(np.maximum(_made(timeline, work), before), timeline.start)
    # the second of two that run at once is counted with the first
    second = np.concatenate([[False], order.joined[:-1]])
    gradients = np.isin(order.kind, (B, I))
    due = np.isin(np.arange(len(work.ranks)), order.stage[order.kind == A])
    # a step waits for its stage's all-reduce
    exchanges = (order.kind == A) | ((order.kind == U) & due[order.stage])
    acts = (order.kind != A) & ~second
    last = np.concatenate([[0.0], timeline.end])[order.rows[1:]] * (np.diff(order.rows) > 0)
    return Shares(
        compute_s=seconds(timeline.start, timeline.end, acts),
        forward_s=seconds(before, ready, ~gradients & ~second),
        gradient_s=seconds(before, ready, gradients & ~second),
        transfer_s=seconds(ready, timeline.start, ~exchanges & ~second),
        allreduce_s=seconds(before, timeline.start, exchanges)
        + seconds(timeline.start, timeline.end, order.kind == A),
        end_s=np.maximum(0.0, end_s - np.maximum(last, start_s)),
    )


def _made(timeline: Timeline, work: Work) -> Floats:
    """When the input of every action was ready on the stage that sends it.

    That is the stage before or, for a gradient, the one behind; 0 where an action needs no input
    from another stage. A result can be sent at the end of its action, or of the exchange that is
    part of it.
    """
    order, S, ended = timeline.order, len(work.ranks), timeline.end
    if work.blocking:
        followed = np.concatenate([order.kind[1:] == A, [False]])
        ended = np.where(followed, np.concatenate([ended[1:], [0.0]]), ended)
    G = int(order.microbatch.max(initial=0)) + 1
    # stages from 1, so that the first and the last need no exception
    by_stage = np.zeros((2, S + 2, G))
    forwards, gradients = order.kind == F, np.isin(order.kind, (B, I))
    by_stage[0, order.stage[forwards] + 1, order.microbatch[forwards]] = ended[forwards]
    by_stage[1, order.stage[gradients] + 1, order.microbatch[gradients]] = ended[gradients]
    made = np.zeros(len(order.kind))
    made[forwards] = by_stage[0, order.stage[forwards], order.microbatch[forwards]]
    made[gradients] = by_stage[1, order.stage[gradients] + 2, order.microbatch[gradients]]
    return made


def longest_span_s(timeline: Timeline) -> float:
    """Seconds from first start to last end on the rank for which that is longest.

    Optimizer steps are left out. Papers on zero-bubble schedules quote this instead of the
    makespan.
    """
    order = timeline.order
    computes = ~np.isin(order.kind, (A, U))
    rows = np.repeat(np.arange(order.ranks), np.diff(order.rows))[computes]
    firsts = np.flatnonzero(np.diff(rows, prepend=-1))
    ends = np.maximum.reduceat(timeline.end[computes], firsts)
    return float((ends - timeline.start[computes][firsts]).max())


def level_use(timeline: Timeline, work: Work, start_s: float, end_s: float) -> list[LevelTime]:
    """How busy every level of the topology is between `start_s` and `end_s`, innermost first."""
    ports, rings, window_s = work.ports, work.rings, end_s - start_s
    carried, moved = _transfers(timeline, work, start_s, end_s)
    times = _exchanges(timeline, len(work.ranks), start_s, end_s)
    exchanged = np.zeros(ports.count)
    np.add.at(exchanged, rings.port, np.repeat(times, np.diff(rings.first)) * rings.load)

    def busiest(seconds: Floats, k: int) -> float:
        of_level = seconds[ports.first[k] : ports.first[k + 1]]
        return float(of_level.max(initial=0.0) / window_s)

    return [
        LevelTime(
            level=level.name,
            transfer_share=busiest(carried, k),
            allreduce_share=busiest(exchanged, k),
            sent_bytes=float(moved[k + 1]),
        )
        for k, level in enumerate(work.topology.levels)
    ]


def _transfers(
    timeline: Timeline, work: Work, start_s: float, end_s: float
) -> tuple[Floats, Floats]:
    """Seconds for which messages hold every port, and bytes that arrive over every level.

    The seconds are of all lanes of a port together, shape (ports,). The bytes start with level 0,
    for messages that cross none, shape (L + 1,).
    """
    sent, ports = timeline.transfers, work.ports
    inside = (sent.end > start_s) & (sent.start < end_s)
    source, destination = sent.source[inside], sent.destination[inside]
    k = parting_levels(source, destination, work.topology)
    gradients = sent.kind[inside] != F
    size = work.crossing[gradients.astype(np.int64), sent.stage[inside] + ~gradients]
    start, arrived = sent.start[inside], sent.end[inside] <= end_s
    ended = np.minimum(start + size / ports.bandwidth[k - 1], end_s)
    seconds = np.maximum(0.0, ended - np.maximum(start, start_s)) / ports.lanes[k - 1]
    carried, moved = np.zeros(ports.count), np.zeros(len(work.topology.levels) + 1)
    np.add.at(carried, ports.of_ranks(source, k, 0), seconds)
    into = ~ports.bus[k - 1]  # a bus is one port for both
    np.add.at(carried, ports.of_ranks(destination[into], k[into], 1), seconds[into])
    np.add.at(moved, k, size * arrived)
    return carried, moved


def _exchanges(timeline: Timeline, stages: int, start_s: float, end_s: float) -> Floats:
    """How many all-reduces of every stage lie between `start_s` and `end_s`, shape (S,).

    One that lies there in part counts in part.
    """
    done = timeline.collectives
    inside = np.maximum(0.0, np.minimum(done.end, end_s) - np.maximum(done.start, start_s))
    took = done.end - done.start
    parts = np.divide(inside, took, out=np.zeros(len(took)), where=took > 0)
    return np.bincount(done.stage, parts, minlength=stages).astype(np.float64)
