"""Layers of one kernel each way, which take the host and a device on paper so many seconds."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Kernel(torch.autograd.Function):
    """Launches one kernel in the forward and one in the backward."""

    @staticmethod
    def forward(ctx, x, weight, launch):
        ctx.launch = launch
        launch("forward")
        return x * weight

    @staticmethod
    def backward(ctx, gradient):
        ctx.launch("backward")
        return gradient, gradient.sum(), None


class Launching(nn.Module):
    """A layer; it fails in the direction `fails`, if in any, after it did not so often.

    `slow` is how much longer kernels take at a moment of the device, whose clock rate may change.
    """

    def __init__(self, device, host_s, device_s, fails=None, after=0, slow=None):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.device, self.host_s, self.device_s = device, host_s, device_s
        self.fails, self.left, self.slow = fails, after, slow

    def launch(self, direction):
        if direction == self.fails:
            self.left -= 1
            if self.left < 0:
                self.device.fail()
        self.device.host.sleep(self.host_s)
        begins_s = max(self.device.current.end_s, self.device.host.now_s())
        self.device.launch(self.device_s * (self.slow(begins_s) if self.slow else 1.0))

    def forward(self, x: Tensor) -> Tensor:
        return Kernel.apply(x, self.weight, self.launch)


def layers(device, *seconds, slow=None, **failing):
    """A model of layers with these host and device seconds; the third one may fail."""
    made = [Launching(device, *each, slow=slow) for each in seconds]
    if failing:
        made[2] = Launching(device, *seconds[2], **failing)
    return nn.Sequential(*made)
