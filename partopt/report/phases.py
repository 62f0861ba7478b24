"""How long a pipeline fills and drains, as drawings mark it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from partopt.schedules.order import A, U
from partopt.simulator.timeline import Timeline


class Phases(NamedTuple):
    """From 0 to `fill_end` some rank has not begun, from `drain_begin` to `end` some has ended.

    All are seconds.
    """

    fill_end: float
    drain_begin: float
    end: float


def phases_of(timeline: Timeline) -> Phases:
    """When the last rank begins, and when the first one has done its last action.

    All-reduces and optimizer steps do not count.
    """
    order = timeline.order
    chosen = np.flatnonzero((order.kind != A) & (order.kind != U))
    rank = np.repeat(np.arange(order.ranks), np.diff(order.rows))[chosen]
    first = np.flatnonzero(np.diff(rank, prepend=-1))
    last = np.append(first[1:], len(rank)) - 1
    begun, ended = (
        timeline.start[chosen][first].astype(np.float64),
        timeline.end[chosen][last].astype(np.float64),
    )
    if not len(first):
        return Phases(0.0, 0.0, 0.0)
    return Phases(float(begun.max()), float(ended.min()), float(ended.max()))
