"""Runs that fail, one after the other in one process: `python -m tests.runtime.failures FILE`.

It pickles of each what was raised, after how long, and what was left; `torch` in the place of FILE
prints that of runs on torch's pipeline runtime, a line of JSON each. Where the variables of
torchrun are set it is one rank of a run; `hang` has the first one hang.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from partopt.cli.stopping import stopped_by_signals
from partopt.documents.plan import Plan
from partopt.errors import PartoptError
from partopt.runtime.context import Context
from partopt.runtime.engine import execute
from partopt.runtime.processes import is_under_torchrun, run_here, run_local
from partopt.runtime.torch_engine import execute_on_torch
from tests.replay.odd_cuts import ONE, CheckingStage
from tests.runtime.plans import straight
from tests.runtime.sleeping import SleepingStage

PLAN = straight("1f1b", [1, 1, 1], 6, forward=[0.002] * 3, backward=[0.004] * 3)
PAIR = straight("1f1b", [1, 1], 6, forward=[0.002] * 2, backward=[0.004] * 2)
SLOW_S = 7.0  # longer than it takes to name a rank that hangs, where others wait briefly


class Failing(SleepingStage):
    """A stage to which something happens in the forward of its fourth microbatch."""

    happening: Callable[[], object] = staticmethod(lambda: None)

    def forward(self, microbatch: int, received: Sequence[Tensor]) -> list[Tensor]:
        if microbatch == 3:
            self.happening()
        return super().forward(microbatch, received)


class Growing(CheckingStage):
    """A stage that makes another shape once than crosses its cut."""

    def forward(self, microbatch: int, received: Sequence[Tensor]) -> list[Tensor]:
        sent = super().forward(microbatch, received)
        return [torch.zeros(2) for _ in sent] if microbatch == 3 else sent


def boom() -> None:
    raise ValueError("boom")


def kill(number: int) -> None:
    os.kill(os.getpid(), number)


def hang() -> None:
    print("hangs", flush=True)
    time.sleep(1000)


def fail_at(
    rank: int,
    happening: Callable[[], object],
    context: Context,
    engine: Any = execute,
    plan: Plan = PLAN,
) -> str:
    """Run the plan; on one rank something happens."""

    def stage_of(s: int) -> SleepingStage:
        stage = Failing(plan, s)
        if s == rank:
            stage.happening = happening
        return stage

    engine(plan, stage_of, context=context)
    return "done"


def grow(engine: Any, context: Context) -> None:
    def stage_of(s: int) -> CheckingStage:
        return Growing([ONE], s, 2)

    engine(straight("1f1b", [1, 1], 6), stage_of, context=context)


def raise_outside(context: Context) -> str:
    if context.rank == 0:
        raise PartoptError("no such model", "name another", code="test")
    context.barrier()
    return "done"


def rank_of(context: Context) -> int:
    return context.rank


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def describe(
    name: str, run: Callable[..., Any], ranks: int = 3, start: str = "fork", **options: Any
) -> dict[str, Any]:
    """What came of a run."""
    before, began = open_files(), time.monotonic()
    found: dict[str, Any] = {"name": name, "message": "", "fields": {}, "hint": ""}
    try:
        found["results"] = run_local(ranks, run, start=start, **options)
    except PartoptError as error:
        found |= {"message": error.message, "hint": error.hint, "code": error.code}
        found["fields"] = {key: error.fields[key] for key in ("rank", "reason", "last_actions")}
    found["seconds"] = time.monotonic() - began
    found["left"] = [len(multiprocessing.active_children()), open_files() - before]
    return found


def main() -> list[dict[str, Any]]:
    brief, wait = {"wait_s": 1.0}, partial(time.sleep, 1000)
    once = partial(run_local, 1, rank_of, start="fork")
    once()  # what is opened once in a process is open
    with ProcessPoolExecutor(4, multiprocessing.get_context("fork"), once) as side_by_side:
        waiting = [
            side_by_side.submit(describe, name, partial(fail_at, rank, happening), **options)
            for name, rank, happening, options in (
                ("stopped", 2, partial(kill, signal.SIGSTOP), brief),
                ("hung", 0, wait, brief),
                ("hung later", 1, wait, brief),
                ("slow", 1, partial(time.sleep, SLOW_S), {}),
            )
        ]
    return [
        *(each.result() for each in waiting),
        describe("well", partial(fail_at, 9, boom)),
        describe("raised", partial(fail_at, 1, boom)),
        describe("killed", partial(fail_at, 1, partial(kill, signal.SIGKILL))),
        describe("left", partial(fail_at, 1, partial(os._exit, 3))),
        describe("memory", partial(fail_at, 1, partial(bytearray, 10**15))),
        describe("outside", raise_outside),
        # last, for it starts a process of multiprocessing's own; each of its ranks imports torch
        describe("spawned", partial(fail_at, 1, boom, plan=PAIR), ranks=2, start="spawn"),
    ]


def on_torch() -> None:
    fail = partial(fail_at, 1, engine=execute_on_torch)
    killed = partial(fail, partial(kill, signal.SIGKILL))
    print(json.dumps(describe("raised", partial(fail, boom))), flush=True)
    print(json.dumps(describe("killed", killed)), flush=True)
    for engine in (execute_on_torch, execute):
        run = describe(f"another shape {engine.__name__}", partial(grow, engine), ranks=2)
        print(json.dumps(run), flush=True)


if __name__ == "__main__":
    from tests.runtime import failures  # under the name by which what it runs is unpickled

    if is_under_torchrun():
        rank = 0 if sys.argv[1:] == ["hang"] else 9
        with stopped_by_signals():
            print(run_here(partial(fail_at, rank, hang)))
    elif sys.argv[1:] == ["torch"]:
        on_torch()
    else:
        Path(sys.argv[1]).write_bytes(pickle.dumps(failures.main()))
