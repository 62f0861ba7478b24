"""A perceptron of equal layers: the simplest chain there is.

partopt profile examples/mlp.py --microbatch 64,128,256 -o mlp.json
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

_built = {"width": 1024}  # example_inputs follows the model that build made last


def build(layers: int = 8, width: int = 1024) -> nn.Module:
    """`layers` linear layers of `width` with a ReLU after each."""
    _built.update(width=width)
    return nn.Sequential(
        *(part for _ in range(layers) for part in (nn.Linear(width, width), nn.ReLU()))
    )


def example_inputs(batch_size: int) -> Tensor:
    """Vectors of the model's width."""
    return torch.randn(batch_size, _built["width"])
