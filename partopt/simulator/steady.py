"""The steady state of an asynchronous schedule, found by its repetition and not by a number of microbatches to leave out."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from partopt.schedules.order import B, F, I, Order
from partopt.simulator.timeline import Timeline

# G   microbatches that passed
# D   microbatches in flight in the whole pipeline, at most
# c   microbatches of one cycle, a multiple of every number of replicas

_TOLERANCE = 1e-9  # of a cycle: what adding the same seconds in another order may change


@dataclass(frozen=True)
class Steady:
    """What a timeline settles to. `settled`: it repeats itself exactly, from `start_s` on, every `microbatches`; otherwise its mean pace.

    `end_s` is `start_s` and one cycle: in that stretch every rank does the same as in any other of this length.
    """

    period_s: float
    settled: bool
    start_s: float
    end_s: float
    microbatches: int


def steady_state(timeline: Timeline, replicas: list[int]) -> Steady:
    """The steady state of an asynchronous timeline of stages with `replicas` each.

    Two cycles are taken to be the same where every forward and every backward of all stages begins later by one and the same time, over as
    many microbatches as are in flight at once and a cycle more: then nothing that the second began from differs from what the first did,
    and all that follow are the same too.
    """
    starts = _starts(timeline.order, timeline.start)
    G = starts.shape[2]
    D = in_flight_in_all(timeline.order, replicas)
    last = G - D  # what comes later knows that the pipeline is running dry
    step = math.lcm(*replicas)
    for c in range(step, (last - D) // 2 + 1, step):
        compared = max(c, D)
        if last - c - compared < 0:
            break
        shift = _shift(starts, last, c, compared)
        if shift is not None:
            start = float(starts[:, :, last - c - 1].max())
            return Steady(shift / c, True, start - shift, start, c)
    half = max(1, last // 2)
    first, end = (float(starts[1, 0, max(0, place - 1)]) for place in (last - half, last))
    return Steady((end - first) / half, False, first, end, half)


def microbatches_to_settle(order_depth: int, replicas: list[int]) -> int:
    """How many microbatches to try first: enough to see two cycles, and every microbatch in flight three times."""
    return 3 * order_depth + 4 * math.lcm(*replicas)


def in_flight_in_all(order: Order, replicas: list[int]) -> int:
    """D of an order: what the replicas of the first stage hold together."""
    first = np.flatnonzero(order.stage == 0)
    kind, rank = order.kind[first], np.searchsorted(order.rows, first, side="right")
    change = (kind == F).astype(np.int64) - np.isin(kind, (B, I))
    peak = max(int(np.cumsum(change[rank == each]).max()) for each in np.unique(rank))
    return peak * replicas[0]


def _starts(order: Order, start: NDArray[np.float64]) -> NDArray[np.float64]:
    """When the forward and the backward of every microbatch began on every stage, shape (2, S, G)."""
    starts = np.zeros((2, int(order.stage.max()) + 1, int(order.microbatch[order.kind == F].max()) + 1))
    for direction, kinds in enumerate(((F,), (B, I))):
        chosen = np.isin(order.kind, kinds)
        starts[direction, order.stage[chosen], order.microbatch[chosen]] = start[chosen]
    return starts


def _shift(starts: NDArray[np.float64], last: int, c: int, compared: int) -> float | None:
    """Seconds by which the `compared` microbatches before `last` come later than those one cycle before; None where they do not agree."""
    allowed = _TOLERANCE * starts[0, 0, last - 1]
    of_first = starts[0, 0, last - compared : last] - starts[0, 0, last - compared - c : last - c]
    shift = float(of_first[-1])
    if abs(of_first - shift).max() > allowed:
        return None
    differences = starts[:, :, last - compared : last] - starts[:, :, last - compared - c : last - c]
    return shift if abs(differences - shift).max() <= allowed else None
