"""What each action of a rank receives and sends, and from or to whom, read from the order."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from partopt.schedules.order import B, F, I, Order


class Route(NamedTuple):
    """A message: the activations (kind F) or gradients (kind B) that an action sends."""

    kind: int
    stage: int  # of the sender
    microbatch: int
    source: int  # ranks
    destination: int

    @property
    def is_local(self) -> bool:
        """Whether both stages are on one rank: nothing is sent."""
        return self.source == self.destination

    @property
    def receiver(self) -> int:
        """The stage that receives."""
        return self.stage + (1 if self.kind == F else -1)


class Action(NamedTuple):
    """An action of a rank, its number in the rank's row, and its messages."""

    place: int
    kind: int
    stage: int
    microbatch: int
    receives: Route | None
    sends: Route | None


def owners(order: Order) -> NDArray[np.int32]:
    """The rank that runs each microbatch of each stage, shape (stages, microbatches)."""
    forwards = np.flatnonzero(order.kind == F)
    ranks = np.repeat(np.arange(order.ranks, dtype=np.int32), np.diff(order.rows))
    shape = int(order.stage.max()) + 1, int(order.microbatch[forwards].max()) + 1
    found = np.full(shape, -1, dtype=np.int32)
    found[order.stage[forwards], order.microbatch[forwards]] = ranks[forwards]
    return found


def actions_of(order: Order, rank: int) -> list[Action]:
    """The actions of `rank`, in its order; joined ones follow one another.

    A rank that the order does not know has none.
    """
    if rank >= order.ranks:
        return []
    owner = owners(order)
    first, stop = int(order.rows[rank]), int(order.rows[rank + 1])
    columns = (order.kind, order.stage, order.microbatch)
    rows = zip(*(column[first:stop].tolist() for column in columns), strict=True)
    actions = []
    for place, (kind, stage, microbatch) in enumerate(rows):
        receives = sends = None
        if kind == F:
            receives = _route(owner, F, stage - 1, stage, microbatch)
            sends = _route(owner, F, stage, stage + 1, microbatch)
        elif kind in (B, I):
            receives = _route(owner, B, stage + 1, stage, microbatch)
            sends = _route(owner, B, stage, stage - 1, microbatch)
        actions.append(Action(place, kind, stage, microbatch, receives, sends))
    return actions


def _route(
    owner: NDArray[np.int32], kind: int, stage: int, receiver: int, microbatch: int
) -> Route | None:
    """The message of one stage to another; None where one of them does not exist."""
    if not (0 <= stage < len(owner) and 0 <= receiver < len(owner)):
        return None
    source, destination = owner[stage, microbatch], owner[receiver, microbatch]
    return Route(kind, stage, microbatch, int(source), int(destination))
