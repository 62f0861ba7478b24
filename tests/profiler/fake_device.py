"""A GPU that is not there: a queue that works behind the host, in numbers, as torch.cuda shows it.

A module launches a kernel by `launch`, which takes the host `host_s` and the device `device_s`.
A kernel that fails does so when the device comes to it: from then on every call says so.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from partopt.profiler import step

ASSERT = "CUDA error: device-side assert triggered\nSearch for `cudaErrorAssert' ..."


class FakeDevice:
    """`slow` is how much longer kernels take at a moment of the device, as its clock rate rises."""

    def __init__(self, slow=lambda _seconds: 1.0):
        self.host_s = self.device_s = 0.0
        self.slow, self.hertz = slow, 1e9
        self.fails_at = None  # when the kernel that fails is through
        self.spun, self.waits, self.log = [], 0, []

    def launch(self, host_s, device_s, fails=False):
        self.host_s += host_s
        begins_s = max(self.device_s, self.host_s)
        self.device_s = begins_s + device_s * self.slow(begins_s)
        if fails and self.fails_at is None:
            self.fails_at = self.device_s

    def sleep(self, cycles):
        self.spun.append(cycles)
        self.log.append("sleep")
        self.launch(0.0, cycles / self.hertz)

    def synchronize(self, *_):
        self.waits += 1
        self.log.append("wait")
        self.host_s = self.device_s = max(self.host_s, self.device_s)
        self.check()

    def check(self):
        if self.fails_at is not None and self.host_s >= self.fails_at:
            raise torch.AcceleratorError(ASSERT)

    def event(self, **_):
        return Event(self)

    def install(self, monkeypatch):
        """Have torch.cuda, and the host's clock in the profiler, be those of this device."""
        monkeypatch.setattr(torch.cuda, "Event", self.event)
        monkeypatch.setattr(torch.cuda, "synchronize", self.synchronize)
        monkeypatch.setattr(torch.cuda, "_sleep", self.sleep)
        monkeypatch.setattr(step.time, "perf_counter", lambda: self.host_s)
        return self


class Event:
    """An event: the moment at which the device comes to it."""

    def __init__(self, device):
        self.device, self.at_s = device, 0.0

    def record(self):
        self.device.log.append("stamp")
        self.at_s = max(self.device.device_s, self.device.host_s)

    def elapsed_time(self, later):
        self.device.check()
        return (later.at_s - self.at_s) * 1000


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
    """A layer of one kernel: host and device seconds; `fails` in this direction, if in any.

    `after` are the forwards that it lives through before.
    """

    def __init__(self, device, host_s, device_s, fails=None, after=0):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.device, self.host_s, self.device_s = device, host_s, device_s
        self.fails, self.left = fails, after

    def launch(self, direction):
        fails = direction == self.fails and self.left <= 0
        self.left -= direction == self.fails
        self.device.launch(self.host_s, self.device_s, fails)

    def forward(self, x: Tensor) -> Tensor:
        return Kernel.apply(x, self.weight, self.launch)


def layers(device, *seconds, **failing):
    """A model of layers with these host and device seconds; the third one may fail."""
    made = [Launching(device, *each) for each in seconds]
    if failing:
        made[2] = Launching(device, *seconds[2], **failing)
    return nn.Sequential(*made)
