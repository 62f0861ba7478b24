"""Clocks: a stamp is taken where work is issued, and read as seconds once the step is over."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import Any, Protocol

import torch


class Clock(Protocol):
    """Takes stamps during a step, and turns them into seconds after it."""

    def stamp(self) -> Any:
        """A mark of this moment, cheap enough to be taken between layers."""

    def intervals_s(self, stamps: Sequence[Any]) -> list[float]:
        """Seconds between each stamp and the next; waits for the device.

        The stamps must not be used again.
        """

    def idle_share(self) -> float | None:
        """Difference of processor and wall time as a share of wall time; None if unknown."""


class CpuClock:
    """Wall time of the host, with the processor time next to it.

    They differ when something else uses the processor.
    """

    def __init__(self) -> None:
        self._wall_s = 0.0
        self._busy_s = 0.0

    def stamp(self) -> tuple[float, float]:
        """Wall and processor seconds."""
        return time.perf_counter(), time.process_time()

    def intervals_s(self, stamps: Sequence[tuple[float, float]]) -> list[float]:
        """Wall seconds between stamps."""
        self._wall_s += stamps[-1][0] - stamps[0][0]
        self._busy_s += stamps[-1][1] - stamps[0][1]
        return [later[0] - earlier[0] for earlier, later in itertools.pairwise(stamps)]

    def idle_share(self) -> float | None:
        """Share of the wall time by which the processor time differs from it."""
        return abs(1 - self._busy_s / self._wall_s) if self._wall_s > 0 else None


class CudaClock:
    """Events on the current stream, taken from a pool.

    Recording one costs microseconds and does not wait for the device.
    """

    def __init__(self) -> None:
        self._pool: list[torch.cuda.Event] = []

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

    def idle_share(self) -> float | None:
        """Not known: the device's own time is measured."""
        return None
