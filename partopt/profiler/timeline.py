"""Timed steps: the bare one, and the instrumented one, which times each layer.

The gradients stay allocated from step to step and the backward adds to them, as it does for every
microbatch of a batch but the first. They are zeroed just before the first stamp, so that both kinds
of step begin behind the same work in a device's queue.
"""

from __future__ import annotations

import gc
import itertools
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from partopt.profiler.clock import Clock
from partopt.profiler.ownership import hook_input_gradients, hook_layer_changes, next_node_number
from partopt.profiler.step import Inputs, Loss, run_loss, zero_gradients
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
    """Runs steps of one model on one microbatch and times them.

    `uneven` are the layers whose forwards made more nodes of the graph in one step than in another.
    """

    model: nn.Module
    inputs: Inputs
    loss_fn: Loss | None
    tracker: Tracker
    clock: Clock
    last_bare_s: float = 0.0
    uneven: set[int] = field(default_factory=set)
    _nodes: Counter[int] | None = None  # of each layer, in the first step
    _attaching_s: float = 0.0  # host seconds that the last step's hooks took to attach

    def bare(self) -> float:
        """Seconds of a step, forward to backward, with nothing attached to the model."""
        with _NoCollection():
            zero_gradients(self.model)
            started = self.clock.stamp()
            # named, so that it is freed after the step is timed, as below
            loss = run_loss(self.model, self.inputs, self.loss_fn)
            loss.backward()  # type: ignore[no-untyped-call]
            [self.last_bare_s] = self.clock.intervals_s([started, self.clock.stamp()])
        return self.last_bare_s

    def instrumented(self) -> LayerTimes:
        """Seconds of each layer in a step.

        Hooks are attached between forward and backward, while no time is counted. A device with a
        queue is held up there for as long as attaching took the last time: otherwise it would run
        dry, and the first kernels of the backward would be charged for their launches, which in a
        bare step are hidden behind the forward.
        """
        backward = _Phase(self.clock)
        with _NoCollection():
            forward, began, loss = self._forward()
            self.clock.hold(self._attaching_s)
            attaching = time.perf_counter()
            hook_layer_changes(loss, began, backward.enter)
            self._attaching_s = time.perf_counter() - attaching
            backward.enter(began[-1][1])
            loss.backward()  # type: ignore[no-untyped-call]
            backward.end()
        layers = len(self.tracker.layers)
        return LayerTimes(forward.seconds(layers), backward.seconds(layers))

    def input_gradients(self) -> list[float]:
        """Seconds of each layer in a backward that computes no gradients of weights.

        A layer whose input needs no gradient takes none. Raises what autograd does where part of
        the model refuses such a backward, as reentrant checkpoints do.
        """
        backward = _Phase(self.clock)
        with _NoCollection():
            _, began, loss = self._forward()
            self.clock.hold(self._attaching_s)
            edges = hook_input_gradients(loss, began, backward.enter)
            gradients = torch.autograd.grad(loss, edges, allow_unused=True) if edges else ()
            backward.end()
            del gradients  # freed after the backward is timed
        return backward.seconds(len(self.tracker.layers))

    def _forward(self) -> tuple[_Phase, list[tuple[int, int]], Tensor]:
        """A forward with a stamp at each layer, the node numbers at which they began, the loss."""
        forward = _Phase(self.clock)
        began = [(next_node_number(), 0)]

        def entered(layer: int) -> None:
            began.append((next_node_number(), layer))
            forward.enter(layer)

        with self.tracker.watch(entered):
            zero_gradients(self.model)
            forward.enter(0)
            loss = run_loss(self.model, self.inputs, self.loss_fn)
            forward.end()
        self._compare_nodes([*began, (next_node_number(), -1)])
        return forward, began, loss

    def _compare_nodes(self, began: list[tuple[int, int]]) -> None:
        """Find the layers that made other nodes than in the first step: they run at random."""
        nodes: Counter[int] = Counter()
        for (first, layer), (after, _) in itertools.pairwise(began):
            nodes[layer] += after - first
        self._nodes = self._nodes or nodes
        self.uneven |= {layer for layer in nodes if nodes[layer] != self._nodes[layer]}


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
