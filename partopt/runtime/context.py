"""A rank among the others of a run: what it does at the moment, and how all of them meet."""

from __future__ import annotations

import contextlib
import socket
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from partopt.cost.memory import CHANNELS
from partopt.documents.actions import KINDS, U
from partopt.errors import ANSWER_IS_NO, PartoptError
from partopt.profiler.device import HEADROOM, free_host_bytes

Made = TypeVar("Made")

WAIT_S = 600.0  # the longest that a rank waits for another, as torch has it under NCCL

# what a rank does: in the program around the schedule, or within an action of it
OUTSIDE, COMPUTING, RECEIVING, SENDING, EXCHANGING, MEETING, FINISHED = range(7)
WORDS = (
    "",
    "computing",
    "waiting to receive",
    "waiting to send",
    "exchanging gradients",
    "waiting for all ranks",
    "done",
)
FIELDS = 5  # state, step, kind, stage, microbatch

# what torch says when another process is gone, or does not answer in time
_LOST = "onnection", "Broken pipe", "timeout", "imed out"


class Progress:
    """What a rank does: a row of numbers, which it writes in a microsecond and others may read."""

    def __init__(self, row: NDArray[np.int64] | None = None) -> None:
        self.row = np.array([OUTSIDE, 0, -1, 0, 0]) if row is None else row
        self.first_step = 0  # of the run, that its engine calls step 0

    def note(self, state: int) -> None:
        """Note that the rank goes on to another state."""
        self.row[0] = state

    def act(self, step: int, kind: int, stage: int, microbatch: int, state: int) -> None:
        """Note that the rank comes to an action."""
        self.row[:] = state, self.first_step + step, kind, stage, microbatch

    @property
    def state(self) -> int:
        """What was noted last."""
        return int(self.row[0])

    @property
    def works(self) -> bool:
        """Whether the rank waits for no other."""
        return self.state in (OUTSIDE, COMPUTING)

    @property
    def action(self) -> str:
        """The action that the rank came to last, such as 2F0; empty before the first one."""
        _, _, kind, stage, microbatch = self.row.tolist()
        if kind < 0:
            return ""
        return f"{stage}{KINDS[kind]}" + ("" if kind == U else str(microbatch))

    def __str__(self) -> str:
        where = f"{self.action} of step {self.row[1]}" if self.action else "no action yet"
        return f"{where}, {WORDS[self.state]}" if WORDS[self.state] else where


class Direction(NamedTuple):
    """The name of a process group that has messages from one rank to another alone."""

    source: int
    destination: int
    name: str = ""


@dataclass
class Context:
    """A process of a run: one rank of `ranks`, after the process group was made.

    `groups` are in the order in which every rank has made them. Under NCCL the first use of one
    holds the hosts of its ranks until all of them have come to it, so that `connect` uses all once
    before messages need any.
    """

    rank: int
    ranks: int
    device: torch.device
    progress: Progress
    wait_s: float = WAIT_S
    host: str = field(default_factory=socket.gethostname)
    backend: str = "gloo"  # or "nccl"
    groups: dict[tuple[Any, ...], Any] = field(default_factory=dict)
    connected: set[tuple[Any, ...]] = field(default_factory=set)  # keys of `groups`
    made: dict[Any, Any] = field(default_factory=dict)  # what steps have in common, by keys

    def group(self, ranks: Sequence[int], name: str | Direction = "") -> Any:
        """The process group of `ranks`, made once for every name.

        Every process of the run must ask for the same groups in the same order.
        """
        key = (*sorted(ranks), name)
        if key not in self.groups:
            limit = timedelta(seconds=self.wait_s)
            with lost_connections():
                self.groups[key] = dist.new_group(
                    sorted(ranks), timeout=limit, pg_options=self._options(name)
                )
        return self.groups[key]

    def _options(self, name: str | Direction) -> Any:
        """NCCL takes memory and processors for every channel of a group: messages have few."""
        if not isinstance(name, Direction) or not dist.is_nccl_available():
            return None
        options = dist.ProcessGroupNCCL.Options()
        options.config.max_ctas = CHANNELS
        options._timeout = timedelta(seconds=self.wait_s)  # or torch warns that it takes the other
        return options

    def once(self, key: Any, make: Callable[[], Made]) -> Made:
        """What `make` makes, which is kept for the steps that come."""
        if key not in self.made:
            self.made[key] = make()
        found: Made = self.made[key]
        return found

    def channel(self, direction: Direction) -> Any:
        """The process group of messages in a direction, which NCCL, without tags, keeps in order.

        Every process of the run must ask for the same ones in the same order.
        """
        return self.group([direction.source, direction.destination], direction)

    def connect(self) -> None:
        """Use every group once that has not been used, in one order; gloo has nothing to wait for.

        Every rank calls it where it has made the same groups.
        """
        new = [key for key in self.groups if key not in self.connected]
        self.connected.update(new)
        for *ranks, name in new if self.backend == "nccl" else ():
            if self.rank in ranks:
                self._use(self.groups[*ranks, name], name)

    def _use(self, group: Any, name: str | Direction) -> None:
        byte = torch.zeros(1, dtype=torch.uint8, device=self.device)
        with lost_connections():
            work: Any
            if not isinstance(name, Direction):
                work = dist.all_reduce(byte, group=group, async_op=True)
            elif name.source == self.rank:
                work = dist.isend(byte, name.destination, group=group)
            else:
                work = dist.irecv(byte, name.source, group=group)
            work.wait()

    def barrier(self) -> None:
        """Wait until all ranks have come here."""
        with self._meeting():
            dist.barrier()

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, in their order, on all of them; for small ones."""
        values: list[Any] = [None] * self.ranks
        with self._meeting():
            dist.all_gather_object(values, value)
        return values

    def broadcast(self, tensor: Tensor) -> None:
        """Fill the tensor of every rank with that of rank 0."""
        with self._meeting():
            dist.broadcast(tensor, 0)

    def on_rank_0(self, make: Callable[[Callable[[str], None]], Made]) -> Made | None:
        """What `make` makes on rank 0, while the others wait and get None; every rank calls it.

        `make` gets a function to call with what it does next. The others wait from one such call
        to the next, so that none of them waits for all of it.
        """
        if self.rank > 0:
            while not self.gather(None)[0]:
                pass
            return None

        def go_on(text: str) -> None:
            self.say(text)
            self.gather(False)

        made = make(go_on)
        self.gather(True)
        return made

    def in_turns(self, size_bytes: float, make: Callable[[], Made]) -> Made:
        """What `make` makes, which takes `size_bytes` of the host's memory meanwhile.

        Every rank calls it. Where some host has no room for that of all its ranks at once, the
        ranks of every host take turns.
        """
        found = self.gather((self.host, free_host_bytes()))
        hosts = [host for host, _ in found]
        ranks = Counter(hosts)
        if all(HEADROOM * ranks[host] * size_bytes <= free_bytes for host, free_bytes in found):
            return make()
        turn_of_rank = hosts[: self.rank].count(self.host)
        made: list[Made] = []
        for turn in range(max(ranks.values())):
            if turn == turn_of_rank:
                made.append(make())
            self.barrier()
        return made[0]

    def say(self, text: str) -> None:
        """Tell who watches a terminal what the run does; rank 0 does."""
        if self.rank == 0 and sys.stderr.isatty():
            print(text, file=sys.stderr)

    @contextlib.contextmanager
    def _meeting(self) -> Iterator[None]:
        """Note that the rank waits for all, where it was outside of the schedule."""
        outside = self.progress.state == OUTSIDE
        if outside:
            self.progress.note(MEETING)
        with lost_connections():
            yield
        if outside:
            self.progress.note(OUTSIDE)


@contextlib.contextmanager
def lost_connections() -> Iterator[None]:
    """Raise PartoptError where another process is gone, or has the same GPU.

    What torch says names only a socket.
    """
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        if "Duplicate GPU" in text:
            raise PartoptError(
                "two ranks of a host have one GPU, which NCCL refuses",
                "start as many ranks on a host as it has GPUs, and show each its own or all to "
                "all (CUDA_VISIBLE_DEVICES); `backend=gloo` is for processors",
                code="no-such-device",
                option="backend",
            ) from error
        if not any(sign in text for sign in _LOST):
            raise
        raise PartoptError(
            f"lost the connection to another rank ({text.splitlines()[0]})",
            "the rank that failed first says why",
            ANSWER_IS_NO,
            code="lost-connection",
        ) from error
