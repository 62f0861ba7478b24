"""A training loop of one's own over a plan's pipeline.

The pipeline runs an iteration and leaves its gradients; what is done with them is the loop's.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from partopt.documents.plan import Plan
from partopt.errors import PartoptError
from partopt.profiler.load import find_model
from partopt.runtime.backends import choose_backend
from partopt.runtime.context import Context
from partopt.runtime.launcher import is_under_torchrun, run_ranks
from partopt.runtime.run_checks import (
    check_data,
    check_model,
    check_ranks,
    check_run,
    choose_engine,
)
from partopt.runtime.training import RankTraining, Training, losses_of
from partopt.schedules import schedule


class Pipeline:
    """The part of one rank in the pipeline of a plan with a synchronous schedule."""

    def __init__(self, training: Training, context: Context) -> None:
        self._own = RankTraining(training, context)
        self.rank, self.ranks, self.device = context.rank, context.ranks, context.device

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters of this rank's stages by their names in the model; a tied one once."""
        found: dict[int, tuple[str, nn.Parameter]] = {}
        for stage in self._own.stages.values():
            for name, each in stage.own_parameters.items():
                found.setdefault(id(each), (name, each))
        return dict(found.values())

    def step(self) -> float:
        """Run an iteration: the mean loss of its microbatches, on every rank.

        The gradients of that mean are then in the parameters, summed over replicas and over the
        stages that hold a tied one. They are in place of what was there before.
        """
        for each in self.parameters.values():
            each.grad = None
        self._own.step(learn=False)
        return losses_of(self._own.context.gather(self._own.end_step()))


@dataclass(frozen=True)
class _Loop:
    """What every process runs; a class, so that it can be sent to one."""

    training: Training
    loop: Callable[[Pipeline], Any]

    def __call__(self, context: Context) -> Any:
        return self.loop(Pipeline(self.training, context))


def train_with(
    loop: Callable[[Pipeline], Any],
    plan: Plan,
    model: str | os.PathLike[str],
    *,
    arguments: Mapping[str, Any] | None = None,
    backend: str = "auto",
    engine: str = "auto",
    seed: int = 0,
) -> Any:
    """Run `loop` on every rank of `plan`, with its part of the pipeline; what rank 0 returns.

    `model` is `FILE.py[:ATTR]` or `dotted.module[:ATTR]`, built with these `arguments`. Under
    `torchrun` this process is one of the ranks, and gets its own result; else they are started
    here, and results and the loop have to be picklable. `backend` and `engine` are those of
    `partopt.runtime.running.run_plan`.

    Raises PartoptError for a plan that cannot run here or is asynchronous, a model that is not the
    plan's, and where a rank fails.
    """
    if schedule(plan.schedule).asynchronous:
        raise PartoptError(
            f"{plan.schedule} is asynchronous: its stages step on their own, not in a loop",
            "plan with a schedule that flushes, such as `schedule=1f1b`",
            code="cannot-run",
        )
    found = find_model(model, arguments)
    try:
        passing = check_run(plan, 1, None)
        training = Training(plan, found, passing, seed, engine=choose_engine(engine, plan))
        check_data(training)
        if not is_under_torchrun():
            check_model(training)
        name = choose_backend(backend, check_ranks(plan.world_size))
        return run_ranks(_Loop(training, loop), plan, name)
    except PartoptError as error:
        raise found.locate(error) from error.__cause__
