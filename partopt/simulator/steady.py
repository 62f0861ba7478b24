"""The steady state of an asynchronous schedule, found by its repetition.

No fixed number of microbatches is left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from partopt.cost.compiled import compiled
from partopt.documents.actions import B, F, I
from partopt.schedules.order import in_flight
from partopt.simulator.timeline import Timeline

# G   microbatches that passed
# D   microbatches in flight in the whole pipeline, at most,
#     and those whose gradients may yet be exchanged
# c   microbatches of one cycle, a multiple of every number of replicas
# x   when the actions, messages and all-reduce of a microbatch began on every stage, shape
#     (G, 5 S): the forward, the backward, what these sent, and the round's all-reduce; nan
#     where there is none

# actions after which an asynchronous plan that has not settled is taken at its mean pace
SETTLE_LIMIT = 300_000
# of the first run: where two whole cycles of all replicas are more, they are not waited for
FIRST_LIMIT = 600_000
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
    """The steady state of an asynchronous timeline of stages with so many `replicas`.

    Two cycles are taken to be the same where every forward, backward, message and all-reduce of all
    stages begins later by one and the same time, over as many microbatches as are in flight at once
    and a cycle more: then nothing that the second began from differs from what the first did, and
    all that follow are the same too. Computations alone can repeat while all-reduces come later and
    later.
    """
    order = timeline.order
    working = np.flatnonzero(np.diff(order.rows))
    first_stage = working[order.stage[order.rows[working]] == 0]
    flying = int(in_flight(order)[first_stage].max()) * replicas[0]
    return steady_of(_starts(timeline, replicas), float(timeline.makespan), flying, replicas)


def steady_of(
    x: NDArray[np.float64], makespan_s: float, flying: int, replicas: Sequence[int]
) -> Steady:
    """The steady state of x, with so many microbatches in flight in the whole pipeline."""
    G, S = len(x), len(replicas)
    # a round's all-reduce is over before the next but one ends
    D = flying + 2 * max(replicas)
    last = G - D  # what comes later knows that the pipeline is running dry
    whole = Steady(makespan_s / G, False, 0.0, makespan_s, G)
    if last < 2:
        return whole
    step = math.lcm(*replicas)  # may be more than an int64 holds
    tolerance = _TOLERANCE * float(x[last - 1, 0])
    c = shortest_cycle(x, last, D, min(step, G), tolerance)
    if c:
        start, shift = (
            float(x[last - c - 1, : 2 * S].max()),
            float(x[last - 1, 0] - x[last - 1 - c, 0]),
        )
        return Steady(shift / c, True, start - shift, start, c)
    first, end = (float(x[place - 1, S]) for place in (last - last // 2, last))
    few = microbatches_to_tell(flying, replicas) > G or end <= first
    return whole if few else Steady((end - first) / (last // 2), False, first, end, last // 2)


def microbatches_to_settle(order_depth: int, replicas: Sequence[int]) -> int:
    """How many microbatches to try first.

    They are enough to see two cycles, and every microbatch in flight three times.
    """
    return 3 * order_depth + 4 * math.lcm(*replicas)


def microbatches_to_tell(order_depth: int, replicas: Sequence[int]) -> int:
    """With how many microbatches half of them tell more of the pace than all."""
    return 4 * (order_depth + max(replicas))


def microbatches_at_first(warmup: int, replicas: Sequence[int]) -> int:
    """How many microbatches pass through an asynchronous plan at first.

    They are as many as it takes to settle. Where that is long, for numbers of replicas have a large
    common multiple, they are enough for a mean pace. `warmup` is that of the first stage.
    """
    depth, actions = (warmup + 1) * replicas[0], 2 * len(replicas)
    to_settle = microbatches_to_settle(depth, replicas)
    if to_settle * actions <= FIRST_LIMIT:
        return to_settle
    return min(to_settle, max(microbatches_to_tell(depth, replicas), SETTLE_LIMIT // actions))


def is_long(microbatches: int, replicas: Sequence[int]) -> bool:
    """Whether twice as many microbatches are too many to wait until a plan has settled."""
    return 4 * microbatches * len(replicas) > SETTLE_LIMIT


def _starts(timeline: Timeline, replicas: list[int]) -> NDArray[np.float64]:
    """x of a timeline."""
    order, crossed, done = timeline.order, timeline.transfers, timeline.collectives
    S, G = len(replicas), int(order.microbatch[order.kind == F].max()) + 1
    x, sent = np.empty((G, 5 * S)), np.full((2, S, G), np.nan)
    way = np.isin(crossed.kind, (B, I)).astype(np.int64)
    sent[way, crossed.stage, crossed.microbatch] = crossed.start
    rounds = np.column_stack([done.stage, done.round, done.start])
    given = order.kind, order.stage, order.microbatch, timeline.start
    fill_starts(x, *given, sent, rounds, np.array(replicas))
    return x


@compiled()
def fill_starts(x, kind, stage, microbatch, start, sent, done, replicas):
    """Fill in x from the arrays of a run of the engine."""
    G, S = x.shape[0], len(replicas)
    x[:] = np.nan
    for n in range(len(kind)):
        if kind[n] == F:
            x[microbatch[n], stage[n]] = start[n]
        elif kind[n] == B or kind[n] == I:
            x[microbatch[n], S + stage[n]] = start[n]
    for way in range(2):
        for s in range(S):
            for g in range(G):
                x[g, (2 + way) * S + s] = sent[way, s, g]
    for row in range(len(done)):
        s = int(done[row, 0])
        first = int(done[row, 1]) * replicas[s]
        for g in range(first, min(G, first + replicas[s])):
            x[g, 4 * S + s] = done[row, 2]


@compiled()
def shortest_cycle(x, last, D, step, tolerance):
    """The least multiple of `step` after which all of x repeats before row `last`; 0 for none.

    Of two cycles the later half, and as many rows as D, begin later by one time. What is nan is
    like anything.
    """
    for c in range(step, (last - D) // 2 + 1, step):
        shift = x[last - 1, 0] - x[last - 1 - c, 0]
        row, end, alike = last - 1, last - max(c, D), True
        while alike and row >= end:
            for column in range(x.shape[1]):
                if abs(x[row, column] - x[row - c, column] - shift) > tolerance:
                    alike = False
                    break
            row -= 1
        if alike:
            return c
    return 0
