"""When a rank's actions and messages begin and end: on its device, not on the host.

A CPU has done what a call returns from. On a GPU the host only launches: the time of a launch is
that of an event in the stream, read once the step is over. The events of a step count from one that
is recorded at its barrier, when the device has nothing to do.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from partopt.runtime.actions import Times
from partopt.runtime.context import Context


class RankClock:
    """The clock of a rank on a CPU. Times are of `time.perf_counter_ns`."""

    def begin_step(self) -> int:
        """The time at which a step begins, whose barrier has just ended."""
        return time.perf_counter_ns()

    def now(self) -> Any:
        """A stamp of all that was called so far, for `note`."""
        return time.perf_counter_ns()

    def note(self, times: Times, place: Any, stamp: Any = None) -> None:
        """Write a stamp, or the time now, to a place in `times`, where `end_step` leaves it."""
        times[place] = self.now() if stamp is None else stamp

    def end_step(self) -> None:
        """Have all that was noted in its place."""


class DeviceClock(RankClock):
    """The clock of a rank on a GPU, by events in the stream that is current."""

    def __init__(self) -> None:
        self._notes: list[tuple[Times, Any, torch.cuda.Event]] = []

    def begin_step(self) -> int:
        """The time at which a step begins, when the device is idle."""
        torch.cuda.synchronize()
        self._anchor, self._began_ns = self.now(), time.perf_counter_ns()
        return self._began_ns

    def now(self) -> torch.cuda.Event:
        """An event, which comes when the work that was launched before it is done."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def note(self, times: Times, place: Any, stamp: torch.cuda.Event | None = None) -> None:
        """Keep a stamp, for which `end_step` writes its time."""
        self._notes.append((times, place, self.now() if stamp is None else stamp))

    def end_step(self) -> None:
        """Wait for the device, and write all times."""
        torch.cuda.synchronize()
        for times, place, event in self._notes:
            passed_ms = self._anchor.elapsed_time(event)
            times[place] = self._began_ns + round(passed_ms * 1e6)
        self._notes.clear()


def clock_of(context: Context) -> RankClock:
    """The clock of a rank."""
    return DeviceClock() if context.backend == "nccl" else RankClock()
