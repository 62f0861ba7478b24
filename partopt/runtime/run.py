"""Runs a plan: refuses what cannot run, starts the ranks, trains, and gathers what they found."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from partopt.documents.engine import PARTOPT, TORCH
from partopt.documents.plan import Plan
from partopt.documents.training_run import MachineLoad
from partopt.errors import PartoptError, invalid, unknown_value
from partopt.profiler.device import describe_device, release_memory
from partopt.profiler.source import ModelSource, find_model
from partopt.runtime.check import check_first
from partopt.runtime.checkpoint import (
    check_folder,
    last_checkpoint,
    removing_partial,
    resume,
    save,
)
from partopt.runtime.context import Context
from partopt.runtime.measured import RankResult, TrainingRun, put_together
from partopt.runtime.processes import choose_backend, is_under_torchrun, ranks_of_host, run_ranks
from partopt.runtime.tensor_memory import TensorMemory, counted_step, held_by
from partopt.runtime.torch_engine import can_say
from partopt.runtime.training import PlannedTraining, RankTraining, losses_of
from partopt.runtime.updates import check_tied, tied_stages
from partopt.schedules import schedule
from partopt.simulator.execution import execute as simulate

CHECK_DEVICES = ("auto", "cpu")
ENGINES = ("auto", TORCH, PARTOPT)
ROUNDS = 8  # of an asynchronous plan in a step, times what is in flight


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How a plan is run.

    A step is an iteration; of an asynchronous plan it is `microbatches` from an empty pipeline to
    an empty one. `engine` is "torch", its pipeline runtime, by default of plans for torch, or
    "partopt", which runs every plan. With `check` a first step is held against one
    process, on the GPU of rank 0 or where `check_device` is "cpu" on the host, and dropped.
    Checkpoints are written into the folder `save` at the end and after
    `every` so many steps; `resume` is a folder of them, whose last is gone on from, under this plan
    or another.
    """

    steps: int = 10
    check: bool = False
    check_device: str = "auto"
    backend: str = "auto"
    engine: str = "auto"
    seed: int = 0
    rate: float = 1e-3
    microbatches: int | None = None
    save: str | None = None
    every: int | None = None
    resume: str | None = None

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise invalid("steps", self.steps, "not possible", "give at least 1")
        if self.check_device not in CHECK_DEVICES:
            value = self.check_device
            raise unknown_value("check_device", value, CHECK_DEVICES, "not possible")
        if self.check_device != "auto" and not self.check:
            what = "nothing is checked"
            raise invalid("check_device", self.check_device, what, "give it beside `check=True`")
        if self.every is not None and (self.save is None or self.every < 1):
            raise invalid("every", self.every, "not possible", "give at least 1, beside `save`")

    @property
    def folder(self) -> Path | None:
        """Where checkpoints go."""
        return None if self.save is None else Path(self.save)


def run_source(
    plan: Plan,
    source: str | os.PathLike[str],
    *,
    arguments: Mapping[str, Any] | None = None,
    **options: Any,
) -> TrainingRun | None:
    """Train by `plan` the model that `source` names, built with these `arguments`.

    `source` is `FILE.py[:ATTR]` or `dotted.module[:ATTR]`; `options` are `RunOptions`. Errors are
    those of `run_plan`, and name the file where they are about it.
    """
    found = find_model(source, arguments)
    try:
        return run_plan(plan, found, RunOptions(**options))
    except PartoptError as error:
        raise found.locate(error) from error.__cause__


def run_plan(plan: Plan, source: ModelSource, options: RunOptions) -> TrainingRun | None:
    """Train the model of `source` by `plan`.

    Here as processes of this machine; under `torchrun` as its ranks, of which all but rank 0 get
    None. Raises PartoptError for a plan that cannot run here, a model that is not the plan's, and
    where a rank fails.
    """
    if options.folder is not None:
        check_folder(options.folder)
    start = None if options.resume is None else last_checkpoint(Path(options.resume))
    name = choose_backend(options.backend, ranks_here(plan.world_size))
    training = prepare(plan, source, options)
    before = os.getloadavg()[0]
    with removing_partial(options.folder):
        results = run_ranks(_Main(training, options, start), plan.world_size, name)
    if not results:  # of a rank that torchrun started, but for the first
        return None
    load = MachineLoad(before=before, after=os.getloadavg()[0], cores=os.cpu_count() or 1)
    return put_together(training, results, load, name)


@dataclass(frozen=True)
class _Main:
    """What every process runs, from the checkpoint `start`; a class, that can be sent to one."""

    training: PlannedTraining
    options: RunOptions
    start: Path | None

    def __call__(self, context: Context) -> list[RankResult]:
        """What all ranks found, in their order, on rank 0; nothing on others."""
        every: list[RankResult] = context.gather(self._train(context))
        return every if context.rank == 0 else []

    def _train(self, context: Context) -> RankResult:
        options, steps = self.options, self.options.steps
        checking = context.device if options.check_device == "auto" else torch.device("cpu")
        outcome = check_first(self.training, context, checking) if options.check else None
        release_memory()  # of the whole model, which the run has no room for
        pipeline = RankTraining(self.training, context)
        if self.start is not None:
            resume(pipeline, self.start)
        cuda, counted = context.device.type == "cuda", counted_step(pipeline, steps)
        if cuda:
            torch.cuda.reset_peak_memory_stats(context.device)
        records, losses, peak = [], [], None
        for step in range(steps):
            began, context.progress.first_step = time.perf_counter(), step
            if step == counted:
                with TensorMemory(held_by(pipeline)) as memory:
                    records.append(pipeline.step())
                peak = memory.peak_bytes
            else:
                records.append(pipeline.step())
            seconds = time.perf_counter() - began
            losses.append(losses_of(context.gather(pipeline.end_step())))
            due = options.every is not None and (step + 1) % options.every == 0
            if options.folder is not None and (due or step + 1 == steps):
                save(pipeline, options.folder)
            context.say(f"step {step + 1} of {steps}: loss {losses[-1]:.6g}, {seconds:.3g} s")
        device = describe_device(context.device).name
        memory_bytes = gpu_memory(context.device) if cuda else (peak,)
        return RankResult(records, losses, memory_bytes, counted, device, outcome)


def gpu_memory(device: torch.device) -> tuple[int, int, int]:
    """Bytes that tensors and the allocator took of a GPU at most, and that are in use there."""
    free, total = torch.cuda.mem_get_info(device)
    peaks = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    return *peaks, total - free


def prepare(plan: Plan, source: ModelSource, options: RunOptions) -> PlannedTraining:
    """The training of a model by a plan, before any process starts.

    Raises PartoptError for a plan that cannot run, an engine that is unknown or cannot run it, and
    a model that is not the plan's or cannot be cut so.
    """
    passing, engine = check_plan(plan, options.microbatches), options.engine
    if engine not in ENGINES:
        raise unknown_value("engine", engine, ENGINES)
    if engine == "auto":
        engine = TORCH if plan.trainer == TORCH and can_say(plan) is None else PARTOPT
    elif engine == TORCH and (reason := can_say(plan)) is not None:
        raise PartoptError(
            f"`engine=torch`: {reason}",
            "`engine=partopt` runs every plan",
            code="torch-cannot-run",
            option="engine",
        )
    for s, stage in enumerate(plan.stages) if source.data is not None else ():
        if passing % stage.replicas:
            raise PartoptError(
                f"stage {s}: {passing} microbatches a step are no multiple of its "
                f"{stage.replicas} replicas, each of which has its own data",
                "plan for a multiple, or leave data(rank, replicas) out",
                code="uneven-data",
            )
    training = PlannedTraining(plan, source, passing, options.seed, options.rate, engine)
    if not is_under_torchrun():
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # processes are forked, which threads do not survive
        try:
            training.record(torch.device("cpu"))
        finally:
            torch.set_num_threads(threads)
    return training


def check_plan(plan: Plan, microbatches: int | None = None) -> int:
    """The microbatches of a step, where the plan can run; PartoptError where it cannot.

    Replicas that share the optimizer of an asynchronous plan send one another weights after every
    round. Where one round would have to be done before another can be, they would wait for ever, as
    in an exchange that blocks.
    """
    shard = plan.shard
    if plan.topology.group is not None:
        raise _cannot_run(
            f"a plan for groups of {plan.topology.group.ranks} ranks: a group is not run yet",
            "plan with a profile of one rank",
        )
    if shard in ("gradients", "parameters"):
        raise _cannot_run(
            f"a plan with `shard={shard}` is simulated and exported, and not run: replicas hold "
            f"whole {shard} here",
            "run one with `shard=optimizer`, or export the plan to a trainer",
        )
    check_tied(plan, list(tied_stages(plan)))
    if plan.microbatches is not None:
        if microbatches not in (None, plan.microbatches):
            hint = f"give those of the plan: {plan.microbatches}"
            raise invalid("microbatches", microbatches, "not possible", hint)
        return plan.microbatches
    passing = microbatches or ROUNDS * plan.noam * plan.stages[0].replicas
    if schedule(plan.schedule).asynchronous and shard != "none":
        try:
            simulate(plan.with_engine(allreduce="blocking"), passing)
        except PartoptError as error:
            raise _cannot_run(
                f"{plan.schedule} of {plan.shape} with `shard={shard}`: replicas of a stage would "
                "wait for each other for ever, to get the weights of a round",
                "plan with `shard=none`, or with `schedule=1f1b`",
            ) from error
    return passing


def _cannot_run(message: str, hint: str) -> PartoptError:
    return PartoptError(message, hint, code="cannot-run")


def ranks_here(ranks: int) -> int:
    """How many of the plan's ranks run on this host; PartoptError for a world of another size."""
    if not is_under_torchrun():
        return ranks
    world = int(os.environ["WORLD_SIZE"])
    if world != ranks:
        raise PartoptError(
            f"the plan has {ranks} ranks, torchrun started {world}",
            f"start {ranks} in all, on all machines together",
            code="other-world-size",
        )
    return ranks_of_host() or world
