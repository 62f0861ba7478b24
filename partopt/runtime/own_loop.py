"""A user's training loops: over a plan's pipeline, or over a stage of it.

The pipeline runs an iteration and leaves its gradients; what is done with them is the loop's. A
stage is a module, and it is the loop that moves tensors between it and others.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from partopt.documents.plan import Plan
from partopt.documents.stage import stages_text
from partopt.errors import PartoptError
from partopt.profiler.source import ModelSource, find_model
from partopt.replay.replayed_stage import StageModule
from partopt.runtime.context import Context
from partopt.runtime.optimizers import SharedOptimizer
from partopt.runtime.processes import choose_backend, run_ranks
from partopt.runtime.run import RunOptions, prepare, ranks_here
from partopt.runtime.training import PlannedTraining, RankTraining, losses_of
from partopt.runtime.updates import StageOptimizer
from partopt.schedules import schedule


class Pipeline:
    """The part of one rank in the pipeline of a plan with a synchronous schedule.

    `parameters` are those of this rank's stages by their names in the model; one that several of
    them hold is there once.
    """

    def __init__(self, training: PlannedTraining, context: Context) -> None:
        self._training = RankTraining(training, context)
        self.rank, self.ranks, self.device = context.rank, context.ranks, context.device
        self.parameters: dict[str, nn.Parameter] = {}
        self._copies: list[tuple[nn.Parameter, nn.Parameter]] = []  # of it, in the other stages
        for stage in self._training.stages.values():
            for name, parameter in stage.held_parameters.items():
                if self.parameters.setdefault(name, parameter) is not parameter:
                    self._copies.append((parameter, self.parameters[name]))

    def make_optimizer(
        self, make: Callable[[Sequence[nn.Parameter]], Optimizer]
    ) -> PipelineOptimizer:
        """What steps all `parameters`, with optimizers that `make` makes of some of them.

        Where the plan has replicas share the state every one makes its share.
        """
        steps, left = [], dict.fromkeys(self.parameters.values())
        for s, group in self._training.sharing.items():
            if s in self._training.stages:
                mine = [p for p in self._training.stages[s].parameters if p in left]
                steps.append(SharedOptimizer(mine, make, group))
                left = {p: None for p in left if p not in set(mine)}
        return PipelineOptimizer([*steps, *([make(list(left))] if left else [])])

    def step(self) -> float:
        """Run an iteration: the mean loss of its microbatches, on every rank.

        The gradients of that mean are then in the parameters, summed over replicas and over the
        stages that hold a tied one. They are in place of what was there before.
        """
        for copy, whole in self._copies:
            copy.data.copy_(whole.data)
        self._training.run(None)
        return losses_of(self._training.context.gather(self._training.end_step()))


@dataclass(frozen=True)
class PipelineOptimizer:
    """What steps the parameters of one rank, those that replicas share out among them too."""

    steps: Sequence[StageOptimizer]

    @property
    def optimizers(self) -> list[Optimizer]:
        """Those of this rank, as for a schedule of their rates."""
        shared = (own.optimizer if isinstance(own, SharedOptimizer) else own for own in self.steps)
        return [one for one in shared if isinstance(one, Optimizer)]

    def step(self) -> None:
        """Step the parameters by their gradients; those of other replicas come from these."""
        for one in self.steps:
            one.step()


@dataclass(frozen=True)
class _LoopMain:
    """What every process runs; a class, so that it can be sent to one."""

    training: PlannedTraining
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
    `torchrun` this process is one of the ranks, and gets its result; else they are started
    here, and results and the loop have to be picklable. `backend` and `engine` are those of
    `partopt.runtime.run.RunOptions`.

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
        name = choose_backend(backend, ranks_here(plan.world_size))
        training = prepare(plan, found, RunOptions(engine=engine, seed=seed))
        return run_ranks(_LoopMain(training, loop), plan.world_size, name)
    except PartoptError as error:
        raise found.locate(error) from error.__cause__


def stage_module(
    plan: Plan,
    rank: int,
    model: str | os.PathLike[str] | ModelSource,
    *,
    arguments: Mapping[str, Any] | None = None,
    stage: int | None = None,
    seed: int = 0,
    device: str | torch.device = "cpu",
) -> StageModule:
    """The stage of `plan` that `rank` holds, as a module on `device`; of several, number `stage`.

    `model` is a file or module as for `train_with`, built with these `arguments`, or what
    `partopt.profiler.source.find_model` found. The stage has its weights alone, with the values
    of the whole model built after `torch.manual_seed(seed)`, in the number format of the plan and
    under its autocast. It computes a microbatch as the plan has it: a loss is that of the model's
    file and not divided, and a stage that the plan recomputes does not do so by itself. Gradients
    of replicas and of tied parameters are the loop's to add up.

    Raises PartoptError for a rank that holds no such stage, a model that is not the plan's, and one
    that cannot be cut so.
    """
    plan.stage_of(rank)  # refuses a rank that is not there, or idle
    held = [s for s, planned in enumerate(plan.stages) if rank in planned.ranks]
    s = held[0] if stage is None and len(held) == 1 else stage
    if s is None or s not in held:
        asked = "which is meant?" if stage is None else f"not stage {stage}"
        raise PartoptError(
            f"rank {rank} holds {stages_text(held)}: {asked}",
            f"give `stage={held[0]}`",
            code="no-such-stage",
            rank=rank,
        )
    found = model if isinstance(model, ModelSource) else find_model(model, arguments)
    try:
        training = PlannedTraining(plan, found, plan.microbatches or 1, seed)
        record, _ = training.record(torch.device(device))
        return training.stage(s, record, training.build_seeded(), torch.device(device))
    except PartoptError as error:
        raise found.locate(error) from error.__cause__
