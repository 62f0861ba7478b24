"""Experts over the ranks of a group by hand: each rank has samples of its own, and one expert."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

WIDTH = 32


class Exchange(torch.autograd.Function):
    """Each rank gets a part of the tokens of every rank; the gradients go back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        received = torch.empty_like(x)
        dist.all_to_all_single(received, x)
        return received

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        received = torch.empty_like(gradient)
        dist.all_to_all_single(received, gradient.contiguous())
        return received


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.expert = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return Exchange.apply(self.expert(Exchange.apply(self.first(x))))


def experts() -> nn.Module:
    return Experts()


def example_inputs(microbatch_size: int) -> Tensor:
    return torch.randn(2 * microbatch_size, WIDTH) + dist.get_rank()
