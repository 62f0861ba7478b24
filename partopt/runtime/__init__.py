"""Executes a plan on torch.distributed.

This package and partopt.profiler are the only ones that import torch, and this module does not:
names are imported when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from partopt.replay.replayed_stage import StageModule
    from partopt.runtime.own_loop import Pipeline, stage_module, train_with

_PLACES = {
    "Pipeline": "partopt.runtime.own_loop",
    "StageModule": "partopt.replay.replayed_stage",
    "stage_module": "partopt.runtime.own_loop",
    "train_with": "partopt.runtime.own_loop",
}

__all__ = ["Pipeline", "StageModule", "stage_module", "train_with"]


def __getattr__(name: str) -> Any:
    """Import a public name where it lives."""
    if name not in _PLACES:
        raise AttributeError(f"module 'partopt.runtime' has no attribute {name!r}")
    return getattr(importlib.import_module(_PLACES[name]), name)
