"""Layouts: pipelines as trainers have them, read onto a profile. The other way of `exporters`.

A format is a `LayoutFormat` under the name of its exporter, one file each where there is matter,
and a line in the registry here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from partopt.documents.profile import Profile
from partopt.errors import PartoptError
from partopt.exporters import EXPORTERS, parts_of
from partopt.exporters.blocks import describe
from partopt.layouts.trainer_layout import LayoutFormat, Reading, TrainerLayout
from partopt.options import MOST, invalid
from partopt.registry import Registry

LAYOUTS: Registry[LayoutFormat] = Registry(
    "layout",
    LayoutFormat,
    {
        "megatron": "partopt.layouts.megatron:MEGATRON",
        "megatron-bridge": "partopt.layouts.megatron:BRIDGE",
        "torchtitan": "partopt.layouts.torchtitan:FORMAT",
        "deepspeed": "partopt.layouts.deepspeed:FORMAT",
        "colossalai": "partopt.layouts.counts:COLOSSALAI",
        "vllm": "partopt.layouts.counts:VLLM",
        "sglang": "partopt.layouts.counts:SGLANG",
        "torchgpipe": "partopt.layouts.counts:TORCHGPIPE",
        "accelerate": "partopt.layouts.accelerate:FORMAT",
        "torch-csv": "partopt.layouts.torch_csv:FORMAT",
    },
)


def read_layout(
    trainer: str,
    text: str,
    profile: Profile,
    *,
    rules: Sequence[str] = (),
    cuts: Sequence[int] | None = None,
    pipeline_size: int | None = None,
) -> TrainerLayout:
    """The layout of the trainer `trainer`, a name from `LAYOUTS`, on the layers of `profile`.

    `text` is the layout itself, as `Et*4|t*3|t*3|t*2L`, or a program or script that has it, which
    is not executed. `rules` are `GLOB=KIND` and say which layers are embedding, block, norm or
    head, where names do not; `cuts` are those of a text that has an order alone; `pipeline_size` is
    how many devices a pipeline has, where it holds several stages on each.

    Raises PartoptError for an unknown trainer, a text that cannot be read, one for other layers,
    and options that contradict it.
    """
    form = LAYOUTS.lookup(trainer)
    if pipeline_size is not None and not 1 <= pipeline_size <= MOST:
        raise invalid("pipeline_size", pipeline_size, "must be a number of devices", "give 1..")
    layers = [layer.name for layer in profile.layers]
    parts = parts_of(layers, EXPORTERS[form.name], rules)
    reading = _with_cuts(form, form.read(text, layers, parts), cuts)
    assert reading.cuts is not None
    return TrainerLayout(
        trainer=form.name,
        cuts=reading.cuts,
        pipeline_size=_agreed(reading.pipeline_size, pipeline_size),
        schedule=reading.schedule,
        order=reading.order,
        parts=parts,
        described=list(describe(layers, parts)),
        group_ranks=profile.group_ranks,
    )


def _with_cuts(form: LayoutFormat, reading: Reading, cuts: Sequence[int] | None) -> Reading:
    """The reading with its own cuts, or with those that a person gives where it has none."""
    if reading.cuts is not None:
        if cuts is None:
            return reading
        raise PartoptError(
            f"`cuts={list(cuts)}`: a layout of {form.name} itself says where stages begin",
            "leave them out",
            code="conflicting-options",
            option="cuts",
        )
    stages = reading.order.stages if reading.order else 1
    if cuts is None or len(cuts) + 1 != stages:
        raise PartoptError(
            f"the order is of {stages} stages, and does not say where they begin",
            f"give the {stages - 1} first layers of all but the first: `cuts=[5, 9]`",
            code="missing-option" if cuts is None else "wrong-length",
            option="cuts",
            stages=stages,
        )
    return dataclasses.replace(reading, cuts=list(cuts))


def _agreed(said: int | None, given: int | None) -> int | None:
    """The devices of a pipeline as the text and a person say it."""
    if None not in (said, given) and said != given:
        raise PartoptError(
            f"`pipeline_size={given}`: the layout itself says {said}",
            "leave it out",
            code="conflicting-options",
            option="pipeline_size",
        )
    return given if said is None else said
