"""Messages of one rank: receives posted ahead in the order of their use, sends kept until done."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from partopt.runtime.context import lost_connections
from partopt.runtime.routes import Route
from partopt.schedules.order import F

AHEAD = 3  # receives that are posted before they are used

# a message has a tag of its own within a step; under NCCL, which has no tags and keeps the order of
# each group, there is a group for each direction of each pair of ranks over a cut


class Buffer(NamedTuple):
    """Where a message is received, and the tensors that it then holds."""

    message: Tensor
    tensors: list[Tensor]


class Received(NamedTuple):
    """What came, when its receive was posted, and when it was there (at the latest)."""

    tensors: list[Tensor]
    posted_ns: int
    done_ns: int


class Receives:
    """Receives in the order of `routes`, `ahead` of which are posted before they are used.

    Who takes a message posts the next receive when there is time for it (`post_next`).
    """

    def __init__(
        self,
        routes: Iterator[Route],
        buffer_for: Callable[[Route], Buffer],
        channel: Channel,
        ahead: int = AHEAD,
    ) -> None:
        self.routes, self.buffer_for, self.channel = routes, buffer_for, channel
        self.posted: deque[tuple[Route, Buffer, Any, int]] = deque()
        for _ in range(ahead):
            self.post_next()

    def take(self, route: Route) -> Received:
        """Wait for the next message, which must be `route`."""
        expected, buffer, work, posted_ns = self.posted.popleft()
        assert expected == route, f"{route} received in the place of {expected}"
        with lost_connections():
            work.wait()
        return Received(buffer.tensors, posted_ns, time.perf_counter_ns())

    def post_next(self) -> None:
        """Post one more receive, if one is left."""
        route = next(self.routes, None)
        if route is None:
            return
        buffer = self.buffer_for(route)
        with lost_connections():
            work = self.channel.receive(buffer.message, route)
        self.posted.append((route, buffer, work, time.perf_counter_ns()))


class Channel:
    """Where messages between two ranks go."""

    def __init__(self, microbatches: int, groups: dict[Any, Any] | None) -> None:
        self.microbatches, self.groups = microbatches, groups

    def send(self, message: Tensor, route: Route) -> Any:
        """Begin to send a message."""
        group = None if self.groups is None else self.groups[group_key(route)]
        return dist.isend(message, route.destination, group=group, tag=self._tag(route))

    def receive(self, message: Tensor, route: Route) -> Any:
        """Begin to receive a message."""
        group = None if self.groups is None else self.groups[group_key(route)]
        return dist.irecv(message, route.source, group=group, tag=self._tag(route))

    def _tag(self, route: Route) -> int:
        if self.groups is not None:
            return 0
        return 2 * (route.stage * self.microbatches + route.microbatch) + (route.kind != F)


def group_key(route: Route) -> tuple[int, int, int, int]:
    """What the messages of one group have in common."""
    return route.kind, route.stage, route.source, route.destination


class Sends:
    """Sends in the order in which they were posted; a thread waits for them and frees each.

    gloo tells nobody that a send is done who does not wait for it.
    """

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.failure: Exception | None = None
        self._waiting: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._pending = 0
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._wait_for_all, daemon=True)
        self._thread.start()

    def post(self, message: Tensor, route: Route, done: Callable[[int], None]) -> int:
        """Begin to send a message; the time. `done` is called with that at which it was sent."""
        self._raise_failure()
        with lost_connections():
            work = self.channel.send(message, route)
        with self._changed:
            self._pending += 1
        self._waiting.put((work, message, done))
        return time.perf_counter_ns()

    def drain(self) -> None:
        """Wait until everything is sent."""
        with self._changed:
            self._changed.wait_for(lambda: self._pending == 0 or self.failure is not None)
        self._raise_failure()

    def close(self) -> None:
        """End the thread; what is not sent yet is left to the process group."""
        self._waiting.put(None)

    def _raise_failure(self) -> None:
        if self.failure is not None:
            raise self.failure

    def _wait_for_all(self) -> None:
        while (entry := self._waiting.get()) is not None:
            work, _, done = entry
            try:
                with lost_connections():
                    work.wait()
                done(time.perf_counter_ns())
            except Exception as error:
                self.failure = error
            del entry, work  # a message is kept no longer
            with self._changed:
                self._pending -= 1
                self._changed.notify_all()
