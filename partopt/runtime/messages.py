"""Messages between stages: what crosses a cut, packed, posted ahead, and kept until it is sent.

All tensors of a cut are one message, so that a microbatch pays once for latency. Between two stages
of a rank tensors are handed over as they are.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from partopt.errors import PartoptError
from partopt.runtime.actions import Action, RankRecord, Route, actions_of
from partopt.runtime.context import Context, lost_connections
from partopt.runtime.stage import Crossing, Stage, check_made, with_gradient
from partopt.schedules.order import B, F, Order

AHEAD = 3  # receives that are posted before they are used
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
        """The message: uint8, shape (size,). A single tensor is not copied."""
        parts = [each.detach().contiguous().view(-1).view(torch.uint8) for each in tensors]
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


class Channel:
    """The process groups and tags of messages.

    Under gloo each message has a tag of its own within a step. NCCL has no tags: there each
    direction of each pair of ranks over a cut has a group, in which messages keep their order. This
    has not been run on NCCL.
    """

    def __init__(self, context: Context, order: Order) -> None:
        self.microbatches = int(order.microbatch.max()) + 1
        self.groups: dict[tuple[int, int, int, int], Any] = {}
        if dist.get_backend() == "nccl":
            actions = (each for rank in range(order.ranks) for each in actions_of(order, rank))
            keys = {_direction(each.message_out) for each in actions if each.message_out}
            self.groups = {key: context.group(key[2:], str(key)) for key in sorted(keys)}

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
            return self.groups[_direction(route)], 0
        return None, 2 * (route.stage * self.microbatches + route.microbatch) + (route.kind != F)


def _direction(route: Route) -> tuple[int, int, int, int]:
    return route.kind, route.stage, route.source, route.destination


class _Posted(NamedTuple):
    """A receive that is posted: the tensors that will be there, and since when."""

    route: Route
    tensors: list[Tensor]
    work: Any
    posted_ns: int


class Messages:
    """The messages of one rank in `record.steps` times its `actions`, and when they came and went.

    A thread waits for sends and frees each: gloo tells nobody that one is done who does not wait
    for it.
    """

    def __init__(
        self,
        stages: Mapping[int, Stage],
        actions: Sequence[Action],
        channel: Channel,
        record: RankRecord,
        device: torch.device,
    ) -> None:
        self.channel, self.record, self.device = channel, record, device
        self.outgoing: dict[tuple[int, int], Packing] = {}  # by kind and stage
        self.incoming: dict[tuple[int, int], Packing] = {}
        for s, stage in stages.items():
            self.outgoing[F, s] = Packing(stage.sends)
            self.outgoing[B, s] = Packing(with_gradient(stage.receives))
            self.incoming[F, s] = Packing(stage.receives)
            self.incoming[B, s] = Packing(with_gradient(stage.sends))
        self.local: dict[Route, list[Tensor]] = {}
        routes = [each.message_in for each in actions if each.message_in]
        self.routes = (route for _ in range(record.steps) for route in routes)
        self.posted: deque[_Posted] = deque()
        for _ in range(AHEAD):
            self._post_receive()
        self.sends: queue.Queue[Any] = queue.Queue()
        self.failure: Exception | None = None
        threading.Thread(target=self._wait_for_sends, daemon=True).start()

    def receive(self, step: int, action: Action) -> list[Tensor]:
        """Wait for what an action needs from another stage."""
        route = action.receives
        if route is None:
            return []
        if route.is_local:
            return self.local.pop(route)
        first = self.posted.popleft()
        assert first.route == route, f"{route} received in the place of {first.route}"
        with lost_connections():
            first.work.wait()
        self.record.receive_posted[step, action.place] = first.posted_ns
        self.record.received[step, action.place] = time.perf_counter_ns()
        return first.tensors

    def replace_receive(self, action: Action) -> None:
        """Post a receive for that of an action, which is over: no action waits for the posting."""
        if action.message_in:
            self._post_receive()

    def _post_receive(self) -> None:
        """Post the next receive, if one is left, into new memory, parted before it is there."""
        route = next(self.routes, None)
        if route is not None:
            packing = self.incoming[route.kind, route.receiver]
            message = torch.empty(packing.size, dtype=torch.uint8, device=self.device)
            work, tensors = self.channel.receive(message, route), packing.unpack(message)
            self.posted.append(_Posted(route, tensors, work, time.perf_counter_ns()))

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
        packing = self.outgoing[route.kind, action.stage]
        check_made(action.stage, tensors, packing.crossings)
        message = packing.pack(tensors, self.device)
        self._raise_failure()
        work = self.channel.send(message, route)
        self.record.send_posted[step, action.place] = time.perf_counter_ns()
        self.sends.put((work, message, (step, action.place)))

    def drain(self) -> None:
        """Wait until everything is sent."""
        self.sends.join()
        self._raise_failure()

    def close(self) -> None:
        """End the thread; what is not sent yet is left to the process group."""
        self.sends.put(None)

    def _raise_failure(self) -> None:
        if self.failure is not None:
            raise self.failure

    def _wait_for_sends(self) -> None:
        while (entry := self.sends.get()) is not None:
            work, _, place = entry
            try:
                with lost_connections():
                    work.wait()
                self.record.sent[place] = time.perf_counter_ns()
            except Exception as error:
                self.failure = error
            del entry, work, _  # a message is kept no longer
            self.sends.task_done()


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
