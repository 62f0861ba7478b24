"""Stages that sleep for as long as the plan predicts and send as many bytes: a run of no model.

What such a run takes longer than the simulation is the engine's, the network's or the schedule's.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from partopt.documents.actions import B, F, I, R, W
from partopt.documents.plan import Plan
from partopt.replay.stage import Crossing
from partopt.simulator.runs import work_of

_AWAKE_S = 0.0003  # Linux wakes a process 0.1 to 0.2 ms too late


class SleepingStage:
    """A stage that sleeps; its gradients have the bytes of the plan's and are zeros."""

    def __init__(self, plan: Plan, s: int, scale: float = 1.0) -> None:
        work = work_of(plan)
        own = plan.stages[s]
        self.seconds: list[float] = (work.seconds[:, s] * scale).tolist()  # by kind
        self.receives = _crossings(own.input_bytes, own.gradient_bytes) if s > 0 else []
        last = s == len(plan.stages) - 1
        after = None if last else plan.stages[s + 1]
        self.sends = _crossings(after.input_bytes, after.gradient_bytes) if after else []
        self.output = [torch.zeros(crossing.shape, dtype=crossing.dtype) for crossing in self.sends]
        self.gradients = [
            torch.zeros(crossing.shape, dtype=crossing.dtype)
            for crossing in self.receives
            if crossing.gradient
        ]
        size = own.trained_bytes if own.replicas > 1 else 0
        self.parameters: Sequence[nn.Parameter] = [nn.Parameter(torch.zeros(size // 4))]

    def prepare(self, microbatch: int) -> None:
        """Have nothing ready: there are no inputs."""

    def forward(self, microbatch: int, received: Sequence[Tensor]) -> list[Tensor]:
        """Sleep for a forward."""
        _sleep(self.seconds[F])
        return self.output

    def recompute(self, microbatch: int) -> None:
        """Sleep for a forward once more."""
        _sleep(self.seconds[R])

    def backward(self, microbatch: int, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Sleep for a backward."""
        _sleep(self.seconds[B])
        return self.gradients

    def backward_input(self, microbatch: int, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Sleep for the backward of the inputs."""
        _sleep(self.seconds[I])
        return self.gradients

    def backward_weight(self, microbatch: int) -> None:
        """Sleep for the backward of the weights."""
        _sleep(self.seconds[W])


def _sleep(seconds: float) -> None:
    """Sleep for so long: a system wakes too late, so that the last bit of it is spent awake."""
    end_s = time.perf_counter() + seconds
    if seconds > _AWAKE_S:
        time.sleep(seconds - _AWAKE_S)
    while time.perf_counter() < end_s:
        pass


def _crossings(forward: int, back: int) -> list[Crossing]:
    """Tensors with these bytes: what has a gradient, and what goes forward alone."""
    parts = [(min(forward, back), True), (forward - min(forward, back), False)]
    return [Crossing((size,), torch.uint8, has) for size, has in parts if size]
