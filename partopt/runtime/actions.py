"""What a rank does: its actions in their order, whom they have messages with, and when it ran."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from partopt.documents.actions import B, F, I
from partopt.schedules.order import Order

Times = NDArray[np.int64]  # nanoseconds, shape (steps, actions of the rank); 0 where there is none


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

    @property
    def message_in(self) -> Route | None:
        """What it receives from another rank."""
        return None if self.receives is None or self.receives.is_local else self.receives

    @property
    def message_out(self) -> Route | None:
        """What it sends to another rank."""
        return None if self.sends is None or self.sends.is_local else self.sends


def actions_of(order: Order, rank: int) -> list[Action]:
    """The actions of `rank`, in its order; none where the order does not know the rank."""
    if rank >= order.ranks:
        return []
    forwards = np.flatnonzero(order.kind == F)
    ranks = np.repeat(np.arange(order.ranks), np.diff(order.rows))
    shape = int(order.stage.max()) + 1, int(order.microbatch[forwards].max()) + 1
    owner = np.full(shape, -1)  # the rank that runs a microbatch of a stage
    owner[order.stage[forwards], order.microbatch[forwards]] = ranks[forwards]

    def route(kind: int, stage: int, receiver: int, microbatch: int) -> Route | None:
        if not (0 <= stage < len(owner) and 0 <= receiver < len(owner)):
            return None
        source, destination = owner[stage, microbatch], owner[receiver, microbatch]
        return Route(kind, stage, microbatch, int(source), int(destination))

    row = order.of_rank(rank)
    columns = (order.kind[row], order.stage[row], order.microbatch[row])
    actions = []
    for place, (kind, s, m) in enumerate(zip(*(c.tolist() for c in columns), strict=True)):
        receives = sends = None
        if kind == F:
            receives, sends = route(F, s - 1, s, m), route(F, s, s + 1, m)
        elif kind in (B, I):
            receives, sends = route(B, s + 1, s, m), route(B, s, s - 1, m)
        actions.append(Action(place, kind, s, m, receives, sends))
    return actions


@dataclass(eq=False)
class RankRecord:
    """When one rank began and ended every one of its actions and messages, in `steps` steps.

    Times are of `time.perf_counter_ns`, which processes of one host share; `started_ns` is when the
    barrier before every step ended. A received message is there at `received` at the latest. The
    exchange that an action A begins ends at `exchanged`, while the rank goes on.
    """

    rank: int
    host: str
    steps: int
    actions: int
    started_ns: Times = field(init=False)
    begin: Times = field(init=False)
    end: Times = field(init=False)
    receive_posted: Times = field(init=False)
    received: Times = field(init=False)
    send_posted: Times = field(init=False)
    sent: Times = field(init=False)
    exchanged: Times = field(init=False)

    def __post_init__(self) -> None:
        shape = self.steps, self.actions
        self.started_ns = np.zeros(self.steps, np.int64)
        self.begin, self.end, self.exchanged = (np.zeros(shape, np.int64) for _ in range(3))
        self.receive_posted, self.received = (np.zeros(shape, np.int64) for _ in range(2))
        self.send_posted, self.sent = (np.zeros(shape, np.int64) for _ in range(2))
