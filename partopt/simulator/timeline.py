"""What a simulation found: every action, transfer and all-reduce with its start and its end.

And what drawings show of it: what a rank does, slot by slot, and which ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from partopt.documents.actions import Slots
from partopt.schedules.order import Order

Times = NDArray[Any]  # seconds: float64, or Fractions of the exact reference


@dataclass(frozen=True, eq=False)
class Transfers:
    """Activations (kind F) and gradients (kind B) between two ranks, n of them.

    They are ordered by kind, stage and microbatch of the sender.
    """

    kind: NDArray[np.int8]  # shape (n,)
    stage: NDArray[np.int32]  # of the sender
    microbatch: NDArray[np.int32]
    source: NDArray[np.int32]  # ranks
    destination: NDArray[np.int32]
    start: Times  # on the wire, after the ports were free
    end: Times  # arrival, latency included


@dataclass(frozen=True, eq=False)
class Collectives:
    """All-reduces of gradients, ordered by stage and round; n of them."""

    stage: NDArray[np.int32]  # shape (n,)
    round: NDArray[np.int32]
    start: Times
    end: Times


@dataclass(frozen=True, eq=False)
class Timeline:
    """An executed order; `start` and `end` are of its actions, from 0 s, shape (actions,).

    Many a search looks at no transfers: `list_transfers` makes them once they are asked for.
    """

    order: Order
    start: Times
    end: Times
    list_transfers: Callable[[], Transfers]
    collectives: Collectives

    @cached_property
    def transfers(self) -> Transfers:
        """The messages that were sent."""
        return self.list_transfers()

    @property
    def makespan(self) -> Any:
        """Seconds from the first start to the last end."""
        return max(self.end.max(), self.collectives.end.max(initial=0)) if len(self.end) else 0.0


def slots(timeline: Timeline, rank: int) -> Slots:
    """The actions of `rank` as they are drawn."""
    order = timeline.order
    row = order.of_rank(rank)
    joined = order.joined[row]
    pair = joined.astype(np.int8)
    pair[1:][joined[:-1]] = 2
    chunk = np.unique(order.stage[row], return_inverse=True)[1]
    times = (column[row].astype(np.float64) for column in (timeline.start, timeline.end))
    return Slots(order.kind[row], order.stage[row], order.microbatch[row], chunk, pair, *times)


def exchanges(timeline: Timeline, rank: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Starts and ends, in seconds, of the all-reduces that `rank` takes part in."""
    order, done = timeline.order, timeline.collectives
    of_rank = np.isin(done.stage, np.unique(order.stage[order.rows[rank] : order.rows[rank + 1]]))
    return done.start[of_rank].astype(np.float64), done.end[of_rank].astype(np.float64)


def working_ranks(order: Order) -> NDArray[np.int64]:
    """The ranks that have actions."""
    return np.flatnonzero(np.diff(order.rows))


def drawn_ranks(order: Order, most: int) -> tuple[list[int], str]:
    """At most `most` of the ranks with work, and a sentence that says which.

    The sentence is empty where those are all of them. Where there are too many, one rank stands for
    all that have the same stages; where that is not enough, ranks are picked at even distances,
    including the first and the last.
    """
    working = working_ranks(order)
    if len(working) <= most:
        return working.tolist(), ""
    alike: dict[tuple[int, ...], int] = {}
    for rank in working.tolist():
        alike.setdefault(
            tuple(np.unique(order.stage[order.rows[rank] : order.rows[rank + 1]]).tolist()), rank
        )
    firsts = sorted(alike.values())
    replicated = "" if len(firsts) == len(working) else ", a replica of each stage"
    if len(firsts) <= most:
        return firsts, f"{len(firsts)} of {len(working)} ranks are shown{replicated}"
    picked = [firsts[n * (len(firsts) - 1) // (most - 1)] for n in range(most)]
    return picked, f"{most} of {len(working)} ranks are shown, at even distances"
