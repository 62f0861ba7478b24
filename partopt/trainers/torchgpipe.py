"""torchgpipe: `GPipe(model, balance, chunks, checkpoint)` of an `nn.Sequential` of the layers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from partopt.configurations.settings import Settings
from partopt.documents.engine import Engine, Layout
from partopt.documents.plan import Plan
from partopt.trainers.parts import Part
from partopt.trainers.reading import check_stages, read_numbers
from partopt.trainers.sources import Sources
from partopt.trainers.trainer import Asked, Says, Stated, Text, Trainer, arguments_text

_EXAMPLE = "[5, 3, 3, 3]"


def _write(plan: Plan, parts: Sequence[Part], stem: str) -> Text:
    """A file with the arguments of `torchgpipe.GPipe`."""
    arguments = {
        "balance": [len(stage.layers) for stage in plan.stages],
        "chunks": plan.microbatches,
        "checkpoint": "always" if plan.stages[0].recompute else "never",
    }
    return Text(
        arguments_text(plan.profile.name, "torchgpipe.GPipe", arguments),
        notes=["the model has to be an nn.Sequential whose children are the plan's layers"],
    )


def _read(settings: Settings, asked: Asked) -> Stated:
    """`balance` has the layers of every stage."""
    counts = read_numbers(settings, "balance", _EXAMPLE)
    check_stages(counts, "layers", len(asked.layers))
    always = settings.known("checkpoint") == "always"
    cuts = list(itertools.accumulate(counts[:-1]))
    layout = Layout(recompute="always" if always else None, schedule="gpipe")
    return Stated(cuts=cuts, layout=layout, microbatches=settings.number("chunks"))


TORCHGPIPE = Trainer(
    name="torchgpipe",
    summary="torchgpipe: arguments of GPipe, balance, chunks and checkpoint",
    tried="torchgpipe 0.0.7",
    schedules={"gpipe": "GPipe"},
    says=Says(replicas="one", orders=("stages",), ties=False),
    engine=Engine(messages="split", allreduce="blocking", recompute=("none", "stage")),
    sources=Sources("torchgpipe"),
    write=_write,
    suffix=".py",
    read=_read,
    reads="torchgpipe: balance, the layers of each stage",
    example=_EXAMPLE,
)
