"""Cases for torch's runtime and for partopt's own engine, run by four processes of one launch.

`python -m tests.runtime.torch_cases FILE` writes what came of each to FILE.
"""

from __future__ import annotations

import copy
import pickle
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from msgspec.structs import replace
from torch import Tensor, nn

from partopt.documents.plan import Plan
from partopt.runtime.actions import RankRecord
from partopt.runtime.context import Context
from partopt.runtime.cuts import shared_parameters
from partopt.runtime.engine import execute
from partopt.runtime.processes import run_local
from partopt.runtime.replay import ReplayStage
from partopt.runtime.torch_engine import can_say, execute_on_torch
from partopt.runtime.updates import Tied
from tests.runtime.engine_cases import (
    Case,
    Ran,
    cases,
    optimizer_of,
    recomputing,
    run_case,
    run_sleeping,
    sleeping,
    with_shares,
)
from tests.runtime.odd_cuts import CUTS, faults_of
from tests.runtime.plans import looped, straight
from tests.runtime.replayed import Replayed, replay_stage, replayed
from tests.runtime.test_replay import gpt_ids, gpt_loss, small_gpt

RANKS, STEPS, M = 4, 2, 4
ENGINES = (execute, execute_on_torch)


def torch_cases() -> list[Case]:
    """The cases of the engine that torch can run, and those of its own."""
    found = [case for case in cases() if can_say(case.plan) is None]
    names = "gpipe", "1f1b", "1f1b-eager", "naive"
    pairs, line = straight("1f1b", [2, 2], 8), straight("1f1b", [1, 1, 1, 1], 6)
    return [
        *found,
        *(Case(f"{name} [2, 2]", straight(name, [2, 2], 8)) for name in names),
        Case("stages in no order of ranks", on_ranks(line, [[2], [0], [3], [1]])),
        Case("pipelines that cross", on_ranks(pairs, [[0, 3], [2, 1]])),
        Case("tied [2, 2]", pairs, tied=True),
        Case("tied", straight("gpipe", [1, 1, 1], 6), tied=True),
        Case("tied in a vee", looped("zbv", 2, 2, 4, d=2), tied=True),
        Case("tied and shares", with_shares(pairs, "optimizer"), tied=True),
        Case("recompute in the backward", recomputing(pairs)),
        Case("recompute in halves", recomputing(straight("zb-h1", [1, 1, 1], 6))),
        Case("stages side by side alone", straight("gpipe", [4], 8)),
    ]


def on_ranks(plan: Plan, ranks: Sequence[list[int]]) -> Plan:
    """The plan with its stages on other ranks."""
    stages = [replace(stage, ranks=own) for stage, own in zip(plan.stages, ranks, strict=True)]
    return replace(plan, stages=stages)


def model_plans() -> dict[str, Plan]:
    """Plans for a GPT, whose first and last stage share the embedding."""
    return {
        "1f1b": straight("1f1b", [1, 1, 1], M),
        "1f1b [2, 2]": straight("1f1b", [2, 2], M),
        "1f1b that recomputes": recomputing(straight("1f1b", [1, 1], M)),
        "zbv": looped("zbv", 2, 2, M),
        "interleaved-zb": looped("interleaved-zb", 2, 2, M),
    }


def sleeping_plans() -> list[Plan]:
    """Plans whose stages sleep, on torch; across the cuts of the last one goes nothing."""
    equal = [plan for plan in sleeping() if can_say(plan) is None]
    empty = straight("1f1b", [1, 1, 1], 6, forward=[0.004] * 3, backward=[0.008] * 3)
    return [*equal, empty]


class Trained(NamedTuple):
    """What a rank was left with: losses, and weights by stage and name."""

    losses: dict[int, Tensor]
    weights: dict[int, dict[str, Tensor]]


def small_model() -> tuple[Replayed, list[Tensor]]:
    """A GPT, and inputs for all steps."""
    made = replayed(small_gpt, gpt_ids, loss_fn=gpt_loss)
    torch.manual_seed(1)
    return made, [gpt_ids(2) for _ in range(STEPS * M)]


def starts_of(model: Replayed, plan: Plan) -> list[int]:
    """The first layer of each stage, as equal as can be in layers."""
    return [s * len(model.layers) // len(plan.stages) for s in range(len(plan.stages))]


def run_model(plan: Plan, context: Context, engine: Callable[..., RankRecord]) -> Trained:
    model, inputs = small_model()
    record, starts = model.record, starts_of(model, plan)
    stops = [*starts[1:], len(model.layers)]
    stages: dict[int, ReplayStage] = {
        s: replay_stage(
            copy.deepcopy(model.model),
            record,
            starts[s],
            stops[s],
            gpt_loss,
            inputs.__getitem__,
            1 / M,
            stage.recompute,
        )
        for s, stage in enumerate(plan.stages)
        if context.rank in stage.ranks
    }
    tied = [
        Tied(
            name,
            sorted({rank for s in users for rank in plan.stages[s].ranks}),
            [stages[s].own_parameters[name] for s in users if s in stages],
        )
        for name, users in shared_parameters(record, starts).items()
    ]
    assert tied
    engine(
        plan,
        stages.__getitem__,
        context=context,
        steps=STEPS,
        optimizer_of=optimizer_of,
        tied=tied,
    )
    losses = {number: loss for own in stages.values() for number, loss in own.losses.items()}
    return Trained(losses, {s: _weights(own) for s, own in stages.items()})


def _weights(stage: ReplayStage) -> dict[str, Tensor]:
    return {name: each.detach() for name, each in stage.own_parameters.items()}


def trained_alone() -> tuple[list[Tensor], nn.Module]:
    """Losses and the model after the same steps in one process."""
    model, inputs = small_model()
    whole, losses = model.model, []
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
    """What a rank was left with; of each engine where there are several."""

    cases: list[tuple[Ran, ...]]
    models: dict[str, tuple[Trained, ...]]
    sleeping: list[RankRecord]  # on torch
    cuts: dict[str, list[list[str]]]  # what came otherwise than it was sent, by odd cut


def main(context: Context) -> Results:
    """What each engine made of all cases, of the plans for a model, and of odd cuts."""
    ran = [tuple(run_case(case, context, each) for each in ENGINES) for case in torch_cases()]
    models = {
        name: tuple(run_model(plan, context, each) for each in ENGINES)
        for name, plan in model_plans().items()
    }
    cuts = {name: [faults_of(cut, context, each) for each in ENGINES] for name, cut in CUTS.items()}
    slept = [run_sleeping(plan, context, execute_on_torch) for plan in sleeping_plans()]
    return Results(ran, models, slept, cuts)


if __name__ == "__main__":
    from tests.runtime import torch_cases as cases_  # under the name by which they are unpickled

    Path(sys.argv[1]).write_bytes(pickle.dumps(run_local(RANKS, cases_.main)))
