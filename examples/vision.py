"""What several examples share: torchvision's models, pictures to feed them, a loss."""

from __future__ import annotations

import importlib
from types import ModuleType

import torch
from torch import Tensor
from torch.nn import functional

CLASSES = 1000
_built = {"size": 224}  # pictures follows the model that was built last


def torchvision_models(size: int) -> ModuleType:
    """`torchvision.models`, for pictures of `size` x `size` pixels."""
    _built.update(size=size)
    return importlib.import_module("torchvision.models")


def pictures(batch_size: int) -> Tensor:
    """Random pictures: batch, channel, height, width."""
    return torch.randn(batch_size, 3, _built["size"], _built["size"])


def classification_loss(output: Tensor, inputs: Tensor) -> Tensor:
    """Cross entropy against class 0."""
    return functional.cross_entropy(
        output, torch.zeros(len(output), dtype=torch.long, device=output.device)
    )
