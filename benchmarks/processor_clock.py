"""A clock of the profiler that counts what this process computed, and not what others do."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence


class ProcessorClock:
    """Seconds that the process computed."""

    def stamp(self) -> float:
        """Processor seconds so far."""
        return time.process_time()

    def intervals_s(self, stamps: Sequence[float]) -> list[float]:
        """Processor seconds between stamps."""
        return [later - earlier for earlier, later in itertools.pairwise(stamps)]

    def idle_share(self) -> float | None:
        """Not known: only one time is taken."""
        return None
