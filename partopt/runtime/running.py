"""Runs a plan: starts the ranks, lets them train, and puts what they recorded together."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from partopt.documents.plan import Plan
from partopt.documents.run import MachineLoad
from partopt.errors import PartoptError
from partopt.profiler.device import describe_device
from partopt.profiler.source import ModelSource, find_model
from partopt.runtime.backends import choose_backend
from partopt.runtime.check import check_first
from partopt.runtime.checkpoint import (
    check_folder,
    last_checkpoint,
    removing_partial,
    resume,
    save,
)
from partopt.runtime.context import Context
from partopt.runtime.processes import is_under_torchrun, run_ranks
from partopt.runtime.run_checks import (
    check_data,
    check_model,
    check_ranks,
    check_run,
    choose_engine,
    refused,
)
from partopt.runtime.run_document import RankResult, TrainingRun, put_together
from partopt.runtime.tensor_memory import TensorMemory, counted_step, held_by
from partopt.runtime.training import RankTraining, Training, losses_of


def run_source(
    plan: Plan,
    source: str | os.PathLike[str],
    *,
    arguments: Mapping[str, Any] | None = None,
    **options: Any,
) -> TrainingRun | None:
    """Train by `plan` the model that `source` names, built with these `arguments`.

    `source` is `FILE.py[:ATTR]` or `dotted.module[:ATTR]`; `options` are those of `run_plan`, and
    so are the errors, which name the file where they are about it.
    """
    found = find_model(source, arguments)
    try:
        return run_plan(plan, found, **options)
    except PartoptError as error:
        raise found.locate(error) from error.__cause__


def run_plan(
    plan: Plan,
    source: ModelSource,
    *,
    steps: int = 10,
    check: bool = False,
    backend: str = "auto",
    engine: str = "auto",
    seed: int = 0,
    rate: float = 1e-3,
    microbatches: int | None = None,
    save: str | None = None,
    every: int | None = None,
    resume: str | None = None,
) -> TrainingRun | None:
    """Train the model of `source` by `plan` for so many steps.

    Here as processes of this machine; under `torchrun` as its ranks, of which all but rank 0 get
    None. A step is an iteration; of an asynchronous plan it is `microbatches` from an empty
    pipeline to an empty one. `engine` is "torch", its pipeline runtime, the default where that can
    run the plan, or "partopt", which runs every plan. With `check` a first step is held against
    one process, and dropped. Checkpoints are written into the folder `save` at the end and after
    `every` so many steps; `resume` is a folder of them, whose last is gone on from, under this plan
    or another.

    Raises PartoptError for a plan that cannot run here, a model that is not the plan's, and where a
    rank fails.
    """
    passing = check_run(plan, steps, microbatches)
    keeping = Keeping.of(save, every, resume)
    training = Training(plan, source, passing, seed, rate, choose_engine(engine, plan))
    check_data(training)
    name = choose_backend(backend, check_ranks(plan.world_size))
    if not is_under_torchrun():
        check_model(training)

    main = _Main(training, steps, check, keeping)
    before = os.getloadavg()[0]
    with removing_partial(keeping.folder):
        results = run_ranks(main, plan.world_size, name)
    if not results:  # of a rank that torchrun started, but for the first
        return None
    load = MachineLoad(before=before, after=os.getloadavg()[0], cores=os.cpu_count() or 1)
    return put_together(training, results, load, name)


@dataclass(frozen=True)
class Keeping:
    """Where checkpoints go, how often, and which one is gone on from."""

    folder: Path | None
    every: int | None
    start: Path | None

    @classmethod
    def of(cls, save: str | None, every: int | None, resume: str | None) -> Keeping:
        """The checked options; PartoptError for a folder that cannot be written or read."""
        if every is not None and (save is None or every < 1):
            raise refused("every", every, "at least 1, beside `save`")
        if save is not None:
            check_folder(Path(save))
        start = None if resume is None else last_checkpoint(Path(resume))
        return cls(None if save is None else Path(save), every, start)

    def is_due(self, step: int) -> bool:
        """Whether a checkpoint is due after `step` steps of this run, whatever comes next."""
        return self.every is not None and step % self.every == 0


@dataclass(frozen=True)
class _Main:
    """What every process runs; a class, so that it can be sent to one."""

    training: Training
    steps: int
    check: bool
    keeping: Keeping

    def __call__(self, context: Context) -> list[RankResult]:
        """What all ranks found, in their order, on rank 0; nothing on others."""
        own = _train(self.training, context, self.steps, self.check, self.keeping)
        every: list[RankResult] = context.gather(own)
        return every if context.rank == 0 else []


def _train(
    training: Training, context: Context, steps: int, check: bool, keeping: Keeping
) -> RankResult:
    """What one rank does, and finds."""
    outcome = check_first(training, context) if check else None
    own = RankTraining(training, context)
    if keeping.start is not None:
        resume(own, keeping.start)
    cuda, counted = context.device.type == "cuda", counted_step(own, steps)
    if cuda:
        torch.cuda.reset_peak_memory_stats(context.device)
    records, losses, peak = [], [], None
    for step in range(steps):
        began, context.progress.first_step = time.perf_counter(), step
        if step == counted:
            with TensorMemory(held_by(own)) as memory:
                records.append(own.step())
            peak = memory.peak_bytes
        else:
            records.append(own.step())
        seconds = time.perf_counter() - began
        losses.append(losses_of(context.gather(own.end_step())))
        if keeping.folder is not None and (step + 1 == steps or keeping.is_due(step + 1)):
            save(own, keeping.folder)
        context.say(f"step {step + 1} of {steps}: loss {losses[-1]:.6g}, {seconds:.3g} s")
    if cuda:
        peak = torch.cuda.max_memory_allocated(context.device)
    device = describe_device(context.device).name
    return RankResult(records, losses, peak, counted, device, outcome)
