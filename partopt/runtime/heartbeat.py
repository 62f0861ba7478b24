"""Watches a run that `torchrun` started: what every rank does goes through the store of the run.

`torchrun` ends a run whose process ends; it does not see one that is stopped or waits for ever.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator

import numpy as np
from torch.distributed import Store  # type: ignore[attr-defined]

from partopt.errors import PartoptError
from partopt.runtime.context import lost_connections
from partopt.runtime.processes import cpu_s
from partopt.runtime.progress import OUTSIDE, Progress
from partopt.runtime.supervise import COMPUTES

BEAT_S = 1.0
PAUSE_S = 5.0  # between beats, above which this process was stopped itself
_KEY = "partopt/progress/{}"


class Heartbeat:
    """What a rank has heard of all, and when each last moved by this rank's own clock."""

    def __init__(self, store: Store, progress: Progress, rank: int) -> None:
        self.store, self.progress, self.rank = store, progress, rank
        self.heard = Progress(progress.ranks)
        self.beat_s = time.monotonic()
        self.moved_s = [self.beat_s] * progress.ranks
        self.used_s = cpu_s(os.getpid())

    def beat(self) -> None:
        """Tell the others of this rank, and hear of them."""
        now_s = time.monotonic()
        if now_s - self.beat_s > PAUSE_S:  # Ctrl-Z stops the others, too
            self.moved_s = [now_s] * self.progress.ranks
        if self._warms_up(now_s - self.beat_s):
            self.progress.table[self.rank, 0] = time.perf_counter_ns()
        self.beat_s = now_s
        self.tell()
        for rank in range(self.progress.ranks):
            key = _KEY.format(rank)
            if self.store.check([key]):
                told = bytes.fromhex(self.store.get(key).decode())
                if told != self.heard.table[rank].tobytes():
                    self.heard.table[rank] = np.frombuffer(told, dtype=np.int64)
                    self.moved_s[rank] = time.monotonic()

    def _warms_up(self, passed_s: float) -> bool:
        """Whether this rank computes in its first step, and not only says so."""
        before_s, self.used_s = self.used_s, cpu_s(os.getpid())
        own = self.progress.last(self.rank)
        return own.works and own.step == 0 and self.used_s - before_s >= COMPUTES * passed_s

    def tell(self) -> None:
        """Tell the others what this rank does."""
        with lost_connections():
            self.store.set(_KEY.format(self.rank), self.progress.table[self.rank].tobytes().hex())

    def stall(self, limit_s: float, setup_limit_s: float) -> str:
        """What to say of a run that has stood still for too long; of one that moves, nothing."""
        last = [self.heard.last(rank) for rank in range(self.heard.ranks)]
        outside = any(each.state == OUTSIDE for each in last)
        still_s = time.monotonic() - max(self.moved_s)
        if still_s <= (setup_limit_s if outside else limit_s):
            return ""
        lines = [f"  rank {rank}: {each}" for rank, each in enumerate(last)]
        first = min(range(len(last)), key=lambda r: (not last[r].works, self.moved_s[r]))
        where = f" at {last[first].action}" if last[first].action else ""
        said = f"rank {first} failed{where}: no progress of any rank for {still_s:.0f} s"
        return "\n".join([said, *lines])


@contextlib.contextmanager
def watching(heartbeat: Heartbeat, limit_s: float, setup_limit_s: float) -> Iterator[None]:
    """Within the context, end this process with a message when the whole run stands still."""
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(BEAT_S):
            try:
                heartbeat.beat()
                stall = heartbeat.stall(limit_s, setup_limit_s)
            except (RuntimeError, PartoptError):
                if ended.wait(BEAT_S):
                    return  # whoever held the store had reason to leave
                stall = "the store of the run is gone, and with it who started this rank"
            if stall:
                try:
                    print(f"error: {stall}", file=sys.stderr, flush=True)
                finally:  # though nobody may be there to read it
                    os._exit(1)  # torchrun ends the others

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
