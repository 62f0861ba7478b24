"""How many microbatches an order keeps in flight, counted exactly.

The counts of each schedule (`partopt.schedules.entry`) must agree with these.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from partopt.schedules.order import B, F, I, Order, W

Integers = NDArray[np.int64]


class Held(NamedTuple):
    """The most microbatches that a rank holds at once of each stage that it works on.

    The n entries are ordered by rank and stage.
    """

    rank: Integers  # shape (n,)
    stage: Integers
    most: Integers


def in_flight(order: Order) -> Integers:
    """The most microbatches that each rank holds at once, shape (ranks,).

    A microbatch is held from the start of its forward to the end of its backward, or of its W where
    the backward is split. One that is in flight in several of a rank's chunks counts in each. Of
    two joined actions, the forward first, both hold theirs until the slot ends.
    """
    most = np.zeros(order.ranks, dtype=np.int64)
    busy = np.flatnonzero(np.diff(order.rows))
    most[busy] = _peaks(order.kind == F, _ends(order), order.rows[busy])
    return most


def in_flight_by_stage(order: Order) -> Held:
    """The most microbatches that each rank holds at once of each of its stages.

    They are counted as in `in_flight`.
    """
    return _by_stage(order, order.kind == F)


def begun_by_stage(order: Order) -> Held:
    """The most microbatches at once whose backward each rank has begun, of each of its stages."""
    return _by_stage(order, (order.kind == B) | (order.kind == I))


def _by_stage(order: Order, begins: NDArray[np.bool_]) -> Held:
    """The most microbatches at once between an action that `begins` and the end of the backward."""
    rank = np.repeat(np.arange(order.ranks), np.diff(order.rows))
    key = rank * (int(order.stage.max(initial=0)) + 1) + order.stage
    places = np.argsort(key, kind="stable")
    first = np.flatnonzero(np.diff(key[places], prepend=-1))
    at = places[first]
    most = _peaks(begins[places], _ends(order)[places], first)
    return Held(rank[at], order.stage[at].astype(np.int64), most)


def _ends(order: Order) -> NDArray[np.bool_]:
    ends: NDArray[np.bool_] = (order.kind == B) | (order.kind == W)
    return ends


def _peaks(begins: NDArray[np.bool_], ends: NDArray[np.bool_], first: Integers) -> Integers:
    """The most that are between their beginning and the end of their last action, by section.

    Sections begin at `first`, and none is empty.
    """
    if not len(first):
        return np.zeros(0, dtype=np.int64)
    after = np.cumsum(begins.astype(np.int64) - ends)
    before = (after - begins + ends)[first]
    peaks: Integers = np.maximum(np.maximum.reduceat(after + ends, first) - before, 0)
    return peaks
