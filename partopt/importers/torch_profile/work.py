"""What was computed: operations with the seconds that they took on the device.

On a GPU the time of an operation is that of the kernels that it launched, on a CPU its own.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from dataclasses import dataclass, field, replace

from partopt.importers.torch_profile.trace import LAUNCHES, ON_DEVICE, OPERATION, Event, Trace

_BACKWARD = "autograd::engine::evaluate_function"
_MESSAGES = ("c10d::", "gloo:", "nccl", "ncclDevKernel", "ncclKernel")  # not computing


@dataclass(frozen=True)
class Work:
    """An operation that is in no other one, or a kernel launched by none.

    `sequence` of a backward is the number of the forward operation that it differentiates;
    `sequences` of a forward are those of all operations inside.
    """

    start: float  # microseconds
    end: float
    thread: int | str
    seconds: float
    backward: bool = False
    sequence: int | None = None
    sequences: list[int] = field(default_factory=list)
    externals: list[int] = field(default_factory=list)


def work_of(trace: Trace) -> list[Work]:
    """Everything that was computed, in order of time; what only sends has no seconds."""
    found = _outermost(trace)
    if any(True for _ in trace.of(*ON_DEVICE)):
        found = _with_kernels(trace, found)
    return sorted(found, key=lambda work: work.start)


def _outermost(trace: Trace) -> list[Work]:
    found: list[Work] = []
    current: dict[int | str, Work] = {}
    for event in trace.of(OPERATION):
        root = current.get(event.tid)
        if root is None or event.start >= root.end:
            root = current[event.tid] = _work(event)
            found.append(root)
        if event.args and event.args.sequence is not None and event.args.sequence >= 0:
            root.sequences.append(event.args.sequence)
        if event.args and event.args.external is not None:
            root.externals.append(event.args.external)
    return found


def _work(event: Event) -> Work:
    seconds = 0.0 if event.name.startswith(_MESSAGES) else event.length / 1e6
    return Work(
        event.start,
        event.end,
        event.tid,
        seconds,
        event.name.startswith(_BACKWARD),
        event.args.sequence if event.args else None,
    )


def _with_kernels(trace: Trace, operations: list[Work]) -> list[Work]:
    """The operations with the time of their kernels, and the kernels that none of them launched.

    A kernel belongs to the launch of the same `correlation`, where there is none to the operation
    of the same `External id`.
    """
    launches = {
        event.args.correlation: event
        for event in trace.of(*LAUNCHES)
        if event.args and event.args.correlation is not None
    }
    by_external = {number: at for at, work in enumerate(operations) for number in work.externals}
    places = _Places(operations)
    seconds: dict[int, float] = defaultdict(float)
    alone: list[Work] = []
    for kernel in trace.of(*ON_DEVICE):
        if kernel.name.startswith(_MESSAGES):
            continue
        links = kernel.args
        launch = launches.get(links.correlation or 0) if links else None
        at = places.find(launch) if launch else None
        if at is None and links and links.external is not None:
            at = by_external.get(links.external)
        if at is not None:
            seconds[at] += kernel.length / 1e6
        else:
            by = launch or kernel
            alone.append(Work(by.start, by.end, by.tid, kernel.length / 1e6))
    return [replace(work, seconds=seconds[at]) for at, work in enumerate(operations)] + alone


class _Places:
    """Which of the operations runs on a thread at a time."""

    def __init__(self, operations: list[Work]) -> None:
        self.operations = operations
        self.threads: dict[int | str, list[int]] = defaultdict(list)
        for at, work in enumerate(operations):
            self.threads[work.thread].append(at)
        self.starts = {
            thread: [operations[at].start for at in own] for thread, own in self.threads.items()
        }

    def find(self, event: Event) -> int | None:
        """The operation in which the event starts, if any."""
        before = bisect.bisect_right(self.starts.get(event.tid, []), event.start) - 1
        if before < 0:
            return None
        at = self.threads[event.tid][before]
        return at if event.start < self.operations[at].end else None
