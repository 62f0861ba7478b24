"""What several examples share: importing torchvision, pictures to feed its models, a loss.

torchvision has no build for a CPU-only torch: its import fails there, because two operators were
never declared. None of these models needs them, so they are declared and the import is tried again.
"""

from __future__ import annotations

import contextlib
import importlib
from types import ModuleType

import torch
from torch import Tensor
from torch.nn import functional

CLASSES = 1000
_MISSING = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_built = {"size": 224}  # pictures follows the model that was built last
_declared: list[torch.library.Library] = []  # a library lives as long as it is referred to


def declare_missing_operators() -> None:
    """Make `import torchvision` work where it is installed with a torch that it was not built
    for.
    """
    try:
        importlib.import_module("torchvision")
    except ModuleNotFoundError:
        return
    except RuntimeError:
        library = torch.library.Library("torchvision", "FRAGMENT")
        for signature in _MISSING:
            with contextlib.suppress(RuntimeError):
                library.define(signature)
        _declared.append(library)


def torchvision_models(size: int) -> ModuleType:
    """`torchvision.models`, for pictures of `size` x `size` pixels."""
    _built.update(size=size)
    declare_missing_operators()
    return importlib.import_module("torchvision.models")


def pictures(batch_size: int) -> Tensor:
    """Random pictures: batch, channel, height, width."""
    return torch.randn(batch_size, 3, _built["size"], _built["size"])


def classification_loss(output: Tensor, inputs: Tensor) -> Tensor:
    """Cross entropy against class 0."""
    return functional.cross_entropy(
        output, torch.zeros(len(output), dtype=torch.long, device=output.device)
    )
