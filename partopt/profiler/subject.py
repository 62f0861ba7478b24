"""The subject of a measurement: a model, its inputs and its loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import nn

from partopt.profiler.clock import Clock
from partopt.profiler.group import RankGroup
from partopt.profiler.settings import Settings
from partopt.profiler.step import Inputs, Loss


@dataclass(frozen=True)
class Subject:
    """A model with its inputs and its loss, how, with which clock and by which ranks measured."""

    model: nn.Module
    example_inputs: Callable[[int], Inputs]
    loss_fn: Loss | None
    settings: Settings
    clock: Clock
    group: RankGroup = field(default_factory=RankGroup)
