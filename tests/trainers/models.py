"""Profiles of transformers, by the names of their layers."""

from __future__ import annotations

from partopt.documents.profile import Profile
from tests.helpers import uniform_profile


def transformer(blocks: int = 12, halves: bool = False) -> Profile:
    """Two layers of embedding, `blocks` of one or two layers, final norm and head."""
    names = ["wte", "wpe"]
    for n in range(blocks):
        names += [f"h.{n}.attn", f"h.{n}.mlp"] if halves else [f"h.{n}"]
    names += ["ln_f", "lm_head"]
    return uniform_profile(len(names), names=names)
