"""The steady state of an asynchronous schedule, found by its repetition.

No fixed number of microbatches is left out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from partopt.schedules.order import B, F, I, in_flight
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
    order = timeline.order
    working = np.flatnonzero(np.diff(order.rows))
    first_stage = working[order.stage[order.rows[working]] == 0]
    flying = int(in_flight(order)[first_stage].max()) * replicas[0]
    # a round's all-reduce is over before the next but one ends
    D = flying + 2 * max(replicas)
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
    few = microbatches_to_tell(flying, replicas) > G or end <= first
    return whole if few else Steady((end - first) / (last // 2), False, first, end, last // 2)


def microbatches_to_settle(order_depth: int, replicas: list[int]) -> int:
    """How many microbatches to try first.

    They are enough to see two cycles, and every microbatch in flight three times.
    """
    return 3 * order_depth + 4 * math.lcm(*replicas)


def microbatches_to_tell(order_depth: int, replicas: list[int]) -> int:
    """With how many microbatches half of them tell more of the pace than all."""
    return 4 * (order_depth + max(replicas))


def _starts(timeline: Timeline, replicas: list[int]) -> NDArray[np.float64]:
    """x of a timeline."""
    order, sent, done = timeline.order, timeline.transfers, timeline.collectives
    S, G = len(replicas), int(order.microbatch[order.kind == F].max()) + 1
    x = np.full((G, 5 * S), np.nan)
    for column, part in ((0, order), (2 * S, sent)):
        start = timeline.start if part is order else sent.start
        for first, kinds in ((column, (F,)), (column + S, (B, I))):
            own = np.isin(part.kind, kinds)
            x[part.microbatch[own], first + part.stage[own]] = start[own]
    counts = np.array(replicas)[done.stage]  # a round's start is that of all its microbatches
    turns = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    own = np.repeat(np.arange(len(counts)), counts)
    microbatch = done.round[own] * counts[own] + turns
    x[microbatch, 4 * S + done.stage[own]] = done.start[own]
    return x


def _shortest_cycle(
    x: NDArray[np.float64], last: int, D: int, cycles: NDArray[np.int64], tolerance: float
) -> tuple[int, float]:
    """The least c of `cycles` after which all repeats, and the seconds that it takes; 0 for none.

    Cycles are told apart by their last microbatch alone, then by more and more of them.
    """
    shifts = x[last - 1, 0] - x[last - 1 - cycles, 0]
    differences = np.abs(x[last - 1] - x[last - 1 - cycles] - shifts[:, None])
    for c in cycles[~(differences > tolerance).any(axis=1)].tolist():  # nan is like anything
        compared = max(c, D)
        shift, end = float(x[last - 1, 0] - x[last - 1 - c, 0]), last
        while end > last - compared:
            begin = max(last - compared, 2 * end - last - 16)
            later = x[begin:end] - x[begin - c : end - c]
            if (np.abs(later - shift) > tolerance).any():
                break
            end = begin
        else:
            return c, shift
    return 0, 0.0
