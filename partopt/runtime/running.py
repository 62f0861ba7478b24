"""Runs a plan: starts the ranks, lets them train, and puts what they recorded together."""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from partopt.documents.plan import Plan
from partopt.documents.run import Check, MachineLoad, RankSeconds, RanPlan, Run, RunRank
from partopt.errors import PartoptError, did_you_mean
from partopt.profiler.device import describe_device
from partopt.profiler.load import ModelSource
from partopt.runtime.check import check_first
from partopt.runtime.context import Context
from partopt.runtime.launcher import is_under_torchrun, run_here, run_local, stall_limit_s
from partopt.runtime.measured import measured_execution, with_measured_times
from partopt.runtime.rank_record import RankRecord
from partopt.runtime.training import RankTraining, Training, losses_of, record_training
from partopt.schedules import schedule
from partopt.schedules.order import B, F, I, W
from partopt.simulator.execution import Execution
from partopt.simulator.execution import execute as simulate

BACKENDS = ("auto", "gloo", "nccl")
BUSY = 1.5  # processes that want to run, over cores, above which a machine is busy
ROUNDS = 8  # of an asynchronous plan in a step, times what is in flight


@dataclass
class RankResult:
    """What a rank found: its records of the steps, their mean losses, its peak memory."""

    records: list[RankRecord]
    losses: list[float]
    peak_bytes: int | None
    device: str
    check: Check | None


@dataclass(frozen=True)
class Finished:
    """A run, and its median step as an execution like a simulated one."""

    document: Run
    measured: Execution


def run_plan(
    plan: Plan,
    source: ModelSource,
    *,
    steps: int = 10,
    check: bool = False,
    backend: str = "auto",
    seed: int = 0,
    rate: float = 1e-3,
    clip: float | None = None,
    microbatches: int | None = None,
) -> Finished | None:
    """Train the model of `source` by `plan` for so many steps.

    Here as processes of this machine; under `torchrun` as its ranks, of which all but rank 0 get
    None. A step is an iteration; of an asynchronous plan it is `microbatches` from an empty
    pipeline to an empty one. With `check` the first iteration is held against one process first.

    Raises PartoptError for a plan that cannot run here, a model that is not the plan's, and where a
    rank fails.
    """
    passing = check_run(plan, steps, check, microbatches)
    name = choose_backend(backend)
    training = Training(plan, source, passing, seed, rate, clip)
    check_data(training)
    ranks = 1 + max(rank for stage in plan.stages for rank in stage.ranks)
    check_ranks(ranks, name)
    if not is_under_torchrun():
        check_model(training)

    main = _Main(training, steps, check)
    before, limit_s = os.getloadavg()[0], stall_limit_s(plan)
    if is_under_torchrun():
        results = run_here(main, limit_s=limit_s, backend=name)
        if int(os.environ["RANK"]):
            return None
    else:
        threads = max(1, (os.cpu_count() or 1) // ranks)
        results = run_local(ranks, main, limit_s=limit_s, backend=name, threads=threads)[0]
    load = MachineLoad(before=before, after=os.getloadavg()[0], cores=os.cpu_count() or 1)
    return _put_together(training, results, load, name)


def check_run(plan: Plan, steps: int, check: bool, microbatches: int | None) -> int:
    """The microbatches of a step, where the plan can run; PartoptError where it cannot."""
    if steps < 1:
        raise _refused("steps", steps, "at least 1")
    if plan.topology.group is not None:
        raise PartoptError(
            f"a plan for groups of {plan.topology.group.ranks} ranks: a group is not run yet",
            "plan with a profile of one rank",
            code="cannot-run",
        )
    if plan.memory_rules.shard != "none":
        raise PartoptError(
            f"a plan with `shard={plan.memory_rules.shard}`: replicas that hold shares are not run",
            "plan with `shard=none`",
            code="cannot-run",
        )
    if schedule(plan.schedule).asynchronous and any(s.tied_exchange_s for s in plan.stages):
        raise PartoptError(
            f"{plan.schedule}: several stages hold one tied parameter, whose gradients an "
            "asynchronous schedule never has all at once",
            "plan with `tied=together`, or with `schedule=1f1b`",
            code="cannot-run",
        )
    if not schedule(plan.schedule).asynchronous:
        assert plan.microbatches is not None
        if microbatches is not None and microbatches != plan.microbatches:
            raise _refused("microbatches", microbatches, f"those of the plan: {plan.microbatches}")
        return plan.microbatches
    if check:
        raise PartoptError(
            f"check: {plan.schedule} is asynchronous: its weights are not those of one process",
            "check the model under a schedule with a flush: `schedule=1f1b`",
            code="conflicting-options",
        )
    return microbatches or ROUNDS * plan.noam * plan.stages[0].replicas


def check_data(training: Training) -> None:
    """Refuse data of replicas that do not get the same number of microbatches each."""
    if training.source.data is not None:
        for s, stage in enumerate(training.plan.stages):
            if training.microbatches % stage.replicas:
                raise PartoptError(
                    f"stage {s}: {training.microbatches} microbatches a step are no multiple of "
                    f"its {stage.replicas} replicas, each of which has its own data",
                    "plan for a multiple, or leave data(rank, replicas) out",
                    code="uneven-data",
                )


def choose_backend(name: str) -> str:
    """The backend of torch.distributed: nccl where there are GPUs.

    Raises PartoptError for one that is unknown or not there.
    """
    if name not in BACKENDS:
        raise PartoptError(
            f"`backend={name}`: unknown backend",
            did_you_mean(name, BACKENDS),
            code="invalid-option",
            option="backend",
        )
    if name == "nccl" and not (torch.cuda.is_available() and dist.is_nccl_available()):
        raise PartoptError(
            "`backend=nccl`: this machine has no GPU that torch sees, or torch no NCCL",
            "`backend=gloo` runs on processors",
            code="no-such-device",
            option="backend",
        )
    if name == "auto":
        return "nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
    return name


def check_ranks(ranks: int, backend: str) -> None:
    """Refuse a world of another size, and more ranks than GPUs."""
    if is_under_torchrun():
        world = int(os.environ["WORLD_SIZE"])
        if world != ranks:
            raise PartoptError(
                f"the plan has {ranks} ranks, torchrun started {world}",
                f"torchrun --nproc-per-node {ranks}, or as many on all machines together",
                code="other-world-size",
            )
    elif backend == "nccl" and torch.cuda.device_count() < ranks:
        raise PartoptError(
            f"the plan has {ranks} ranks, this machine {torch.cuda.device_count()} GPUs",
            "start it by torchrun on several machines, or `backend=gloo` runs on processors",
            code="too-few-devices",
        )


def check_model(training: Training) -> None:
    """Refuse a model that is not the plan's, or cannot be cut so, before any process starts."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # processes are forked, which threads do not survive
    try:
        record_training(training, torch.device("cpu"))
    finally:
        torch.set_num_threads(threads)


def _refused(option: str, value: object, allowed: str) -> PartoptError:
    return PartoptError(
        f"`{option}={value}`: not possible", f"give {allowed}", code="invalid-option", option=option
    )


@dataclass(frozen=True)
class _Main:
    """What every process runs; a class, so that it can be sent to one."""

    training: Training
    steps: int
    check: bool

    def __call__(self, context: Context) -> list[RankResult]:
        """What all ranks found, in their order."""
        return context.gather(_train(self.training, context, self.steps, self.check))


def _train(training: Training, context: Context, steps: int, check: bool) -> RankResult:
    """What one rank does, and finds."""
    own = RankTraining(training, context)
    outcome = check_first(own) if check else None
    if check:
        own = RankTraining(training, context)
    cuda = context.device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats(context.device)
    records, losses = [], []
    for step in range(steps):
        began = time.perf_counter()
        records.append(own.step())
        seconds = time.perf_counter() - began
        losses.append(losses_of(context.gather(own.end_step())))
        if context.rank == 0 and sys.stderr.isatty():
            print(
                f"step {step + 1} of {steps}: loss {losses[-1]:.6g}, {seconds:.3g} s",
                file=sys.stderr,
            )
    peak = torch.cuda.max_memory_allocated(context.device) if cuda else None
    return RankResult(records, losses, peak, describe_device(context.device).name, outcome)


def _put_together(
    training: Training, results: Sequence[RankResult], load: MachineLoad, backend: str
) -> Finished:
    plan, asynchronous = training.plan, training.asynchronous
    passing = training.microbatches if asynchronous else None
    steps = len(results[0].records)
    every = [
        measured_execution(plan, [result.records[step] for result in results], -1, passing)
        for step in range(steps)
    ]
    seconds = [_seconds(one) for one in every]
    later = range(1, steps) if steps > 1 else range(steps)  # the first one warms up
    middle = sorted(later, key=lambda step: seconds[step])[(len(later) - 1) // 2]
    measured, predicted = every[middle], simulate(plan)
    again = with_measured_times(measured)
    ranks = [
        RunRank(
            rank=rank,
            stages=held,
            predicted=_rank_seconds(predicted, rank, int(predicted.peak_memory_bytes[rank])),
            measured=_rank_seconds(measured, rank, results[rank].peak_bytes),
        )
        for rank, held in sorted(plan.stages_by_rank().items())
    ]
    document = Run(
        plan=RanPlan(
            model=plan.profile.name,
            sha256=hashlib.sha256(msgspec.json.encode(plan)).hexdigest(),
            schedule=plan.schedule,
            shape=plan.shape,
            microbatch_size=plan.microbatch_size,
            microbatches=training.microbatches,
            topology=plan.topology.name,
            estimated=plan.profile.estimated,
        ),
        engine="partopt",
        backend=backend,
        device=results[0].device,
        ranks_per_core=len(results) / load.cores,
        steps=steps,
        steps_s=seconds,
        losses=results[0].losses,
        predicted_s=_seconds(predicted),
        measured_s=seconds[middle],
        own_times_s=_seconds(again),
        samples_per_s=plan.microbatch_size
        * (1 if asynchronous else training.microbatches)
        / seconds[middle],
        check=results[0].check,
        machine=load,
        ranks=ranks,
        notes=list(_notes(plan, load, backend, len(results))),
    )
    return Finished(document, measured)


def _seconds(execution: Execution) -> float:
    """Of an iteration, or asynchronous of a microbatch in steady state."""
    return execution.makespan_s if execution.steady is None else execution.period_s


def _rank_seconds(execution: Execution, rank: int, peak_bytes: int | None) -> RankSeconds:
    timeline, order, shares = execution.timeline, execution.order, execution.shares
    own = slice(order.rows[rank], order.rows[rank + 1])
    taken, kind = (timeline.end - timeline.start)[own], order.kind[own]
    forwards = int((kind == F).sum())
    backward = float(taken[np.isin(kind, (B, I, W))].sum())
    return RankSeconds(
        forward_s=float(taken[kind == F].sum()) / max(1, forwards),
        backward_s=backward / max(1, forwards),
        transfer_s=float(shares.transfer_s[rank]),
        allreduce_s=float(shares.allreduce_s[rank]),
        idle_s=float(shares.idle_s[rank]),
        peak_memory_bytes=peak_bytes,
    )


def _notes(plan: Plan, load: MachineLoad, backend: str, ranks: int) -> list[str]:
    notes = []
    if load.before > BUSY * load.cores:
        notes.append(
            f"the machine was busy: {load.before:.1f} processes wanted to run on {load.cores} "
            "cores before the run; what was measured is not what a quiet machine takes"
        )
    if backend == "gloo" and ranks > load.cores:
        notes.append(
            f"{ranks} ranks shared {load.cores} cores: they computed in turns, and what was "
            "predicted for a device each cannot be judged by it"
        )
    if plan.profile.estimated is not None:
        notes.append(f"the plan rests on times estimated for {plan.profile.estimated}")
    return notes
