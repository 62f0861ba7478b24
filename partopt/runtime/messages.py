"""Messages between stages: what crosses a cut, packed, posted ahead, and kept until it is sent.

All tensors of a cut are one message, so that a microbatch pays once for latency. Between two stages
of a rank tensors are handed over as they are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from partopt.documents.actions import B, F
from partopt.documents.plan import Plan
from partopt.errors import PartoptError
from partopt.replay.packing import Packing
from partopt.replay.stage import RunnableStage, check_made, with_gradient
from partopt.runtime.actions import Action, RankRecord, Route
from partopt.runtime.clock import RankClock
from partopt.runtime.completions import Completions
from partopt.runtime.context import Context, Direction, lost_connections
from partopt.runtime.postings import Posting, cached_postings
from partopt.schedules.order import Order

AHEAD = 3  # receives that are posted under gloo before they are used


class Channel:
    """How messages of a plan go from rank to rank.

    Under gloo no two messages of a step have the same tag, and receives are posted a few
    actions ahead. NCCL has no tags: there every direction of a pair of ranks has a group, in which
    messages keep the order of `postings`.
    """

    def __init__(self, context: Context, plan: Plan, order: Order) -> None:
        self.microbatches = int(order.microbatch.max()) + 1
        self.groups: dict[tuple[int, int], Any] = {}  # by source and destination
        self.postings: list[Posting] | None = None
        if context.backend == "nccl":
            every = cached_postings(plan, order, context)
            self.groups = direction_groups(context, every)
            self.postings = every.get(context.rank, [])

    def send(self, message: Tensor, route: Route) -> Any:
        """Begin to send a message."""
        with lost_connections():
            return dist.isend(message, route.destination, *self._group_and_tag(route))

    def receive(self, message: Tensor, route: Route) -> Any:
        """Begin to receive a message."""
        with lost_connections():
            return dist.irecv(message, route.source, *self._group_and_tag(route))

    def _group_and_tag(self, route: Route) -> tuple[Any, int]:
        if self.groups:
            return self.groups[route.source, route.destination], 0
        return None, 2 * (route.stage * self.microbatches + route.microbatch) + (route.kind != F)

    def postings_in(self, actions: Sequence[Action], steps: int) -> Iterator[Posting]:
        """What is posted in all steps, every one with a place for an action more than it has."""
        places = [2 * step * (len(actions) + 1) for step in range(steps)]
        if self.postings is not None:
            for place in places:
                yield from (Posting(place + within, what) for within, what in self.postings)
            return
        receiving = [action for action in actions if action.message_in]
        routes = [action.message_in for action in receiving] * steps
        behind = [place + 2 * action.place + 2 for place in places for action in receiving]
        for place, route in zip([0] * AHEAD + behind, routes, strict=False):
            assert route is not None
            yield Posting(place, route)


def direction_groups(
    context: Context, postings: Mapping[int, Sequence[Posting]]
) -> dict[tuple[int, int], Any]:
    """A group for every direction of a pair of ranks that has messages; every rank makes all."""
    routes = [posting.what for of_rank in postings.values() for posting in of_rank]
    pairs = {route[3:] for route in routes if isinstance(route, Route)}
    return {pair: context.channel(Direction(*pair)) for pair in sorted(pairs)}


class _PendingReceive(NamedTuple):
    """A receive that is posted: the tensors that will be there, and a stamp of its posting."""

    tensors: list[Tensor]
    work: Any
    stamp: Any


class Messages:
    """The messages of one rank in `record.steps` times its `actions`, with their times.

    `due` is what it has yet to begin, exchanges among it.
    """

    def __init__(
        self,
        stages: Mapping[int, RunnableStage],
        actions: Sequence[Action],
        channel: Channel,
        record: RankRecord,
        device: torch.device,
        clock: RankClock,
        completions: Completions,
    ) -> None:
        self.channel, self.record, self.device = channel, record, device
        self.clock, self.completions = clock, completions
        self.outgoing: dict[tuple[int, int], Packing] = {}  # by kind and stage
        self.incoming: dict[tuple[int, int], Packing] = {}
        for s, stage in stages.items():
            self.outgoing[F, s] = Packing(stage.sends)
            self.outgoing[B, s] = Packing(with_gradient(stage.receives))
            self.incoming[F, s] = Packing(stage.receives)
            self.incoming[B, s] = Packing(with_gradient(stage.sends))
        self.local: dict[Route, list[Tensor]] = {}
        self.due = deque(channel.postings_in(actions, record.steps))
        self.preposted: dict[Route, deque[_PendingReceive]] = {}  # over gloo of two steps at once

    def post(self, route: Route) -> None:
        """Post a receive, into new memory, which is parted before the message is there."""
        packing = self.incoming[route.kind, route.receiver]
        message = torch.empty(packing.size, dtype=torch.uint8, device=self.device)
        stamp = self.clock.now()
        work, tensors = self.channel.receive(message, route), packing.unpack(message)
        self.preposted.setdefault(route, deque()).append(_PendingReceive(tensors, work, stamp))

    def receive(self, step: int, action: Action) -> list[Tensor]:
        """Wait for what an action needs from another stage."""
        route = action.receives
        if route is None:
            return []
        if route.is_local:
            return self.local.pop(route)
        first = self.preposted[route].popleft()
        with lost_connections():
            first.work.wait()
        place = step, action.place
        self.clock.note(self.record.receive_posted, place, first.stamp)
        self.clock.note(self.record.received, place)
        return self.incoming[route.kind, route.receiver].give_back(first.tensors)

    def send(self, step: int, action: Action, tensors: Sequence[Tensor]) -> None:
        """Begin to send what an action made to the stage that needs it, if there is one.

        Raises PartoptError for tensors that are not those of the cut.
        """
        route = action.sends
        if route is None:
            return
        if route.is_local:
            self.local[route] = [tensor.detach() for tensor in tensors]
            return
        packing, record = self.outgoing[route.kind, action.stage], self.record
        check_made(action.stage, tensors, packing.crossings)
        message, place = packing.pack(tensors, self.device), (step, action.place)
        work = self.channel.send(message, route)
        self.clock.note(record.send_posted, place)
        self.completions.keep(work, message, record.sent, place, route.destination)


def check_cuts(stages: Mapping[int, RunnableStage], context: Context) -> None:
    """Raise PartoptError, on every rank, where two stages disagree on what crosses a cut."""
    cuts = {s: (list(stage.receives), list(stage.sends)) for s, stage in stages.items()}
    every = [entry for rank in context.gather(cuts) for entry in rank.items()]
    receives_of = {s: receives for s, (receives, _) in every}
    for s, (_, sends) in every:
        receives = receives_of.get(s + 1, [])
        if sends != receives:
            sent, received = (
                ", ".join(f"{list(c.shape)} {c.dtype}" for c in crossings) or "nothing"
                for crossings in (sends, receives)
            )
            raise PartoptError(
                f"stage {s} sends {sent}, stage {s + 1} receives {received}",
                "build both from one model and one batch",
                code="cut-mismatch",
            )
