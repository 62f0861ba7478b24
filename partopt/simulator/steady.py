"""The steady state of an asynchronous schedule, found by its repetition.

No fixed number of microbatches is left out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from partopt.schedules.order import B, F, I, Order
from partopt.simulator.timeline import Timeline

# G   microbatches that passed
# D   microbatches in flight in the whole pipeline, at most,
#     and those whose gradients may yet be exchanged
# c   microbatches of one cycle, a multiple of every number of replicas

_TOLERANCE = 1e-11  # of the time that passed: what rounding may change


@dataclass(frozen=True)
class Steady:
    """The steady state of a timeline.

    `settled`: the timeline repeats itself exactly from `start_s` on, every `microbatches`;
    otherwise this is its mean pace over the second half or, where that is no longer than the
    pipeline takes to fill and drain, over all of it.

    `end_s` is `start_s` plus one cycle: in that interval every rank does the same as in any other
    of this length.
    """

    period_s: float
    settled: bool
    start_s: float
    end_s: float
    microbatches: int


def steady_state(timeline: Timeline, replicas: list[int]) -> Steady:
    """The steady state of an asynchronous timeline of stages with `replicas` each.

    Two cycles are taken to be the same where every forward, backward, message and all-reduce of all
    stages begins later by one and the same time, over as many microbatches as are in flight at once
    and a cycle more: then nothing that the second began from differs from what the first did, and
    all that follow are the same too. Computations alone can repeat while all-reduces come later and
    later.
    """
    starts = _starts(timeline, replicas)
    G = starts.shape[2]
    # a round's all-reduce is over before the next but one ends
    D = in_flight_in_all(timeline.order, replicas) + 2 * max(replicas)
    last = G - D  # what comes later knows that the pipeline is running dry
    whole = Steady(float(timeline.makespan) / G, False, 0.0, float(timeline.makespan), G)
    if last < 2:
        return whole
    for c in _candidates(starts[0, 0], last, D, math.lcm(*replicas)):
        shift = _shift(starts, last, c, max(c, D))
        if shift is not None:
            start = float(starts[:2, :, last - c - 1].max())
            return Steady(shift / c, True, start - shift, start, c)
    first, end = (float(starts[1, 0, place - 1]) for place in (last - last // 2, last))
    # too few for a half of them to tell more than all
    few = 4 * (D - max(replicas)) > G or end <= first
    return whole if few else Steady((end - first) / (last // 2), False, first, end, last // 2)


def microbatches_to_settle(order_depth: int, replicas: list[int]) -> int:
    """How many microbatches to try first.

    They are enough to see two cycles, and every microbatch in flight three times.
    """
    return 3 * order_depth + 4 * math.lcm(*replicas)


def in_flight_in_all(order: Order, replicas: list[int]) -> int:
    """D of an order: what the replicas of the first stage hold together."""
    first = np.flatnonzero(order.stage == 0)
    kind, rank = order.kind[first], np.searchsorted(order.rows, first, side="right")
    change = (kind == F).astype(np.int64) - np.isin(kind, (B, I))
    peak = max(int(np.cumsum(change[rank == each]).max()) for each in np.unique(rank))
    return peak * replicas[0]


def _starts(timeline: Timeline, replicas: list[int]) -> NDArray[np.float64]:
    """When the actions, messages and all-reduce of every microbatch began on every stage.

    Shape (5, S, G): the forward, the backward, what each of them sent, and the round's all-reduce;
    nan where there is none.
    """
    order, sent, done = timeline.order, timeline.transfers, timeline.collectives
    G = int(order.microbatch[order.kind == F].max()) + 1
    starts = np.full((5, len(replicas), G), np.nan)
    for direction, kinds in enumerate(((F,), (B, I))):
        chosen = np.isin(order.kind, kinds)
        starts[direction, order.stage[chosen], order.microbatch[chosen]] = timeline.start[chosen]
    starts[np.where(sent.kind == F, 2, 3), sent.stage, sent.microbatch] = sent.start
    for s, r in enumerate(replicas):
        rounds = np.repeat(done.start[done.stage == s], r)
        starts[4, s, : len(rounds)] = rounds
    return starts


def _candidates(starts: NDArray[np.float64], last: int, D: int, step: int) -> list[int]:
    """Numbers of microbatches after which the last few forwards of the first stage repeat.

    All are multiples of `step`.
    """
    c = np.arange(step, (last - D) // 2 + 1, step)
    for back in range(2, min(D, 16)):
        ends, others = (starts[place] - starts[place - c] for place in (last - 1, last - back))
        c = c[abs(ends - others) <= _TOLERANCE * starts[last - 1]]
    return [int(each) for each in c]


def _shift(starts: NDArray[np.float64], last: int, c: int, compared: int) -> float | None:
    """Seconds by which microbatches come later than those one cycle before.

    These are the `compared` ones before `last`; None where they do not agree.
    """
    shift = float(starts[0, 0, last - 1] - starts[0, 0, last - 1 - c])
    now, before = (starts[:, :, end - compared : end] for end in (last, last - c))
    agree = np.nanmax(abs(now - before - shift)) <= _TOLERANCE * starts[0, 0, last - 1]
    return shift if agree else None
