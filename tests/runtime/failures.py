"""Runs that fail, one after the other in one process: `python -m tests.runtime.failures FILE`.

It pickles of each what was raised, after how long, and what was left.
Where the variables of torchrun are set it is one rank of a run; `hang` has the first one hang.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from partopt.cli.stopping import stopped_by_signals
from partopt.errors import PartoptError
from partopt.runtime.context import Context
from partopt.runtime.engine import execute
from partopt.runtime.processes import is_under_torchrun, run_here, run_local
from tests.runtime.plans import straight
from tests.runtime.sleeping import SleepingStage

PLAN = straight("1f1b", [1, 1, 1], 6, forward=[0.002] * 3, backward=[0.004] * 3)
SLOW_S = 12.0


class Failing(SleepingStage):
    """A stage to which something happens in the forward of a microbatch."""

    happening: Callable[[], object] = staticmethod(lambda: None)
    microbatch = 3

    def forward(self, microbatch: int, received: Sequence[Tensor]) -> list[Tensor]:
        if microbatch == self.microbatch:
            self.happening()
        return super().forward(microbatch, received)


def boom() -> None:
    raise ValueError("boom")


def kill(number: int) -> None:
    os.kill(os.getpid(), number)


def fail_at(
    rank: int,
    happening: Callable[[], object],
    context: Context,
    engine: Callable[..., Any] = execute,
) -> str:
    """Run the plan; on one rank something happens."""

    def stage_of(s: int) -> SleepingStage:
        stage = Failing(PLAN, s)
        if s == rank:
            stage.happening = happening
        return stage

    engine(PLAN, stage_of, context=context)
    return "done"


def hang() -> None:
    print("hangs", flush=True)
    time.sleep(1000)


def raise_outside(context: Context) -> str:
    if context.rank == 0:
        raise PartoptError("no such model", "name another", code="test")
    context.barrier()
    return "done"


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def describe(name: str, run: Callable[[], Any]) -> dict[str, Any]:
    """What came of a run."""
    before, began = open_files(), time.monotonic()
    found: dict[str, Any] = {"name": name, "message": "", "fields": {}, "hint": ""}
    try:
        found["results"] = run()
    except PartoptError as error:
        found |= {"message": error.message, "hint": error.hint, "code": error.code}
        found["fields"] = {key: error.fields[key] for key in ("rank", "reason", "last_actions")}
    found["seconds"] = time.monotonic() - began
    found["left"] = [len(multiprocessing.active_children()), open_files() - before]
    return found


def main() -> list[dict[str, Any]]:
    brief = {"wait_s": 1.0}
    first: dict[str, tuple[Callable[[Context], str], dict[str, Any]]] = {
        "well": (partial(fail_at, 9, boom), {}),
        "raised": (partial(fail_at, 1, boom), {}),
        "killed": (partial(fail_at, 1, partial(kill, signal.SIGKILL)), {}),
        "stopped": (partial(fail_at, 2, partial(kill, signal.SIGSTOP)), brief),
        "hung": (partial(fail_at, 0, partial(time.sleep, 1000)), brief),
        "hung later": (partial(fail_at, 1, partial(time.sleep, 1000)), brief),
        "slow": (partial(fail_at, 1, partial(time.sleep, SLOW_S)), {}),
        "left": (partial(fail_at, 1, partial(os._exit, 3)), {}),
        "memory": (partial(fail_at, 1, partial(bytearray, 10**15)), {}),
        "outside": (raise_outside, {}),
    }
    run_local(1, rank_of, start="fork")  # what is opened once in a process is open
    found = [
        describe(name, partial(run_local, 3, run, start="fork", **options))
        for name, (run, options) in first.items()
    ]
    # last, for it starts a process of multiprocessing's own
    spawn = partial(run_local, 3, partial(fail_at, 1, boom), start="spawn")
    return [*found, describe("spawned", spawn)]


def rank_of(context: Context) -> int:
    return context.rank


if __name__ == "__main__":
    if is_under_torchrun():
        rank = 0 if sys.argv[1:] == ["hang"] else 9
        with stopped_by_signals():
            print(run_here(partial(fail_at, rank, hang)))
    else:
        Path(sys.argv[1]).write_bytes(pickle.dumps(main()))
