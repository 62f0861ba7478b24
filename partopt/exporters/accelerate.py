"""Hugging Face Accelerate's `prepare_pippy`: inference through a pipeline of forwards."""

from __future__ import annotations

from collections.abc import Sequence

from partopt.documents.plan import Plan
from partopt.exporters.blocks import Part
from partopt.exporters.target import ANYWHERE, Target, Text, arguments_text


def write(plan: Plan, parts: Sequence[Part], stem: str) -> Text:
    """A file with the arguments of `prepare_pippy`."""
    arguments = {
        "split_points": [stage.modules[0] for stage in plan.stages[1:]],
        "num_chunks": len(plan.stages),
    }
    return Text(
        arguments_text(plan.profile.name, "accelerate.prepare_pippy", arguments),
        notes=["inference: the plan balances forward and backward passes"],
    )


def _faults(plan: Plan) -> list[str]:
    names = [name for stage in plan.stages for name in stage.modules]
    found = [
        f"{name} runs several times, and a split names a module"
        for name in dict.fromkeys(stage.modules[0] for stage in plan.stages[1:])
        if names.count(name) > 1
    ]
    if len({tuple(stage.ranks) for stage in plan.stages}) < len(plan.stages):
        found.append("devices hold several stages")
    return found


TARGET = Target(
    name="accelerate",
    summary="Accelerate: arguments of prepare_pippy, split points (inference)",
    tried="Accelerate 1.15.0",
    write=write,
    suffix=".py",
    schedules=None,
    cuts=ANYWHERE,
    replicas="one",
    recompute="each",
    shards=("none", "optimizer", "gradients", "parameters"),
    ranks=("stages",),
    faults=_faults,
)
