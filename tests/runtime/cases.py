"""Cases for both engines, run one after the other by four processes of one launch.

`python -m tests.runtime.cases FILE` writes what came of each to FILE.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import pickle
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from msgspec.structs import replace
from torch import Tensor, nn

from partopt.documents.plan import Plan
from partopt.documents.stage import Shard
from partopt.replay.cuts import shared_parameters
from partopt.runtime.actions import RankRecord
from partopt.runtime.context import Context
from partopt.runtime.engine import execute
from partopt.runtime.optimizers import SharedOptimizer
from partopt.runtime.processes import run_local
from partopt.runtime.torch_engine import can_say, execute_on_torch
from partopt.runtime.updates import StageOptimizer, Tied
from partopt.runtime.versions import DoubleBuffered, Versions
from partopt.schedules import SCHEDULES
from partopt.schedules.placement import STRAIGHT
from tests.replay.odd_cuts import CUTS, faults_of
from tests.replay.replayed import Replayed, replay_stage, replayed
from tests.replay.test_replayed_stage import gpt_ids, gpt_loss, small_gpt
from tests.runtime.plans import all_plans, looped, straight
from tests.runtime.sleeping import SleepingStage
from tests.runtime.stages import LinearStage

RANKS, STEPS, SLEEPING_STEPS, TURN_S, M = 4, 2, 3, 0.05, 4
Engine = Callable[..., RankRecord]


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

    @property
    def engines(self) -> list[Engine]:
        """partopt's own, and torch's where that can run the plan."""
        return [execute, *([] if can_say(self.plan) else [execute_on_torch])]


class Ran(NamedTuple):
    """What a rank was left with: weights, losses and forwards by stage, what it ran, its record."""

    weights: dict[int, list[Tensor]]
    losses: dict[int, float]
    forwards: dict[int, int]
    log: list[str]  # of all stages of the rank
    state: dict[int, int]  # numbers that the optimizer of each stage keeps
    record: RankRecord


@functools.cache
def cases() -> list[Case]:
    """Every schedule at 2 and 4 ranks, unequal replicas, and what else an engine must do."""
    found = [
        Case(f"{name} on {ranks}", plan, M, STEPS if M is None else 1)
        for ranks in (2, 4)
        for name, plan, M in all_plans(ranks)
    ]
    for name, entry in SCHEDULES.items():
        several = ([2, 1], [3, 1], [1, 2, 1]) if entry.uneven else ()
        for replicas in (*several, [2, 2]) if entry.shape == STRAIGHT else ():
            M = 17 if entry.asynchronous else 8 if replicas == [2, 2] else 7
            plan = straight(name, replicas, M)
            found += [Case(f"{name} {replicas}", plan, *([M, 1] if entry.asynchronous else []))]
    blocking = straight("pipedream", [1, 2], 0).with_engine(allreduce="blocking")
    pairs, line = straight("1f1b", [2, 2], 8), straight("1f1b", [1, 1, 1, 1], 6)
    return [
        *found,
        Case("fewer microbatches than replicas", straight("gpipe", [3, 1], 2)),
        Case("blocking exchange", blocking, 9, 1),
        Case("serial messages", straight("1f1b", [1, 2, 1], 8).with_engine(waits=("1f1b",))),
        Case("buckets", straight("1f1b", [3, 1], 6).with_engine(bucket_bytes=64)),
        Case("buckets beside W", straight("zb-h1", [2, 2], 8).with_engine(bucket_bytes=64)),
        Case("recompute", recomputing(straight("1f1b", [2, 1], 6))),
        Case("recompute in the backward", recomputing(straight("pipedream", [2, 1], 0)), 9, 1),
        Case("recompute in both", recomputing(pairs)),
        Case("recompute in halves", recomputing(straight("zb-h1", [1, 1, 1], 6))),
        Case("recompute apart", recomputing(straight("gpipe", [1, 1, 1], 5))),
        Case("tied", straight("1f1b", [2, 1, 1], 6), tied=True),
        Case("tied behind", straight("gpipe", [1, 2], 6), tied=True),
        Case("tied [2, 2]", pairs, tied=True),
        Case("tied in a vee", looped("zbv", 2, 2, 4, d=2), tied=True),
        Case("one step", line, steps=1),
        Case("2BW in two steps", straight("pipedream-2bw", [1, 2], 0), 9),
        Case("stale weights in two steps", straight("pipedream", [2, 1], 0), 8),
        Case("stages in no order of ranks", on_ranks(line, [[2], [0], [3], [1]])),
        Case("pipelines that cross", on_ranks(pairs, [[0, 3], [2, 1]])),
        Case("stages side by side alone", straight("gpipe", [4], 8)),
        *sharing(),
    ]


def sharing() -> list[Case]:
    """Replicas of which one steps a weight of 16 numbers, another a bias of 4, and a third none."""
    stale, delayed = (straight(name, [1, 2], 0) for name in ("pipedream", "pipedream-2bw"))
    found = [
        Case("1f1b [2, 1]", straight("1f1b", [2, 1], 7)),
        Case("gpipe [1, 3]", straight("gpipe", [1, 3], 7)),
        Case("zb-h1 [2, 2]", straight("zb-h1", [2, 2], 8)),
        Case("interleaved", looped("interleaved", 2, 2, 4, d=2)),
        Case("fewer microbatches than replicas", straight("gpipe", [3, 1], 2)),
        Case("stale weights", stale, 9),
        Case("2BW", delayed, 9),
        Case("tied", straight("gpipe", [1, 2], 5), tied=True),
        Case("tied [2, 2]", straight("1f1b", [2, 2], 8), tied=True),
    ]
    return [
        each._replace(name=f"{each.name} sharing", plan=with_shares(each.plan, "optimizer"))
        for each in found
    ]


def with_shares(plan: Plan, shard: Shard) -> Plan:
    return plan.with_layout(shard=shard)


def recomputing(plan: Plan) -> Plan:
    return replace(plan, stages=[replace(stage, recompute=True) for stage in plan.stages])


def on_ranks(plan: Plan, ranks: Sequence[list[int]]) -> Plan:
    """The plan with its stages on other ranks."""
    stages = [replace(stage, ranks=own) for stage, own in zip(plan.stages, ranks, strict=True)]
    return replace(plan, stages=stages)


def optimizer_of(s: int, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer of every stage, with a state of its own."""
    return torch.optim.SGD(parameters, lr=0.5, momentum=0.5)


def run_case(case: Case, context: Context, engine: Engine) -> Ran:
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

    def noted(s: int, parameters: Sequence[nn.Parameter]) -> StageOptimizer:
        def make(own: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
            optimizers[s] = optimizer_of(s, own)
            return optimizers[s]

        return SharedOptimizer(parameters, make, sharing[s]) if s in sharing else make(parameters)

    given: dict[str, Any] = {"microbatches": case.microbatches} if case.microbatches else {}
    given |= {"context": context, "steps": case.steps, "optimizer_of": noted, "tied": tied}
    record = engine(case.plan, stages.__getitem__, **given)
    return Ran(
        {s: [each.detach().clone() for each in own.parameters] for s, own in stages.items()},
        {number: loss for own in stages.values() for number, loss in own.losses.items()},
        {s: own.forwards for s, own in stages.items()},
        log,
        {s: state_of(optimizers[s]) if s in optimizers else 0 for s in stages},
        record,
    )


# --- engines that do one thing wrongly --------------------------------------------------------

Wrong = Callable[..., Any]


class Fault(NamedTuple):
    """A case of 13 microbatches, on whose rank 1 `wrong(right, *arguments)` replaces a method."""

    case: Case
    owner: type
    method: str
    wrong: Wrong

    def run(self, context: Context) -> Ran:
        right = getattr(self.owner, self.method)

        def run(*arguments: Any) -> Any:
            return self.wrong(right, *arguments) if context.rank == 1 else right(*arguments)

        with mock.patch.object(self.owner, self.method, run):
            return run_case(self.case, context, execute)


def older(right: Wrong, own: Versions, microbatch: int) -> Any:
    """One microbatch uses the weights before the newest."""
    newest: list[Any] = own.__dict__.setdefault("seen", [])
    newest.append(right(own, microbatch))
    return newest[-2 if microbatch == 8 else -1]


def newer(right: Wrong, own: DoubleBuffered, microbatch: int) -> Any:
    """One microbatch, the last of a batch, uses the newest weights, not those before."""
    return own.newest if microbatch == 8 else right(own, microbatch)


def not_kept(right: Wrong, own: Versions, microbatch: int) -> None:
    """One microbatch is recomputed with other weights than those of its forward."""
    right(own, microbatch)
    if microbatch == 8:
        own._use(own.newest)


def not_stepped(right: Wrong, own: SharedOptimizer) -> None:
    """One replica sends its parameters as they were."""
    own.optimizer = None
    right(own)


def faults() -> dict[str, Fault]:
    line, delayed, pair = (
        straight(name, replicas, 0)
        for name, replicas in (
            ("pipedream", [1, 1, 1]),
            ("pipedream-2bw", [1, 1, 1]),
            ("pipedream", [2, 1]),
        )
    )
    made = {
        "an older version": (line, Versions, "version_of", older),
        "a newer version": (delayed, DoubleBuffered, "version_of", newer),
        "a version that is not kept": (recomputing(line), Versions, "use_for_backward", not_kept),
        "a share that is not stepped": (
            with_shares(pair, "optimizer"),
            SharedOptimizer,
            "step",
            not_stepped,
        ),
    }
    return {name: Fault(Case(name, plan, 13, 1), *rest) for name, (plan, *rest) in made.items()}


def state_of(optimizer: torch.optim.Optimizer) -> int:
    """The numbers that an optimizer keeps."""
    kept = [each for state in optimizer.state.values() for each in state.values()]
    return sum(each.numel() for each in kept if isinstance(each, Tensor))


# --- stages that sleep, and ranks that take turns ---------------------------------------------


def sleeping() -> list[Case]:
    """Plans whose stages sleep and send what the plan says; across the last cuts goes nothing."""
    costs = {"forward": [0.004] * 4, "backward": [0.008] * 4, "cuts": [100_000] * 3}
    wide = {"forward": [0.012, 0.004], "backward": [0.024, 0.008], "cuts": [100_000]}
    empty = {"forward": [0.004] * 3, "backward": [0.008] * 3}
    return [
        Case("1f1b", straight("1f1b", [1, 1, 1, 1], 8, **costs)),
        Case("replicas", straight("1f1b", [3, 1], 9, weights=[40_000, 0], **wide)),
        Case("zbv", looped("zbv", 2, 2, 6, **costs)),
        Case("nothing crosses", straight("1f1b", [1, 1, 1], 6, **empty)),
    ]


def run_sleeping(plan: Plan, context: Context, engine: Engine) -> RankRecord:
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


# --- a GPT, whose first and last stage share the embedding ------------------------------------


def model_plans() -> dict[str, Plan]:
    return {
        "1f1b": straight("1f1b", [1, 1, 1], M),
        "1f1b [2, 2]": straight("1f1b", [2, 2], M),
        "1f1b that recomputes": recomputing(straight("1f1b", [1, 1], M)),
        "zbv": looped("zbv", 2, 2, M),
        "interleaved-zb": looped("interleaved-zb", 2, 2, M),
    }


class Trained(NamedTuple):
    """What a rank was left with: losses, and weights by stage and name."""

    losses: dict[int, Tensor]
    weights: dict[int, dict[str, Tensor]]


@functools.cache
def small_model() -> tuple[Replayed, list[Tensor]]:
    """A GPT, and inputs for all steps."""
    made = replayed(small_gpt, gpt_ids, loss_fn=gpt_loss)
    torch.manual_seed(1)
    return made, [gpt_ids(2) for _ in range(STEPS * M)]


def run_model(plan: Plan, context: Context, engine: Engine) -> Trained:
    (model, inputs), S = small_model(), len(plan.stages)
    starts = [s * len(model.layers) // S for s in range(S + 1)]
    given = gpt_loss, inputs.__getitem__, 1 / M
    stages = {
        s: replay_stage(
            copy.deepcopy(model.model), model.record, *starts[s : s + 2], *given, stage.recompute
        )
        for s, stage in enumerate(plan.stages)
        if context.rank in stage.ranks
    }
    tied = [
        Tied(
            name,
            sorted({rank for s in users for rank in plan.stages[s].ranks}),
            [stages[s].held_parameters[name] for s in users if s in stages],
        )
        for name, users in shared_parameters(model.record, starts[:-1]).items()
    ]
    assert tied
    options: dict[str, Any] = {"steps": STEPS, "optimizer_of": optimizer_of, "tied": tied}
    engine(plan, stages.__getitem__, context=context, **options)
    return Trained(
        {number: loss for own in stages.values() for number, loss in own.losses.items()},
        {
            s: {name: each.detach() for name, each in own.held_parameters.items()}
            for s, own in stages.items()
        },
    )


def trained_alone() -> tuple[list[Tensor], nn.Module]:
    """Losses and the model after the same steps in one process."""
    model, inputs = small_model()
    whole, losses = copy.deepcopy(model.model), []
    optimizer = optimizer_of(0, list(whole.parameters()))
    for number, each in enumerate(inputs):
        loss = gpt_loss(whole(each), each)
        losses.append(loss.detach())
        (loss / M).backward()
        if number % M == M - 1:
            optimizer.step()
            optimizer.zero_grad()
    return losses, whole


class Results(NamedTuple):
    """What a rank was left with, of each engine that can run it."""

    cases: list[list[Ran]]
    faults: dict[str, Ran]  # of partopt's engine, with each
    models: dict[str, list[Trained]]
    sleeping: list[list[RankRecord]]
    cuts: dict[str, list[list[str]]]  # what came otherwise than it was sent, by odd cut
    turns: list[tuple[int, int]]  # where memory is short, and where it is ample


def main(context: Context) -> Results:
    """What came of all cases."""
    both = (execute, execute_on_torch)
    return Results(
        [[run_case(case, context, each) for each in case.engines] for case in cases()],
        {name: fault.run(context) for name, fault in faults().items()},
        {n: [run_model(plan, context, each) for each in both] for n, plan in model_plans().items()},
        [[run_sleeping(one.plan, context, each) for each in one.engines] for one in sleeping()],
        {name: [faults_of(cut, context, each) for each in both] for name, cut in CUTS.items()},
        [run_turn(context, size_bytes) for size_bytes in (1e18, 0.0)],
    )


if __name__ == "__main__":
    from tests.runtime import cases as own  # under the name by which results are unpickled

    Path(sys.argv[1]).write_bytes(pickle.dumps(run_local(RANKS, own.main)))
