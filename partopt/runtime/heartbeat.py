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

from partopt.runtime.progress import OUTSIDE, Progress

BEAT_S = 1.0
_KEY = "partopt/progress/{}"


class Heartbeat:
    """What a rank has heard of all, and when any of them last moved by this rank's own clock."""

    def __init__(self, store: Store, progress: Progress, rank: int) -> None:
        self.store, self.progress, self.rank = store, progress, rank
        self.heard = Progress(progress.ranks)
        self.moved_s = time.monotonic()

    def beat(self) -> None:
        """Tell the others of this rank, and hear of them."""
        self.tell()
        for rank in range(self.progress.ranks):
            key = _KEY.format(rank)
            if self.store.check([key]):
                told = bytes.fromhex(self.store.get(key).decode())
                if told != self.heard.table[rank].tobytes():
                    self.heard.table[rank] = np.frombuffer(told, dtype=np.int64)
                    self.moved_s = time.monotonic()

    def tell(self) -> None:
        """Tell the others what this rank does."""
        self.store.set(_KEY.format(self.rank), self.progress.table[self.rank].tobytes().hex())

    def stall(self, limit_s: float, setup_limit_s: float) -> str:
        """What to say of a run that has stood still for too long; of one that moves, nothing."""
        last = [self.heard.last(rank) for rank in range(self.heard.ranks)]
        outside = any(each.state == OUTSIDE for each in last)
        still_s = time.monotonic() - self.moved_s
        if still_s <= (setup_limit_s if outside else limit_s):
            return ""
        lines = [f"  rank {rank}: {each}" for rank, each in enumerate(last)]
        return "\n".join([f"no progress of any rank for {still_s:.0f} s", *lines])


@contextlib.contextmanager
def watching(heartbeat: Heartbeat, limit_s: float, setup_limit_s: float) -> Iterator[None]:
    """Within the context, end this process with a message when the whole run stands still."""
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(BEAT_S):
            try:
                heartbeat.beat()
            except RuntimeError:
                return  # the store is gone: torchrun ends the run
            stall = heartbeat.stall(limit_s, setup_limit_s)
            if stall:
                print(f"error: {stall}", file=sys.stderr, flush=True)
                os._exit(1)  # torchrun ends the others

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
