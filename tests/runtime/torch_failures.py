"""Runs that fail on torch's pipeline runtime: `python -m tests.runtime.torch_failures`.

It prints a line of JSON for each: what `tests.runtime.failures` notes of it.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from partopt.runtime.context import Context
from partopt.runtime.engine import execute
from partopt.runtime.processes import run_local
from partopt.runtime.torch_engine import execute_on_torch
from tests.runtime.failures import boom, describe, fail_at, kill
from tests.runtime.odd_cuts import ONE, CheckingStage
from tests.runtime.plans import straight


class Growing(CheckingStage):
    """A stage that makes another shape once than crosses its cut."""

    def forward(self, microbatch: int, received: Sequence[Tensor]) -> list[Tensor]:
        sent = super().forward(microbatch, received)
        return [torch.zeros(2) for _ in sent] if microbatch == 3 else sent


def grow(engine: Any, context: Context) -> None:
    def stage_of(s: int) -> CheckingStage:
        return Growing([ONE], s, 2)

    engine(straight("1f1b", [1, 1], 6), stage_of, context=context)


def report(name: str, run: Callable[[], Any]) -> None:
    print(json.dumps(describe(name, run)), flush=True)


if __name__ == "__main__":
    fail = partial(fail_at, 1, engine=execute_on_torch)
    run = partial(run_local, start="fork")
    report("raised", partial(run, 3, partial(fail, boom)))
    report("killed", partial(run, 3, partial(fail, partial(kill, signal.SIGKILL))))
    report("another shape", partial(run, 2, partial(grow, execute_on_torch)))
    report("another shape of the own engine", partial(run, 2, partial(grow, execute)))
