"""NCCL's and CUDA's rules, by which the programs of all ranks run to their end, or stop.

- The first operation on a communicator holds the *host* of each of its ranks until all have come.
- A communicator has a stream of its own on each rank, in which its operations follow one another.
  One begins when the compute stream has come to where it was called, and ends when the operations
  of all its ranks have begun.
- `work.wait()` holds the compute stream, not the host.
- The streams of a device lie in a few queues of the hardware. What is in a queue begins in the
  order in which it was called, whatever its stream; what waits lets nothing behind it begin.

(NVIDIA, NCCL user guide, "Point-to-point communication" and "CUDA stream semantics"; CUDA C++
programming guide, on CUDA_DEVICE_MAX_CONNECTIONS; torch's ProcessGroupNCCL.)
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.gpu.programs import (
    COLLECTIVE,
    COMPUTE,
    DRAIN,
    KEEP,
    MEET,
    RECEIVE,
    SEND,
    SYNCHRONIZE,
    WAIT,
    Step,
)

COMPUTE_STREAM = "compute"


@dataclass(eq=False)
class _Item:
    """What lies in a stream of a device: the step of its host, and what must be done before it."""

    step: Step
    before: list[_Item]
    begun: bool = False
    done: bool = False
    partners: list[_Item] = field(default_factory=list)  # of all ranks, itself among them


class _Device:
    """The streams of a rank, in `queues` of the hardware, or in as many as there are streams."""

    def __init__(self, queues: int | None) -> None:
        self.queues, self.places = queues, {COMPUTE_STREAM: 0}
        self.waiting: defaultdict[int, deque[_Item]] = defaultdict(deque)  # by queue
        self.last: dict[Any, _Item] = {}  # by stream
        self.works: dict[int, _Item] = {}
        self.items: list[_Item] = []
        self.begun: list[_Item] = []  # and not done: operations whose partners may be missing

    def launch(self, step: Step, stream: Any, *before: _Item | None) -> _Item:
        place = self.places.setdefault(stream, len(self.places))
        item = _Item(step, [each for each in (self.last.get(stream), *before) if each])
        self.last[stream] = item
        self.waiting[place if self.queues is None else place % self.queues].append(item)
        self.items.append(item)
        return item

    def advance(self) -> bool:
        """Let begin what can; whether anything did."""
        moved = False
        for waiting in self.waiting.values():
            while waiting and all(each.done for each in waiting[0].before):
                item = waiting.popleft()
                item.begun = moved = True
                if item.step.kind in (COMPUTE, WAIT):
                    item.done = True
                else:
                    self.begun.append(item)
        return moved


class _Host:
    """The host of a rank, which goes through its program."""

    def __init__(self, program: Sequence[Step], device: _Device) -> None:
        self.program, self.device, self.place = program, device, 0
        self.kept: list[int] = []
        self.met = 0

    @property
    def step(self) -> Step | None:
        return self.program[self.place] if self.place < len(self.program) else None


def run(programs: Sequence[Sequence[Step]], queues: int | None = None) -> list[str]:
    """Run the programs of all ranks together: what each rank stops at; nothing where none does.

    Raises AssertionError where a message is received in the place of another.
    """
    hosts = [_Host(program, _Device(queues)) for program in programs]
    ready: defaultdict[Any, set[int]] = defaultdict(set)  # ranks that have come to a communicator
    matches: defaultdict[Any, list[_Item]] = defaultdict(list)
    counts: defaultdict[Any, int] = defaultdict(int)

    def call(rank: int, host: _Host, step: Step) -> bool:
        """Whether the host comes past a step."""
        device = host.device
        if step.kind == COMPUTE:
            device.launch(step, COMPUTE_STREAM)
        elif step.kind == WAIT:
            device.launch(step, COMPUTE_STREAM, device.works[step.number])
        elif step.kind == KEEP:
            host.kept.append(step.number)
        elif step.kind == DRAIN:
            return all(device.works[number].done for number in host.kept)
        elif step.kind == SYNCHRONIZE:
            return all(item.done for item in device.items)
        elif step.kind == MEET:
            ready[MEET, host.met].add(rank)
            if len(ready[MEET, host.met]) < len(hosts):
                return False
            host.met += 1
        else:
            ready[step.group].add(rank)
            if not ready[step.group].issuperset(step.group[0]):
                return False
            launch(rank, device, step)
        return True

    def launch(rank: int, device: _Device, step: Step) -> None:
        item = device.launch(step, step.group, device.last.get(COMPUTE_STREAM))
        device.works[step.number] = item
        ends = {SEND: (rank, step.peer), RECEIVE: (step.peer, rank)}.get(step.kind, ())
        way = step.group, ends
        key = *way, counts[rank, way]  # the n-th of one rank meets the n-th of the other
        counts[rank, way] += 1
        matches[key].append(item)
        item.partners = matches[key]
        assert {each.step.what for each in item.partners} == {step.what}, f"{key}: {step}"

    def meet() -> bool:
        """Let end what all ranks have begun; whether anything did."""
        moved = False
        for host in hosts:
            for item in host.device.begun:
                ranks = len(item.step.group[0]) if item.step.kind == COLLECTIVE else 2
                if len(item.partners) == ranks:
                    item.done = all(each.begun for each in item.partners)
                    moved |= item.done
            host.device.begun = [item for item in host.device.begun if not item.done]
        return moved

    moved = True
    while moved:
        moved = False
        for rank, host in enumerate(hosts):
            while host.step is not None and call(rank, host, host.step):
                host.place += 1
                moved = True
        while sum(host.device.advance() for host in hosts) or meet():
            moved = True
    return [
        f"rank {rank}: host at {host.step}, device at {left[0].step if left else None}"
        for rank, host in enumerate(hosts)
        if (left := [item for item in host.device.items if not item.done]) or host.step
    ]
