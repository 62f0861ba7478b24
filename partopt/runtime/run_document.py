"""A run put together from what its ranks found: predicted beside measured."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from partopt.documents.run import Check, MachineLoad, RankSeconds, RanPlan, Run, RunRank
from partopt.runtime.actions import RankRecord
from partopt.runtime.measured import measured_execution, with_measured_times
from partopt.runtime.stage_seconds import stage_seconds
from partopt.runtime.training import Training
from partopt.schedules.order import B, F, I, W
from partopt.simulator.execution import Execution, execute

BUSY = 1.5  # processes that want to run, over cores, above which a machine is busy


@dataclass
class RankResult:
    """What a rank found: its records of the steps, their mean losses, its peak memory.

    On a CPU that was counted in `counted_step`, which took longer by that.
    """

    records: list[RankRecord]
    losses: list[float]
    peak_bytes: int | None
    counted_step: int | None
    device: str
    check: Check | None


@dataclass(frozen=True)
class TrainingRun:
    """A run, and its median step as an execution like a simulated one."""

    document: Run
    measured: Execution


def put_together(
    training: Training, results: Sequence[RankResult], load: MachineLoad, backend: str
) -> TrainingRun:
    """The document of a run, and its median step as an execution."""
    plan, asynchronous = training.plan, training.asynchronous
    passing = training.microbatches if asynchronous else None
    steps = len(results[0].records)
    every = [
        measured_execution(plan, [result.records[step] for result in results], -1, passing)
        for step in range(steps)
    ]
    seconds = [_seconds(one) for one in every]
    counted = results[0].counted_step
    # the first one warms up
    later = [step for step in range(1, steps) if step != counted] or [0]
    stages = stage_seconds(
        plan, [[result.records[step] for result in results] for step in later], passing
    )
    middle = sorted(later, key=lambda step: seconds[step])[(len(later) - 1) // 2]
    measured, predicted = every[middle], execute(plan)
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
            parameter_bytes=plan.profile.parameter_bytes,
            dtype=plan.profile.dtype,
            autocast=plan.profile.autocast,
            sha256=hashlib.sha256(msgspec.json.encode(plan)).hexdigest(),
            schedule=plan.schedule,
            shape=plan.shape,
            microbatch_size=plan.microbatch_size,
            microbatches=training.microbatches,
            topology=plan.topology.name,
            shard=plan.shard,
            tokens_per_sample=plan.profile.tokens_per_sample,
            estimated=plan.profile.estimated,
        ),
        engine=training.engine,
        backend=backend,
        device=results[0].device,
        ranks_per_core=len(results) / load.cores,
        steps=steps,
        steps_s=seconds,
        counted_step=counted,
        losses=results[0].losses,
        predicted_s=_seconds(predicted),
        measured_s=seconds[middle],
        own_times_s=_seconds(again),
        samples_per_s=plan.microbatch_size
        * (1 if asynchronous else training.microbatches)
        / seconds[middle],
        check=results[0].check,
        machine=load,
        stages=stages,
        ranks=ranks,
        remarks=list(_remarks(load, backend, len(results))),
    )
    return TrainingRun(document, measured)


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


def _remarks(load: MachineLoad, backend: str, ranks: int) -> list[str]:
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
    return notes
