"""NCCL's and CUDA's rules, by which the programs of all ranks run to their end, or stop.

- The first operation on a communicator holds the *host* of each of its ranks until all have come.
- A communicator has a stream of its own on each rank, in which its operations follow one another.
  One begins when the stream that was current has come to where it was called, and ends when the
  operations of all its ranks have begun.
- `work.wait()` holds the stream that is current, not the host.
- The streams of a device lie in a few queues of the hardware. What is in a queue begins in the
  order in which it was called, whatever its stream; what waits lets nothing behind it begin.
- A host may wait for its whole device wherever it calls something, though no line of the code says
  so: a kernel that is loaded when it first runs, an allocator that frees, memory that is pinned.

(NVIDIA, NCCL user guide, "Point-to-point communication" and "CUDA stream semantics"; CUDA C++
programming guide, on CUDA_DEVICE_MAX_CONNECTIONS and on lazy loading; torch's ProcessGroupNCCL.)
"""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.gpu.programs import (
    COLLECTIVE,
    COMPUTE,
    COMPUTE_STREAM,
    MEET,
    RECEIVE,
    SEND,
    SYNCHRONIZE,
    WAIT,
    Step,
)

CALLS = (COMPUTE, SEND, RECEIVE, COLLECTIVE)  # what may wait for the device
Waits = Callable[[int, int], bool]  # of a rank and a place in its program


@dataclass(eq=False)
class _Item:
    """What lies in a stream of a device: the step of its host, and what must be done before it."""

    step: Step
    takes_s: float
    before: list[_Item]
    began_s: float  # at first when it was called
    begun: bool = False
    done: bool = False
    end_s: float = 0.0
    partners: list[_Item] = field(default_factory=list)  # of all ranks, itself among them

    def begin(self) -> None:
        self.begun = True
        self.began_s = max([self.began_s, *(each.end_s for each in self.before)])

    def finish(self) -> None:
        self.done = True
        self.end_s = max([self.began_s, *(each.began_s for each in self.partners)]) + self.takes_s


class _Device:
    """The streams of a rank, in `queues` of the hardware, or in as many as there are streams."""

    def __init__(self, queues: int | None, seed: int | None) -> None:
        self.queues, self.places = queues, {COMPUTE_STREAM: 0}
        self.random = None if seed is None else random.Random(seed)
        self.waiting: defaultdict[int, deque[_Item]] = defaultdict(deque)  # by queue
        self.last: dict[Any, _Item] = {}  # by stream
        self.works: dict[int, _Item] = {}
        self.items: list[_Item] = []
        self.begun: list[_Item] = []  # and not done: operations whose partners may be missing

    @property
    def is_at_rest(self) -> bool:
        return all(item.done for item in self.last.values())

    def launch(self, item: _Item, stream: Any) -> _Item:
        place = self.places.setdefault(stream, self._place())
        if stream in self.last:
            item.before.append(self.last[stream])
        self.last[stream] = item
        self.waiting[place].append(item)
        self.items.append(item)
        return item

    def _place(self) -> int:
        """The queue of a new stream: the next one, or one that is drawn."""
        if self.queues is None:
            return len(self.places)
        return self.random.randrange(self.queues) if self.random else len(self.places) % self.queues

    def advance(self) -> bool:
        """Let begin what can; whether anything did."""
        moved = False
        for waiting in self.waiting.values():
            while waiting and all(each.done for each in waiting[0].before):
                item = waiting.popleft()
                item.begin()
                moved = True
                if item.step.kind in (COMPUTE, WAIT):
                    item.finish()
                else:
                    self.begun.append(item)
        return moved


class _Host:
    """The host of a rank, which goes through its program."""

    def __init__(self, program: Sequence[Step], device: _Device) -> None:
        self.program, self.device, self.place, self.met = program, device, 0, 0
        self.now_s = 0.0  # launches take none of it

    @property
    def step(self) -> Step | None:
        return self.program[self.place] if self.place < len(self.program) else None


class Replay:
    """The programs of all ranks, run together.

    `queues` are those of each device, of which streams get the next, or with a `seed` any. `waits`
    says where hosts wait for their devices besides, `seconds_of` what compute and messages take.
    """

    def __init__(
        self,
        programs: Sequence[Sequence[Step]],
        queues: int | None = None,
        waits: Waits | None = None,
        seconds_of: Callable[[Step], float] | None = None,
        seed: int | None = None,
    ) -> None:
        self.waits, self.seconds_of = waits, seconds_of or (lambda _: 0.0)
        self.hosts = [_Host(program, _Device(queues, seed)) for program in programs]
        # ranks that have come to a communicator
        self.ready: defaultdict[Any, set[int]] = defaultdict(set)
        self.met_s: defaultdict[int, float] = defaultdict(float)
        self.matches: defaultdict[Any, list[_Item]] = defaultdict(list)
        self.counts: defaultdict[Any, int] = defaultdict(int)
        moved = True
        while moved:
            moved = False
            for rank, host in enumerate(self.hosts):
                while host.step is not None and self._call(rank, host, host.step):
                    host.place += 1
                    moved = True
            while sum(host.device.advance() for host in self.hosts) or self._meet():
                moved = True

    @property
    def stops(self) -> list[str]:
        """What each rank stops at; nothing where none does."""
        return [
            f"rank {rank}: host at {host.step}, device at {left[0].step if left else None}"
            for rank, host in enumerate(self.hosts)
            if (left := [item for item in host.device.items if not item.done]) or host.step
        ]

    @property
    def makespan_s(self) -> float:
        """From the first action to the end of the last."""
        actions = [
            item for host in self.hosts for item in host.device.items if item.step.kind == COMPUTE
        ]
        return max(each.end_s for each in actions) - min(each.began_s for each in actions)

    def _call(self, rank: int, host: _Host, step: Step) -> bool:
        """Whether the host comes past a step."""
        device = host.device
        if self.waits and step.kind in CALLS and self.waits(rank, host.place):
            if not device.is_at_rest:
                return False
            host.now_s = max([host.now_s, *(item.end_s for item in device.last.values())])
        if step.kind == SYNCHRONIZE:
            if not device.is_at_rest:
                return False
            host.now_s = max([host.now_s, *(item.end_s for item in device.last.values())])
        elif step.kind == MEET:
            self.ready[MEET, host.met].add(rank)
            self.met_s[host.met] = max(self.met_s[host.met], host.now_s)
            if len(self.ready[MEET, host.met]) < len(self.hosts):
                return False
            host.now_s = self.met_s[host.met]
            host.met += 1
        elif step.kind == COMPUTE:
            device.launch(self._item(host, step), COMPUTE_STREAM)
        elif step.kind == WAIT:
            device.launch(self._item(host, step, device.works[step.number]), step.stream)
        else:
            self.ready[step.group].add(rank)
            if not self.ready[step.group].issuperset(step.group[0]):
                return False
            self._begin(rank, host, step)
        return True

    def _item(self, host: _Host, step: Step, *before: _Item) -> _Item:
        return _Item(step, self.seconds_of(step), list(before), host.now_s)

    def _begin(self, rank: int, host: _Host, step: Step) -> None:
        device = host.device
        current = [device.last[step.stream]] if step.stream in device.last else []
        item = device.launch(self._item(host, step, *current), step.group)
        device.works[step.number] = item
        ends = {SEND: (rank, step.peer), RECEIVE: (step.peer, rank)}.get(step.kind, ())
        way = step.group, ends
        key = *way, self.counts[rank, way]  # the n-th of one rank meets the n-th of the other
        self.counts[rank, way] += 1
        self.matches[key].append(item)
        item.partners = self.matches[key]
        assert {each.step.what for each in item.partners} == {step.what}, f"{key}: {step}"

    def _meet(self) -> bool:
        """Let end what all ranks have begun; whether anything did."""
        moved = False
        for host in self.hosts:
            for item in host.device.begun:
                ranks = len(item.step.group[0]) if item.step.kind == COLLECTIVE else 2
                if len(item.partners) == ranks and all(each.begun for each in item.partners):
                    item.finish()
                    moved = True
            host.device.begun = [item for item in host.device.begun if not item.done]
        return moved


def run(programs: Sequence[Sequence[Step]], queues: int | None = None, **options: Any) -> list[str]:
    """What each rank of a `Replay` stops at; nothing where none does.

    Raises AssertionError where a message is received in the place of another.
    """
    return Replay(programs, queues, **options).stops
