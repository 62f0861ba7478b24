"""VGG-16 from torchvision, random weights: large activations first, large weights last.

pip install '.[examples]'
partopt profile examples/vgg16.py --microbatch 1,2,4 -o vgg16.json
"""

from __future__ import annotations

from torch import nn
from vision import CLASSES, classification_loss, pictures, torchvision_models

example_inputs = pictures
loss_fn = classification_loss


def build(size: int = 224, classes: int = CLASSES) -> nn.Module:
    """The model for pictures of `size` x `size` pixels."""
    return torchvision_models(size).vgg16(weights=None, num_classes=classes)
