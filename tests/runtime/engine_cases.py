"""Cases for the engine, run one after the other by four processes of one launch.

`python -m tests.runtime.engine_cases FILE` writes what came of each to FILE.
"""

from __future__ import annotations

import dataclasses
import pickle
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from msgspec.structs import replace
from torch import nn

from partopt.documents.plan import Plan
from partopt.documents.stage import Shard
from partopt.runtime.actions import RankRecord
from partopt.runtime.context import Context
from partopt.runtime.engine import execute
from partopt.runtime.optimizers import SharedOptimizer
from partopt.runtime.processes import run_local
from partopt.runtime.updates import Stepper, Tied
from partopt.schedules import SCHEDULES
from partopt.schedules.layout import STRAIGHT
from tests.runtime.plans import all_plans, looped, straight
from tests.runtime.sleeping import SleepingStage
from tests.runtime.stages import LinearStage

RANKS, STEPS, SLEEPING_STEPS, TURN_S = 4, 2, 3, 0.05


class Case(NamedTuple):
    """A plan to run, and how."""

    name: str
    plan: Plan
    microbatches: int | None = None  # of an asynchronous plan
    steps: int = STEPS
    tied: bool = False

    @property
    def M(self) -> int:
        return self.plan.microbatches or self.microbatches or 0


class Ran(NamedTuple):
    """What a rank was left with: weights, losses and forwards by stage, what it ran, its record."""

    weights: dict[int, list[torch.Tensor]]
    losses: dict[int, float]
    forwards: dict[int, int]
    log: list[str]  # of all stages of the rank
    state: dict[int, int]  # numbers that the optimizer of each stage keeps
    record: RankRecord


def cases() -> list[Case]:
    """Every schedule at 2 and 4 ranks, unequal replicas, and what else an engine must do."""
    found = [
        Case(f"{name} on {ranks}", plan, M, STEPS if M is None else 1)
        for ranks in (2, 4)
        for name, plan, M in all_plans(ranks)
    ]
    for name, entry in SCHEDULES.items():
        for replicas in ([2, 1], [1, 2], [3, 1], [1, 2, 1]) if entry.uneven else ([2, 2],):
            M = 17 if entry.asynchronous else 8 if replicas == [2, 2] else 7
            if entry.shape == STRAIGHT:
                plan = straight(name, replicas, M)
                found += [Case(f"{name} {replicas}", plan, *([M, 1] if entry.asynchronous else []))]
    blocking = straight("pipedream", [1, 2], 0).with_engine(allreduce="blocking")
    pipeline = straight("1f1b", [1, 1, 1, 1], 6)
    return [
        *found,
        Case("fewer microbatches than replicas", straight("gpipe", [3, 1], 2)),
        Case("blocking exchange", blocking, 9, 1),
        Case("serial messages", straight("1f1b", [1, 2, 1], 8).with_engine(waits=("1f1b",))),
        Case("buckets", straight("1f1b", [3, 1], 6).with_engine(bucket_bytes=64)),
        Case("buckets beside W", straight("zb-h1", [2, 2], 8).with_engine(bucket_bytes=64)),
        Case("recompute", recomputing(straight("1f1b", [2, 1], 6))),
        Case("recompute in the backward", recomputing(straight("pipedream", [2, 1], 0)), 9, 1),
        Case("recompute apart", recomputing(straight("gpipe", [1, 1, 1], 5))),
        Case("tied", straight("1f1b", [2, 1, 1], 6), tied=True),
        Case("tied behind", straight("gpipe", [1, 2], 6), tied=True),
        Case("one step", pipeline, steps=1),
        Case("2BW in two steps", straight("pipedream-2bw", [1, 2], 0), 9),
        Case("stale weights in two steps", straight("pipedream", [2, 1], 0), 8),
        *sharing(),
    ]


def sharing() -> list[Case]:
    """Replicas of which one steps a weight of 16 numbers, another a bias of 4, and a third none."""
    lying = {
        "1f1b [2, 1]": straight("1f1b", [2, 1], 7),
        "gpipe [1, 3]": straight("gpipe", [1, 3], 7),
        "zb-h1 [2, 2]": straight("zb-h1", [2, 2], 8),
        "interleaved": looped("interleaved", 2, 2, 4, d=2),
        "fewer microbatches than replicas": straight("gpipe", [3, 1], 2),
    }
    stale, delayed = (straight(name, [1, 2], 0) for name in ("pipedream", "pipedream-2bw"))
    found = [
        *(Case(name, plan) for name, plan in lying.items()),
        Case("stale weights", stale, 9),
        Case("2BW", delayed, 9),
        Case("tied", straight("gpipe", [1, 2], 5), tied=True),
    ]
    return [
        each._replace(name=f"{each.name} sharing", plan=with_shares(each.plan, "optimizer"))
        for each in found
    ]


def with_shares(plan: Plan, shard: Shard) -> Plan:
    return replace(plan, shard=shard)


def recomputing(plan: Plan) -> Plan:
    return replace(plan, stages=[replace(stage, recompute=True) for stage in plan.stages])


def optimizer_of(s: int, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer of every stage, with a state of its own."""
    return torch.optim.SGD(parameters, lr=0.5, momentum=0.5)


def run_case(case: Case, context: Context, engine: Callable[..., RankRecord] = execute) -> Ran:
    S, rank = len(case.plan.stages), context.rank
    log: list[str] = []
    stages = {
        s: LinearStage(s, S, case.M, stage.recompute, case.tied, log)
        for s, stage in enumerate(case.plan.stages)
        if rank in stage.ranks
    }
    tied: list[Tied] = []
    if case.tied:
        ranks = sorted({*case.plan.stages[0].ranks, *case.plan.stages[-1].ranks})
        held = [stages[s].layer for s in (0, S - 1) if s in stages]
        tied = [
            Tied(name, ranks, [getattr(layer, name) for layer in held])
            for name in ("weight", "bias")
        ]
    optimizers: dict[int, torch.optim.Optimizer] = {}
    sharing = {  # every rank makes all groups
        s: context.group(stage.ranks, "weights")
        for s, stage in enumerate(case.plan.stages)
        if case.plan.shard == "optimizer" and stage.replicas > 1
    }

    def noted(s: int, parameters: Sequence[nn.Parameter]) -> Stepper:
        def make(own: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
            optimizers[s] = optimizer_of(s, own)
            return optimizers[s]

        if s in sharing:
            return SharedOptimizer(parameters, make, sharing[s])
        return make(parameters)

    record = engine(
        case.plan,
        stages.__getitem__,
        context=context,
        steps=case.steps,
        microbatches=case.microbatches,
        optimizer_of=noted,
        tied=tied,
    )
    return Ran(
        {s: [each.detach().clone() for each in own.parameters] for s, own in stages.items()},
        {number: loss for own in stages.values() for number, loss in own.losses.items()},
        {s: own.forwards for s, own in stages.items()},
        log,
        {s: state_of(optimizers[s]) if s in optimizers else 0 for s in stages},
        record,
    )


def state_of(optimizer: torch.optim.Optimizer) -> int:
    """The numbers that an optimizer keeps."""
    return sum(
        each.numel()
        for state in optimizer.state.values()
        for each in state.values()
        if isinstance(each, torch.Tensor)
    )


def sleeping() -> list[Plan]:
    """Plans whose stages sleep and send what the plan says."""
    costs = {"forward": [0.004] * 4, "backward": [0.008] * 4, "cuts": [100_000] * 3}
    wide = {"forward": [0.012, 0.004], "backward": [0.024, 0.008], "cuts": [100_000]}
    return [
        straight("1f1b", [1, 1, 1, 1], 8, **costs),
        straight("1f1b", [3, 1], 9, weights=[40_000, 0], **wide),
        looped("zbv", 2, 2, 6, **costs),
    ]


def run_sleeping(
    plan: Plan, context: Context, engine: Callable[..., RankRecord] = execute
) -> RankRecord:
    def stage_of(s: int) -> SleepingStage:
        return SleepingStage(plan, s)

    return engine(plan, stage_of, context=context, steps=SLEEPING_STEPS)


def run_turn(context: Context, size_bytes: float) -> tuple[int, int]:
    """When a rank began and ended what takes so much memory; the ranks are of two hosts."""
    placed = dataclasses.replace(context, host=f"host{context.rank % 2}")

    def make() -> tuple[int, int]:
        began_ns = time.perf_counter_ns()
        time.sleep(TURN_S)
        return began_ns, time.perf_counter_ns()

    return placed.in_turns(size_bytes, make)


def main(context: Context) -> tuple[list[Ran], list[RankRecord], list[tuple[int, int]]]:
    """What came of all cases, the records of the sleeping plans, and two times in turns."""
    ran = [run_case(case, context) for case in cases()]
    slept = [run_sleeping(plan, context) for plan in sleeping()]
    return ran, slept, [run_turn(context, size_bytes) for size_bytes in (1e18, 0.0)]


if __name__ == "__main__":
    from tests.runtime import engine_cases  # under the name by which results are unpickled

    Path(sys.argv[1]).write_bytes(pickle.dumps(run_local(RANKS, engine_cases.main)))
