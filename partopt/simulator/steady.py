"""The steady state of an asynchronous schedule, found by its repetition.

No fixed number of microbatches is left out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from partopt.cost.compiled import compiled
from partopt.schedules.order import B, F, I, Order
from partopt.simulator.timeline import Timeline

# G   microbatches that passed
# D   microbatches in flight in the whole pipeline, at most,
#     and those whose gradients may yet be exchanged
# c   microbatches of one cycle, a multiple of every number of replicas
# x   when the actions, messages and all-reduce of a microbatch began on every stage, shape
#     (G, 5 S): the forward, the backward, what each of them sent, and the round's all-reduce; nan
#     where there is none

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
    x = _starts(timeline, replicas)
    G, S = len(x), len(replicas)
    # a round's all-reduce is over before the next but one ends
    D = in_flight_in_all(timeline.order, replicas) + 2 * max(replicas)
    last = G - D  # what comes later knows that the pipeline is running dry
    whole = Steady(float(timeline.makespan) / G, False, 0.0, float(timeline.makespan), G)
    if last < 2:
        return whole
    step = math.lcm(*replicas)  # may be more than an int64 holds
    cycles = np.array(range(step, (last - D) // 2 + 1, step), dtype=np.int64)
    tolerance = _TOLERANCE * float(x[last - 1, 0])
    c, shift = _shortest_cycle(x, last, D, cycles, tolerance)
    if c:
        start = float(x[last - c - 1, : 2 * S].max())
        return Steady(shift / c, True, start - shift, start, c)
    first, end = (float(x[place - 1, S]) for place in (last - last // 2, last))
    few = microbatches_to_tell(D - 2 * max(replicas), replicas) > G or end <= first
    return whole if few else Steady((end - first) / (last // 2), False, first, end, last // 2)


def microbatches_to_settle(order_depth: int, replicas: list[int]) -> int:
    """How many microbatches to try first.

    They are enough to see two cycles, and every microbatch in flight three times.
    """
    return 3 * order_depth + 4 * math.lcm(*replicas)


def microbatches_to_tell(order_depth: int, replicas: list[int]) -> int:
    """With how many microbatches half of them tell more of the pace than all."""
    return 4 * (order_depth + max(replicas))


def in_flight_in_all(order: Order, replicas: list[int]) -> int:
    """D of an order: what the replicas of the first stage hold together."""
    peak: int = _most_of_first_stage(order.kind, order.stage, order.rows)
    return peak * replicas[0]


@compiled()
def _most_of_first_stage(kind, stage, rows):  # type: ignore[no-untyped-def]
    """The most microbatches that a replica of the first stage holds at once."""
    most = 0
    for rank in range(len(rows) - 1):
        held = 0
        for place in range(rows[rank], rows[rank + 1]):
            if stage[place] == 0:
                held += (kind[place] == F) - (kind[place] in (B, I))
                most = max(most, held)
    return most


def _starts(timeline: Timeline, replicas: list[int]) -> NDArray[np.float64]:
    """x of a timeline."""
    order, sent, done = timeline.order, timeline.transfers, timeline.collectives
    S, G = len(replicas), int(order.microbatch[order.kind == F].max()) + 1
    x = np.full((G, 5 * S), np.nan)
    _place_starts(order.kind, order.stage, order.microbatch, timeline.start, x, 0, S)
    _place_starts(sent.kind, sent.stage, sent.microbatch, sent.start, x, 2 * S, S)
    _place_rounds(done.stage, done.round, done.start, np.array(replicas), x)
    return x


@compiled()
def _place_starts(kind, stage, microbatch, start, x, column, S):  # type: ignore[no-untyped-def]
    """Put starts into `x`: of kind F from `column` on, of B and I S columns further."""
    for n in range(len(kind)):
        if kind[n] == F:
            x[microbatch[n], column + stage[n]] = start[n]
        elif kind[n] in (B, I):
            x[microbatch[n], column + S + stage[n]] = start[n]


@compiled()
def _place_rounds(stage, number, start, replicas, x):  # type: ignore[no-untyped-def]
    """Put the start of each all-reduce into `x`, for all microbatches of its round."""
    column = x.shape[1] - len(replicas)
    for n in range(len(stage)):
        r = replicas[stage[n]]
        x[number[n] * r : (number[n] + 1) * r, column + stage[n]] = start[n]


@compiled(allocates=True)
def _shortest_cycle(x, last, D, cycles, tolerance):  # type: ignore[no-untyped-def]
    """The least c of `cycles` after which all repeats, and the seconds that it takes; 0 for none.

    Cycles that may do are read off the matches of the sequence of microbatches, which take one pass
    over it; each of them is then compared as a whole, as small differences add up.
    """
    matches = _matches(x, last, 2 * tolerance, cycles[-1] + 1 if len(cycles) else 1)
    for c in cycles:
        compared = max(c, D)
        if matches[c] >= compared - 1:
            shift = x[last - 1, 0] - x[last - 1 - c, 0]
            if _is_shifted(x, last, c, compared, shift, tolerance):
                return c, shift
    return 0, 0.0


@compiled()
def _is_shifted(x, last, c, compared, shift, tolerance):  # type: ignore[no-untyped-def]
    """Whether the `compared` microbatches before `last` come `shift` later than those c before."""
    for g in range(last - compared, last):
        for each in range(x.shape[1]):
            if abs(x[g, each] - x[g - c, each] - shift) > tolerance:
                return False
    return True


@compiled(allocates=True)
def _matches(x, last, tolerance, places):  # type: ignore[no-untyped-def]
    """How many microbatches before `last` are like those c before them, for each c < `places`.

    The Z algorithm (Gusfield, 1997, section 1.4) on the microbatches in reverse, each seen from the
    first stage's forward.
    """
    matches = np.zeros(places, np.int64)
    begin = end = 0  # of the match that reaches furthest
    for c in range(1, places):
        n = min(end - c, matches[c - begin]) if c < end else 0
        while c + n < last - 1 and _is_like(x, last - 1 - n, last - 1 - n - c, tolerance):
            n += 1
        matches[c] = n
        if c + n > end:
            begin, end = c, c + n
    return matches


@compiled()
def _is_like(x, g, h, tolerance):  # type: ignore[no-untyped-def]
    """Whether all starts of microbatches g and h lie alike, from the first forward before on."""
    shift = x[g, 0] - x[h, 0]
    if abs(x[g - 1, 0] - x[h - 1, 0] - shift) > tolerance:
        return False
    for each in range(x.shape[1]):
        if abs(x[g, each] - x[h, each] - shift) > tolerance:  # nan is like anything
            break
    else:
        return True
    return False
