"""Transformers: profiles by the names of their layers, and plans of layouts in closed form."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from msgspec import structs

from partopt.documents.engine import Layout
from partopt.documents.plan import Plan
from partopt.documents.profile import Profile
from partopt.documents.topology import Topology
from partopt.documents.transformer import Format, Latent, Transformer
from partopt.importers.hugging_face import load_transformer
from partopt.job import Job
from partopt.search import judging
from partopt.trainers import export_plan
from partopt.trainers.trainer import Text
from tests.helpers import uniform_profile

BLOCKS = 12
_LAST = ("ln_f", "lm_head")


def value_of(text: str) -> Any:
    """What a cell of a table says in Python, or the word that it is."""
    if text.startswith("Latent("):
        return eval(text, {"Latent": Latent})
    with suppress(ValueError, SyntaxError):
        return ast.literal_eval(text)
    return text


def plan_layout(
    trainer: str, model: Transformer, layout: str, form: Format, facts: Mapping[str, object]
) -> Plan:
    """The plan of a layout on two servers of H100, 64 samples of 4,096 tokens an iteration."""
    asked = Job(
        model=model,
        topology=Topology.load("dgx-h100", 2),
        trainer=trainer,
        global_batch=64,
        sequence=4096,
        dtype=form,
        layout=Layout.parse(layout),
        facts=facts,
    )
    return judging.plan_layout(asked)


def model_of(text: str) -> Transformer:
    """A model of `models/`, some of whose fields, or of its numerics, are others."""
    name, *changes = text.split()
    made = load_transformer(name)
    for field, value in (change.split("=") for change in changes):
        own = made if field in made.__struct_fields__ else made.numerics
        changed = structs.replace(own, **{field: value_of(value)})
        made = changed if own is made else structs.replace(made, numerics=changed)
    return made


def exported(
    trainer: str,
    model: str = "llama3-8b",
    layout: str = "tp=2",
    form: Format = "bfloat16",
    to: str | None = None,
    facts: str = "",
) -> Text:
    """What is written of the plan of a layout, for its trainer or for `to`."""
    given = {name: value_of(value) for name, value in (own.split("=") for own in facts.split())}
    return export_plan(plan_layout(trainer, model_of(model), layout, form, given), to or trainer)


def names(blocks: int = BLOCKS, halves: bool = False) -> list[str]:
    """Layers as GPT-2 names them: two of the embedding, the blocks, the norm and the head.

    A block is a layer, or two.
    """
    parts = [".attn", ".mlp"] if halves else [""]
    return ["wte", "wpe", *(f"h.{n}{part}" for n in range(blocks) for part in parts), *_LAST]


def transformer(blocks: int = BLOCKS, halves: bool = False, **fields: Any) -> Profile:
    """A profile of equal layers with these names."""
    layers = names(blocks, halves)
    return uniform_profile(len(layers), names=layers, **fields)
