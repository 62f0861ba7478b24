"""The subject of a measurement: a model, its inputs and its loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import nn

from partopt.profiler.clock import Clock
from partopt.profiler.free_memory import Memory
from partopt.profiler.group import RankGroup
from partopt.profiler.settings import Settings
from partopt.profiler.step import Inputs, Loss


@dataclass(frozen=True)
class Subject:
    """A model with its inputs and its loss, how it is measured, and with which clock.

    `within` is the memory within which to measure a model that is larger than it, `group` the ranks
    that measure it together.
    """

    model: nn.Module
    example_inputs: Callable[[int], Inputs]
    loss_fn: Loss | None
    settings: Settings
    clock: Clock
    within: Memory | None = None
    group: RankGroup = field(default_factory=RankGroup)
