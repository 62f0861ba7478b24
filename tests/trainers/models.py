"""Transformers: profiles by the names of their layers, and plans of layouts in closed form."""

from __future__ import annotations

from collections.abc import Mapping

from partopt.documents.engine import Layout
from partopt.documents.plan import Plan
from partopt.documents.profile import Profile
from partopt.documents.topology import Topology
from partopt.documents.transformer import Format, Transformer
from partopt.job import Job
from partopt.search import judging
from tests.helpers import uniform_profile


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


def transformer(blocks: int = 12, halves: bool = False) -> Profile:
    """Two layers of embedding, `blocks` of one or two layers, final norm and head."""
    names = ["wte", "wpe"]
    for n in range(blocks):
        names += [f"h.{n}.attn", f"h.{n}.mlp"] if halves else [f"h.{n}"]
    names += ["ln_f", "lm_head"]
    return uniform_profile(len(names), names=names)
