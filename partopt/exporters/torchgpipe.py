"""torchgpipe: `GPipe(model, balance, chunks, checkpoint)` of an `nn.Sequential` of the layers."""

from __future__ import annotations

from collections.abc import Sequence

from partopt.documents.plan import Plan
from partopt.exporters.blocks import Part
from partopt.exporters.target import ANYWHERE, Target, Text, arguments_text


def write(plan: Plan, parts: Sequence[Part], stem: str) -> Text:
    """A file with the arguments of `torchgpipe.GPipe`."""
    arguments = {
        "balance": [len(stage.layers) for stage in plan.stages],
        "chunks": plan.microbatches or 1,
        "checkpoint": "always" if plan.stages[0].recompute else "never",
    }
    return Text(
        arguments_text(plan.profile.name, "torchgpipe.GPipe", arguments),
        notes=["the model has to be an nn.Sequential whose children are the plan's layers"],
    )


TARGET = Target(
    name="torchgpipe",
    summary="torchgpipe: arguments of GPipe, balance, chunks and checkpoint",
    tried="torchgpipe 0.0.7",
    write=write,
    suffix=".py",
    schedules={"gpipe": "GPipe"},
    cuts=ANYWHERE,
    replicas="one",
    recompute="all",
    ranks=("stages",),
    ties=False,
)
