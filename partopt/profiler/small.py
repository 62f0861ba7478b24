"""A small classifier: what `partopt doctor` profiles and trains."""

from __future__ import annotations

import torch
from torch import Tensor, nn

WIDTH, CLASSES = 256, 10


def build(layers: int = 8) -> nn.Module:
    """Blocks of a product and its activation, and a head."""
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(layers)]
    return nn.Sequential(*blocks, nn.Linear(WIDTH, CLASSES))


def example_inputs(batch_size: int) -> tuple[Tensor, Tensor]:
    """Random samples and labels."""
    return torch.randn(batch_size, WIDTH), torch.randint(CLASSES, (batch_size,))


def loss_fn(output: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy."""
    return nn.functional.cross_entropy(output, labels)
