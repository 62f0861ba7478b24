"""Timed steps: the bare one, and the instrumented one, which times each layer.

The gradients stay allocated from step to step and the backward adds to them, as it does for every
microbatch of a batch but the first.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from partopt.profiler.clock import Clock
from partopt.profiler.ownership import hook_layer_changes, next_node_number
from partopt.profiler.step import Inputs, Loss, run_loss
from partopt.profiler.tracker import Tracker


@dataclass
class LayerTimes:
    """Seconds of every layer in one instrumented step.

    Their sum is the step: the intervals leave no gap.
    """

    forward_s: list[float]
    backward_s: list[float]

    @property
    def step_s(self) -> float:
        """Seconds of the whole step."""
        return sum(self.forward_s) + sum(self.backward_s)


@dataclass
class Stepper:
    """Runs steps of one model on one microbatch and times them."""

    model: nn.Module
    inputs: Inputs
    loss_fn: Loss | None
    tracker: Tracker
    clock: Clock

    def bare(self) -> float:
        """Seconds of a step, forward to backward, with nothing attached to the model."""
        with _NoCollection():
            started = self.clock.stamp()
            # named, so that it is freed after the step is timed, as below
            loss = run_loss(self.model, self.inputs, self.loss_fn)
            loss.backward()  # type: ignore[no-untyped-call]
            [step_s] = self.clock.intervals_s([started, self.clock.stamp()])
        self.model.zero_grad(set_to_none=False)
        return step_s

    def instrumented(self) -> LayerTimes:
        """Seconds of each layer in a step.

        Hooks are attached between forward and backward, while no time is counted.
        """
        forward, backward = _Phase(self.clock), _Phase(self.clock)
        began = [(next_node_number(), 0)]

        def entered(layer: int) -> None:
            began.append((next_node_number(), layer))
            forward.enter(layer)

        with _NoCollection():
            with self.tracker.watch(entered):
                forward.enter(0)
                loss = run_loss(self.model, self.inputs, self.loss_fn)
                forward.end()
            hook_layer_changes(loss, began, backward.enter)
            backward.enter(began[-1][1])
            loss.backward()  # type: ignore[no-untyped-call]
            backward.end()
        self.model.zero_grad(set_to_none=False)
        layers = len(self.tracker.layers)
        return LayerTimes(forward.seconds(layers), backward.seconds(layers))


@dataclass
class _Phase:
    """The forward or the backward of one step: a stamp wherever another layer begins."""

    clock: Clock
    entered: list[int] = field(default_factory=list)
    stamps: list[Any] = field(default_factory=list)

    def enter(self, layer: int) -> None:
        self.stamps.append(self.clock.stamp())
        self.entered.append(layer)

    def end(self) -> None:
        self.stamps.append(self.clock.stamp())

    def seconds(self, layers: int) -> list[float]:
        """Seconds of each of the layers in this phase."""
        totals = [0.0] * layers
        for layer, interval_s in zip(
            self.entered, self.clock.intervals_s(self.stamps), strict=True
        ):
            totals[layer] += interval_s
        return totals


class _NoCollection:
    """Keeps Python's garbage collector out of a timed step."""

    def __enter__(self) -> None:
        self.was_enabled = gc.isenabled()
        gc.disable()

    def __exit__(self, *_: object) -> None:
        if self.was_enabled:
            gc.enable()
