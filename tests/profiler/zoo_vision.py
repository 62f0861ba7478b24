"""Models of pictures, shrunken: those of torchvision, and two UNets."""

from __future__ import annotations

import importlib
import math
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from partopt.profiler.source import with_torchvision


def torchvision_model(name: str, **options: Any) -> nn.Module:
    """What torchvision calls `name`, with random weights and ten classes."""
    return getattr(torchvision_models(), name)(num_classes=10, **options)


def torchvision_models() -> ModuleType:
    return with_torchvision(lambda: importlib.import_module("torchvision.models"))


def swin() -> nn.Module:
    sizes = {"patch_size": [2, 2], "depths": [2, 2], "num_heads": [2, 4], "window_size": [4, 4]}
    return torchvision_model("SwinTransformer", embed_dim=16, stochastic_depth_prob=0.0, **sizes)


def convnext() -> nn.Module:
    block = torchvision_models().convnext.CNBlockConfig
    blocks = [block(16, 32, 2), block(32, 48, 2), block(48, None, 2)]
    return torchvision_model("ConvNeXt", block_setting=blocks, stochastic_depth_prob=0.0)


def resnet() -> nn.Module:
    block = torchvision_models().resnet.Bottleneck
    return torchvision_model("ResNet", block=block, layers=[1, 2, 1, 1])


def densenet() -> nn.Module:
    sizes = {"growth_rate": 32, "block_config": (3, 4, 3), "num_init_features": 16}
    return torchvision_model("DenseNet", **sizes)


class Convolutions(nn.Module):
    """Two convolutions, each normalised and rectified."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.norm = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.norm(self.second(functional.relu(self.first(x)))))


class UNet(nn.Module):
    """Each level down is joined again on the way up."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.down1, self.down2 = Convolutions(3, width), Convolutions(width, 2 * width)
        self.bottom = Convolutions(2 * width, 4 * width)
        self.rise2 = nn.ConvTranspose2d(4 * width, 2 * width, 2, stride=2)
        self.up2 = Convolutions(4 * width, 2 * width)
        self.rise1 = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.up1 = Convolutions(2 * width, width)
        self.head = nn.Conv2d(width, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = self.down1(x)
        second = self.down2(functional.max_pool2d(first, 2))
        bottom = self.bottom(functional.max_pool2d(second, 2))
        second = self.up2(torch.cat([self.rise2(bottom), second], 1))
        return self.head(self.up1(torch.cat([self.rise1(second), first], 1)))


class TimedBlock(nn.Module):
    """A residual block that adds the embedded timestep to its channels."""

    def __init__(self, inputs: int, outputs: int, times: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(4, inputs), nn.Conv2d(inputs, outputs, 3, padding=1)
        self.time = nn.Linear(times, outputs)
        self.norm2, self.conv2 = nn.GroupNorm(4, outputs), nn.Conv2d(outputs, outputs, 3, padding=1)
        self.skip = nn.Conv2d(inputs, outputs, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        inner = self.conv1(functional.silu(self.norm1(x))) + self.time(time)[:, :, None, None]
        return self.skip(x) + self.conv2(functional.silu(self.norm2(inner)))


class DiffusionUNet(nn.Module):
    """Predicts the noise of a picture at a timestep; returns a dict."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.width = width
        self.embed = nn.Sequential(nn.Linear(width, 32), nn.SiLU(), nn.Linear(32, 32))
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList([TimedBlock(width, width, 32), TimedBlock(width, 2 * width, 32)])
        self.middle = TimedBlock(2 * width, 2 * width, 32)
        self.up = nn.ModuleList(
            [TimedBlock(4 * width, width, 32), TimedBlock(2 * width, width, 32)]
        )
        self.out = nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, noisy: Tensor, timestep: Tensor) -> dict[str, Tensor]:
        rates = torch.exp(-math.log(10000) * torch.arange(self.width // 2) / self.width)
        angles = timestep[:, None] * rates.to(noisy)
        time = self.embed(torch.cat([angles.sin(), angles.cos()], 1))
        x, kept = self.stem(noisy), []
        for block in self.down:
            x = block(x, time)
            kept.append(x)
            x = functional.avg_pool2d(x, 2)
        x = self.middle(x, time)
        for block in self.up:
            x = functional.interpolate(x, scale_factor=2.0)
            x = block(torch.cat([x, kept.pop()], 1), time)
        return {"noise": self.out(x)}


def vision_transformer() -> nn.Module:
    sizes = {"image_size": 32, "patch_size": 8, "num_layers": 3, "num_heads": 2, "hidden_dim": 32}
    return torchvision_model("VisionTransformer", mlp_dim=64, **sizes)
