"""What every rank does at the moment: a few numbers that it writes and others read."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from partopt.schedules.order import KINDS, U

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
FIELDS = 6  # time in nanoseconds, state, step, kind, stage, microbatch


class Last(NamedTuple):
    """The last thing that a rank noted; `action` is empty before the first one."""

    time_ns: int
    state: int
    step: int
    action: str  # 2F0

    @property
    def works(self) -> bool:
        """Whether the rank waits for no other: where none moves, it is the reason."""
        return self.state in (OUTSIDE, COMPUTING)

    def __str__(self) -> str:
        where = f"{self.action} of step {self.step}" if self.action else "no action yet"
        return f"{where}, {WORDS[self.state]}" if WORDS[self.state] else where


class Progress:
    """The last action of every rank, in memory that their processes share."""

    def __init__(self, ranks: int, memory: Any = None) -> None:
        self.ranks = ranks
        raw = np.zeros(ranks * FIELDS, np.int64) if memory is None else memory
        self.table: NDArray[np.int64] = np.frombuffer(raw, dtype=np.int64).reshape(ranks, FIELDS)

    def last(self, rank: int) -> Last:
        """What `rank` noted last."""
        when, state, step, kind, stage, microbatch = self.table[rank].tolist()
        if not when or kind < 0:
            return Last(when, state, step, "")
        number = "" if kind == U else str(microbatch)
        return Last(when, state, step, f"{stage}{KINDS[kind]}{number}")

    def writer(self, rank: int) -> Writer:
        """What `rank` notes its own progress with."""
        return Writer(self.table[rank])


class Writer:
    """Notes what one rank does, in less than a microsecond."""

    def __init__(self, row: NDArray[np.int64]) -> None:
        self.row = row
        self.first_step = 0  # of the run, that its engine calls step 0
        row[3] = -1  # no action yet
        self.note(OUTSIDE)

    @property
    def state(self) -> int:
        """What was noted last."""
        return int(self.row[1])

    def note(self, state: int) -> None:
        """Note that the rank goes on to another state."""
        self.row[1] = state
        self.row[0] = time.perf_counter_ns()

    def act(self, step: int, kind: int, stage: int, microbatch: int, state: int) -> None:
        """Note that the rank comes to an action."""
        row = self.row
        row[2], row[3], row[4], row[5] = self.first_step + step, kind, stage, microbatch
        self.note(state)
