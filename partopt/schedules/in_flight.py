"""How many microbatches an order keeps in flight, counted exactly.

The counts of each schedule (`partopt.schedules.entry`) must agree with these.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from partopt.schedules.order import B, F, Order, W

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
    most[busy] = _peaks(_change(order), order.rows[busy])
    return most


def in_flight_by_stage(order: Order) -> Held:
    """The most microbatches that each rank holds at once of each of its stages.

    They are counted as in `in_flight`.
    """
    rank = np.repeat(np.arange(order.ranks), np.diff(order.rows))
    key = rank * (int(order.stage.max(initial=0)) + 1) + order.stage
    places = np.argsort(key, kind="stable")
    first = np.flatnonzero(np.diff(key[places], prepend=-1))
    at = places[first]
    return Held(rank[at], order.stage[at].astype(np.int64), _peaks(_change(order)[places], first))


def _change(order: Order) -> Integers:
    """What each action adds to what is held."""
    change: Integers = (order.kind == F).astype(np.int64) - ((order.kind == B) | (order.kind == W))
    return change


def _peaks(change: Integers, first: Integers) -> Integers:
    """The largest sum of changes since the beginning of each section, at least 0.

    Sections begin at `first`, and none is empty.
    """
    if not len(first):
        return np.zeros(0, dtype=np.int64)
    level = np.cumsum(change)
    peaks: Integers = np.maximum(
        np.maximum.reduceat(level, first) - (level[first] - change[first]), 0
    )
    return peaks
