"""Clocks: a stamp is taken where work is issued, and read as seconds once the step is over."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch

_OTHERS = 0.10  # share of the process's time that other threads may take before they count
_CALIBRATION_CYCLES = 1_000_000
_LONGEST_HOLD_S = 1.0


class Clock(Protocol):
    """Takes stamps during a step, and turns them into seconds after it."""

    def stamp(self) -> Any:
        """A mark of this moment, cheap enough to be taken between layers."""

    def intervals_s(self, stamps: Sequence[Any]) -> list[float]:
        """Seconds between each stamp and the next; waits for the device.

        The stamps must not be used again.
        """

    def hold(self, seconds: float) -> None:
        """Have the device wait for `seconds` where it comes to this point; the host goes on.

        What the host does meanwhile does not eat the lead that its launches have. Nothing happens
        where host and device are the same.
        """

    def idle_share(self) -> float | None:
        """Share of the wall time that is not in the intervals; None if unknown."""


class CpuStamp(NamedTuple):
    """A moment of the host: wall seconds, processor seconds of thread and process, the thread."""

    wall_s: float
    thread_s: float
    process_s: float
    thread: int


class CpuClock:
    """Processor time of the thread, with the wall time next to it.

    What else the machine does meanwhile does not count. Autograd runs the backward on the calling
    thread, checkpoints and custom functions included; only reentrant checkpoints nested more than
    60 deep go to another one. Where stamps come from several threads, or other threads of the
    process worked for more than a tenth of its time, the time of the whole process counts.
    """

    def __init__(self) -> None:
        self._wall_s = 0.0
        self._busy_s = 0.0

    def stamp(self) -> CpuStamp:
        """This moment on all clocks of the host."""
        return CpuStamp(
            time.perf_counter(), time.thread_time(), time.process_time(), threading.get_ident()
        )

    def intervals_s(self, stamps: Sequence[CpuStamp]) -> list[float]:
        """Processor seconds between stamps."""
        alone = _one_thread_worked(stamps)
        times = [stamp.thread_s if alone else stamp.process_s for stamp in stamps]
        self._wall_s += stamps[-1].wall_s - stamps[0].wall_s
        self._busy_s += times[-1] - times[0]
        return [later - earlier for earlier, later in itertools.pairwise(times)]

    def hold(self, seconds: float) -> None:
        """Do nothing: the host is the device."""

    def idle_share(self) -> float | None:
        """Share of the wall time in which the processor did something else, or nothing."""
        return max(1 - self._busy_s / self._wall_s, 0.0) if self._wall_s > 0 else None


def _one_thread_worked(stamps: Sequence[CpuStamp]) -> bool:
    first, last = stamps[0], stamps[-1]
    others_s = (last.process_s - first.process_s) - (last.thread_s - first.thread_s)
    return len({stamp.thread for stamp in stamps}) == 1 and others_s <= _OTHERS * (
        last.process_s - first.process_s
    )


class CudaClock:
    """Events on the current stream, taken from a pool.

    Recording one costs microseconds and does not wait for the device.
    """

    def __init__(self) -> None:
        self._pool: list[torch.cuda.Event] = []
        self._cycles_per_s: float | None = None

    def stamp(self) -> torch.cuda.Event:
        """An event recorded now."""
        event = self._pool.pop() if self._pool else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def intervals_s(self, stamps: Sequence[torch.cuda.Event]) -> list[float]:
        """Device seconds between events, after one wait for all of them."""
        torch.cuda.synchronize()
        seconds = [
            earlier.elapsed_time(later) / 1000 for earlier, later in itertools.pairwise(stamps)
        ]
        self._pool.extend(stamps)
        return seconds

    def hold(self, seconds: float) -> None:
        """Enqueue a kernel that spins for about `seconds`, at most one second."""
        if seconds > 0:
            rate = self._cycles_per_s or self._calibrate()
            torch.cuda._sleep(int(min(seconds, _LONGEST_HOLD_S) * rate))  # type: ignore[no-untyped-call]

    def _calibrate(self) -> float:
        """Cycles a second of the spinning kernel; waits for the device once."""
        started = self.stamp()
        torch.cuda._sleep(_CALIBRATION_CYCLES)  # type: ignore[no-untyped-call]
        [spun_s] = self.intervals_s([started, self.stamp()])
        self._cycles_per_s = _CALIBRATION_CYCLES / spun_s
        return self._cycles_per_s

    def idle_share(self) -> float | None:
        """Not known: the device's own time is measured."""
        return None
