"""A vision transformer from torchvision, random weights.

pip install '.[examples]'
partopt profile examples/vit.py --microbatch 1,2 -o vit.json

The defaults are the shape of ViT-B/16. `--set layers=40 --set width=1408 --set heads=16
--set ffn=6144 --set patch=14` is that of ViT-g/14 (Zhai et al., Scaling Vision Transformers, 2022).
"""

from __future__ import annotations

from torch import nn
from vision import CLASSES, classification_loss, pictures, torchvision_models

example_inputs = pictures
loss_fn = classification_loss


def build(
    layers: int = 12,
    width: int = 768,
    heads: int = 12,
    ffn: int = 3072,
    patch: int = 16,
    size: int = 224,
    classes: int = CLASSES,
) -> nn.Module:
    """The model for pictures of `size` x `size` pixels, cut into patches of `patch` x `patch`."""
    return torchvision_models(size).VisionTransformer(
        image_size=size,
        patch_size=patch,
        num_layers=layers,
        num_heads=heads,
        hidden_dim=width,
        mlp_dim=ffn,
        num_classes=classes,
    )
