"""Real time, charged to the right layer: the intervals of a step add up whoever is charged, so
known shares are the witness.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from partopt.profiler import measure

FORWARD_S = [0.005, 0.020, 0.010, 0.030]  # and twice that backward
TRUE_SHARES = [seconds / sum(FORWARD_S) for seconds in FORWARD_S]
TOLERANCE = 0.10  # relative


class Spinning(torch.autograd.Function):
    """Keeps the processor busy for a known time, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, forward_s: float) -> Tensor:
        ctx.forward_s = forward_s
        spin(forward_s)
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        spin(2 * ctx.forward_s)
        return gradient, gradient.sum(), None


class Spinner(nn.Module):
    def __init__(self, forward_s: float) -> None:
        super().__init__()
        self.weight, self.forward_s = nn.Parameter(torch.ones(())), forward_s

    def forward(self, x: Tensor) -> Tensor:
        return Spinning.apply(x, self.weight, self.forward_s)


def spin(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def test_each_layer_is_charged_its_share_of_the_forward_and_of_the_backward() -> None:
    """Shares within ten percent of the true ones; a machine at work gets three tries."""
    tries = []
    for _ in range(3):
        model = nn.Sequential(*[Spinner(forward_s) for forward_s in FORWARD_S])
        profile = measure(
            model, lambda size: torch.randn(size, 4), microbatch_sizes=[1], steps=5, device="cpu"
        )
        layers = profile.measurements[0].layers
        found = (
            shares([layer.forward_s for layer in layers]),
            shares([layer.backward_s for layer in layers]),
        )
        if all(each == pytest.approx(TRUE_SHARES, rel=TOLERANCE) for each in found):
            return
        tries.append(found)
    pytest.fail(f"true shares {TRUE_SHARES}, measured {tries}")


def shares(seconds: list[float]) -> list[float]:
    return [each / sum(seconds) for each in seconds]
