"""Messages between two ranks, timed: receives posted early or late, one or both ways at once.

No clock is compared with another host's: one way is half of a round trip.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from partopt.runtime.context import Context, lost_connections

LATE_FACTOR = 2.0  # a late receive is posted this many times a message's seconds after the send
LATE_LEAST_S = 0.001
# before a small message: one behind the other takes a third of what one takes that comes out of a
# pause, as those of a training do, when the other end sleeps and caches hold other things
PAUSE_S = 0.003
PAUSED_BYTES = 500_000  # up to there


@dataclass(frozen=True)
class Peer:
    """The other end of a pair, as one rank of it sees it."""

    context: Context
    rank: int

    def send(self, message: Tensor, turn: int) -> Any:
        """Begin to send; `turn` counts the messages, so that no two at once have one tag."""
        with lost_connections():
            return dist.isend(
                message, self.rank, group=self._group(self.context.rank, self.rank), tag=turn % 2
            )

    def receive(self, size_bytes: int, turn: int) -> Any:
        """Post a receive, into new memory as in a run: a system pays for it when it is written."""
        message = torch.empty(size_bytes, dtype=torch.uint8, device=self.context.device)
        with lost_connections():
            return dist.irecv(
                message, self.rank, group=self._group(self.rank, self.context.rank), tag=turn % 2
            )

    def wait(self, work: Any) -> None:
        """Wait until a message is sent or there; a receive that is posted ahead may stay."""
        with lost_connections():
            work.wait()
        if self.context.device.type == "cuda":
            torch.cuda.current_stream().synchronize()

    def _group(self, source: int, destination: int) -> Any:
        """NCCL keeps the order of a group, so each direction has its own; gloo has tags."""
        if self.context.device.type == "cpu":
            return None
        return self.context.group([source, destination], f"{source}>{destination}")


class Seconds(NamedTuple):
    """Medians of one rank: of a message, and of the call that begins to send it."""

    message: float
    send: float = 0.0


def ping(peer: Peer, size_bytes: int, repetitions: int) -> Seconds:
    """Half round trips as the rank that begins them; receives are posted before."""
    message = _message(peer, size_bytes)
    trips, sends = [], []
    reply = peer.receive(size_bytes, 0)
    for turn in range(repetitions):
        if size_bytes <= PAUSED_BYTES:
            time.sleep(PAUSE_S)
        began = time.perf_counter()
        sending = peer.send(message, turn)
        sent = time.perf_counter()
        peer.wait(reply)
        ended = time.perf_counter()
        peer.wait(sending)
        if turn + 1 < repetitions:
            reply = peer.receive(size_bytes, turn + 1)
        trips.append((ended - began) / 2)
        sends.append(sent - began)
    return Seconds(_median(trips), _median(sends))


def pong(peer: Peer, size_bytes: int, repetitions: int) -> None:
    """The other end of `ping`."""
    message = _message(peer, size_bytes)
    work = peer.receive(size_bytes, 0)
    for turn in range(repetitions):
        following = None
        if turn + 1 < repetitions:
            following = peer.receive(size_bytes, turn + 1)
        peer.wait(work)
        peer.wait(peer.send(message, turn))
        work = following


def exchange(peer: Peer, size_bytes: int, repetitions: int) -> float:
    """Seconds of a message each way at once; both ends call it, receives are posted before."""
    message = _message(peer, size_bytes)
    seconds = []
    work = peer.receive(size_bytes, 0)
    for turn in range(repetitions):
        following = None
        if turn + 1 < repetitions:
            following = peer.receive(size_bytes, turn + 1)
        began = time.perf_counter()
        sending = peer.send(message, turn)
        peer.wait(work)
        seconds.append(time.perf_counter() - began)
        peer.wait(sending)
        work = following
    return _median(seconds)


def send_early(peer: Peer, size_bytes: int, repetitions: int) -> None:
    """Send before the other end, which says when it is ready, posts its receive."""
    message = _message(peer, size_bytes)
    for turn in range(repetitions):
        peer.wait(peer.receive(1, turn))
        peer.wait(peer.send(message, turn))


def receive_late(peer: Peer, size_bytes: int, repetitions: int, message_s: float) -> float:
    """Seconds from a receive to the arrival of what was sent long before, as messages go."""
    ready = _message(peer, 1)
    seconds = []
    for turn in range(repetitions):
        peer.wait(peer.send(ready, turn))
        time.sleep(LATE_LEAST_S + LATE_FACTOR * message_s)
        began = time.perf_counter()
        peer.wait(peer.receive(size_bytes, turn))
        seconds.append(time.perf_counter() - began)
    return _median(seconds)


def allreduce(context: Context, group: Any, size_bytes: int, repetitions: int) -> float:
    """Seconds of an all-reduce of 4-byte numbers over `group`, which all its ranks call."""
    numbers = torch.zeros(size_bytes // 4, device=context.device)
    seconds = []
    for _ in range(repetitions):
        began = time.perf_counter()
        with lost_connections():
            dist.all_reduce(numbers, group=group)
        if context.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        seconds.append(time.perf_counter() - began)
    return _median(seconds)


def _message(peer: Peer, size_bytes: int) -> Tensor:
    return torch.zeros(size_bytes, dtype=torch.uint8, device=peer.context.device)


def _median(seconds: list[float]) -> float:
    """The median without the warm-up, the first fifth."""
    return statistics.median(seconds[len(seconds) // 5 :])
