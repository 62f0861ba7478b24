"""Messages between stages: what crosses a cut, packed, posted ahead, and kept until it is sent.

All tensors of a cut are one message, so that a microbatch pays once for latency. Between two stages
of a rank tensors are handed over as they are.
"""

from __future__ import annotations

import os
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from partopt.errors import PartoptError
from partopt.runtime.actions import Action, RankRecord, Route, actions_of
from partopt.runtime.clock import Clock
from partopt.runtime.completions import Completions
from partopt.runtime.context import Context, Direction, lost_connections
from partopt.runtime.stage import Crossing, Stage, check_made, with_gradient
from partopt.schedules.order import KINDS, B, F, Order

# receives that are posted before they are used. Under NCCL one that waits for its message keeps the
# device from all that waits for a device at rest: a kernel that is loaded, an allocator that tries
# again, a stream that shares its queue. There each is posted where it is waited for.
AHEAD = {"gloo": 3, "nccl": 0}
CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
# queues of the hardware that a schedule needs on this engine: with fewer a send that waits for its
# receiver holds the work behind it on which that receiver depends
FEWEST_QUEUES = {"interleaved-zb": 3}
_ALIGNMENT = 16  # bytes: each tensor of a message begins where its number format may


class Packing:
    """How the tensors of a cut lie in a message of `size` bytes; never none, for others wait."""

    def __init__(self, crossings: Sequence[Crossing]) -> None:
        self.crossings = list(crossings)
        self.places: list[slice] = []  # the bytes of each tensor
        stop = 0
        for each in crossings:
            start = -(-stop // _ALIGNMENT) * _ALIGNMENT
            stop = start + torch.Size(each.shape).numel() * each.dtype.itemsize
            self.places.append(slice(start, stop))
        self.size = max(1, stop)

    def pack(self, tensors: Sequence[Tensor], device: torch.device) -> Tensor:
        """The message: uint8, shape (size,), on the device. A single tensor there is not copied."""
        placed = [each.detach().to(device).contiguous() for each in tensors]
        parts = [each.view(-1).view(torch.uint8) for each in placed]
        if len(parts) == 1 and len(parts[0]) == self.size:
            return parts[0]
        message = torch.empty(self.size, dtype=torch.uint8, device=device)
        for part, place in zip(parts, self.places, strict=True):
            message[place] = part
        return message

    def unpack(self, message: Tensor) -> list[Tensor]:
        """The tensors in a message, which share its memory; it may come later.

        Each counts its own changes (`.data`), so that a stage may change one in place.
        """
        return [
            message[place].view(crossing.dtype).view(crossing.shape).data
            for crossing, place in zip(self.crossings, self.places, strict=True)
        ]

    def give_back(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The tensors of a message that is there, each where its stage has it."""
        pairs = zip(tensors, self.crossings, strict=True)
        return [each.cpu() if crossing.on_host else each for each, crossing in pairs]


class Channel:
    """The process groups and tags of messages.

    Under gloo each message has a tag of its own within a step. NCCL has no tags: there each
    direction of a pair of ranks has a group, in which messages keep their order.
    """

    def __init__(self, context: Context, order: Order) -> None:
        self.microbatches = int(order.microbatch.max()) + 1
        self.ahead = AHEAD[context.backend]
        self.groups: dict[Flow, Any] = {}
        if context.backend == "nccl":
            found = sorted(directions_of(order, apart=hardware_queues() == 1).items())
            self.groups = {flow: context.channel(direction) for flow, direction in found}

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
            return self.groups[_flow_of(route)], 0
        return None, 2 * (route.stage * self.microbatches + route.microbatch) + (route.kind != F)


Flow = tuple[int, int, int, int]  # what routes have in common: kind, stage, source, destination


def check_queues(name: str) -> None:
    """Raise PartoptError where a run of the schedule `name` would stop for want of queues."""
    if (queues := hardware_queues()) < FEWEST_QUEUES.get(name, 1):
        raise PartoptError(
            f"{name} with {CONNECTIONS}={queues}: a rank would wait for ever for what lies behind "
            "its own message in the one queue of its GPU",
            f"unset {CONNECTIONS}, or run it with `engine=torch`",
            code="cannot-run",
        )


def hardware_queues() -> int:
    """The queues of a GPU in which all its streams lie; people set 1 for Megatron."""
    return int(os.environ.get(CONNECTIONS, "8"))


def directions_of(order: Order, apart: bool = False) -> dict[Flow, Direction]:
    """The group of each flow of messages: one for a pair of ranks and a direction.

    Flows have groups of their own where they are kept `apart`, and where a pair does not receive in
    the order in which it sends.
    """
    sent: defaultdict[tuple[int, int], list[Route]] = defaultdict(list)
    received: defaultdict[tuple[int, int], list[Route]] = defaultdict(list)
    for rank in range(order.ranks):
        for action in actions_of(order, rank):
            if route := action.message_out:
                sent[route.source, route.destination].append(route)
            if route := action.message_in:
                received[route.source, route.destination].append(route)
    found = {}
    for pair, routes in sent.items():
        together = routes == received[pair] and not apart
        for flow in map(_flow_of, routes):
            found[flow] = Direction(*pair, "" if together else f"{KINDS[flow[0]]}{flow[1]}")
    return found


def _flow_of(route: Route) -> Flow:
    return route.kind, route.stage, route.source, route.destination


class _Posted(NamedTuple):
    """A receive that is posted: the tensors that will be there, and a stamp of its posting."""

    route: Route
    tensors: list[Tensor]
    work: Any
    stamp: Any


class Messages:
    """The messages of one rank in `record.steps` times its `actions`, with their times."""

    def __init__(
        self,
        stages: Mapping[int, Stage],
        actions: Sequence[Action],
        channel: Channel,
        record: RankRecord,
        device: torch.device,
        clock: Clock,
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
        routes = [each.message_in for each in actions if each.message_in]
        # with their steps, in the order in which they are received
        self.routes = deque((step, route) for step in range(record.steps) for route in routes)
        self.posted: deque[_Posted] = deque()
        self._post_receives(channel.ahead)

    def receive(self, step: int, action: Action) -> list[Tensor]:
        """Wait for what an action needs from another stage."""
        route = action.receives
        if route is None:
            return []
        if route.is_local:
            return self.local.pop(route)
        self._post_receives(1)
        first = self.posted.popleft()
        assert first.route == route, f"{route} received in the place of {first.route}"
        with lost_connections():
            first.work.wait()
        place = step, action.place
        self.clock.note(self.record.receive_posted, place, first.stamp)
        self.clock.note(self.record.received, place)
        return self.incoming[route.kind, route.receiver].give_back(first.tensors)

    def settle(self, step: int) -> None:
        """Wait until everything is sent, within a step.

        What comes next is posted before: two ranks that send to each other would wait for ever.
        """
        if self.routes and self.routes[0][0] == step:
            self._post_receives(1)
        self.completions.drain()

    def replace_receive(self, action: Action) -> None:
        """Post a receive for that of an action, which is over: no action waits for the posting."""
        if action.message_in:
            self._post_receives(self.channel.ahead)

    def _post_receives(self, number: int) -> None:
        """Post receives, while any are left, until so many are posted.

        They go into new memory, which is parted before the message is there.
        """
        while len(self.posted) < number and self.routes:
            _, route = self.routes.popleft()
            packing = self.incoming[route.kind, route.receiver]
            message = torch.empty(packing.size, dtype=torch.uint8, device=self.device)
            stamp = self.clock.now()
            work, tensors = self.channel.receive(message, route), packing.unpack(message)
            self.posted.append(_Posted(route, tensors, work, stamp))

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

        def note_sent(when_ns: int) -> None:
            record.sent[place] = when_ns

        work = self.channel.send(message, route)
        self.clock.note(record.send_posted, place)
        self.completions.keep(work, message, note_sent)


def check_cuts(stages: Mapping[int, Stage], context: Context) -> None:
    """Raise PartoptError, on every rank, where two stages disagree on what crosses a cut."""
    own = {s: (list(stage.receives), list(stage.sends)) for s, stage in stages.items()}
    every = [entry for rank in context.gather(own) for entry in rank.items()]
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
