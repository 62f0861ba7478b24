"""What each clock counts: processor time of the host, and the time of a device behind a queue."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from partopt.profiler import step
from partopt.profiler.device import CpuClock, CpuStamp, CudaClock
from partopt.profiler.layers import Backward
from partopt.profiler.step import Stepper
from tests.profiler.helpers import FakeClock, tracked


def at(*seconds, thread=1):
    return CpuStamp(*seconds, thread)


def test_the_cpu_clock_counts_what_its_thread_worked():
    clock = CpuClock()
    assert clock.idle_share() is None
    assert clock.intervals_s([at(0, 0, 5), at(1, 0.5, 5.5), at(4, 3, 8)]) == [0.5, 2.5]
    assert clock.idle_share() == 0.25
    clock = CpuClock()  # with more processor than wall time
    clock.intervals_s([at(0, 0, 0), at(1, 0, 2)])
    assert clock.idle_share() == 0


def test_other_threads_that_work_for_more_than_a_tenth_count():
    assert CpuClock().intervals_s([at(0, 0, 0), at(9, 9, 10)]) == [9]
    assert CpuClock().intervals_s([at(0, 0, 0), at(8, 8, 10)]) == [10]
    # stamps of several threads are read on the clock that they share
    assert CpuClock().intervals_s([at(0, 50, 0), at(1, 2, 1, thread=2), at(2, 51, 2)]) == [1, 1]


def test_a_hold_on_cuda_is_a_kernel_that_spins_for_at_most_a_second(monkeypatch):
    spun = []
    monkeypatch.setattr(torch.cuda, "_sleep", spun.append)
    monkeypatch.setattr(CudaClock, "_calibrate", lambda self: 1e9)
    for seconds in (0.0, 0.002, 60.0):
        CudaClock().hold(seconds)
    assert spun == [2_000_000, 1_000_000_000]


class Located(torch.autograd.Function):
    """Writes down which thread runs its backward."""

    threads: list[int]

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        Located.threads.append(threading.get_ident())
        return gradient


def nested(depth, x):
    """A function in `depth` reentrant checkpoints, one in the other."""
    if depth == 0:
        return Located.apply(x)
    return checkpoint(lambda inner: nested(depth - 1, inner), x, use_reentrant=True)


@pytest.mark.parametrize(
    ("forward", "here"),
    [
        (Located.apply, True),
        (lambda x: checkpoint(Located.apply, x, use_reentrant=False), True),
        (lambda x: nested(1, x), True),
        (lambda x: nested(60, x), True),
        (lambda x: nested(61, x), False),
    ],
    ids=["custom function", "checkpoint", "reentrant", "60 deep", "61 deep"],
)
def test_the_backward_runs_on_the_calling_thread(forward, here):
    Located.threads = []
    forward(torch.ones(2, requires_grad=True)).sum().backward()
    assert [thread == threading.get_ident() for thread in Located.threads] == [here]


def test_work_on_another_thread_is_counted():
    def spin():
        end = time.thread_time() + 0.05
        while time.thread_time() < end:
            pass

    clock = CpuClock()
    started = clock.stamp()
    worker = threading.Thread(target=spin)
    worker.start()
    worker.join()
    assert clock.intervals_s([started, clock.stamp()])[0] >= 0.05


class Queue(FakeClock):
    """A device that works through launches in order, and a host that issues them: both are numbers.

    A stamp is the moment at which the device comes to it, as an event on a stream is.
    """

    def __init__(self, holds=True):
        self.host_s, self.device_s, self.holds = 0.0, 0.0, holds

    def launch(self, host_s, device_s):
        self.host_s += host_s
        self.device_s = max(self.device_s, self.host_s) + device_s

    def stamp(self):
        return max(self.device_s, self.host_s)

    def hold(self, seconds):
        if self.holds:
            self.device_s = max(self.device_s, self.host_s) + seconds

    def intervals_s(self, stamps):
        self.host_s = self.device_s = max(self.host_s, self.device_s)
        return super().intervals_s(stamps)


class Kernel(torch.autograd.Function):
    """Launches one kernel in the forward and one in the backward."""

    @staticmethod
    def forward(ctx, x, weight, launch):
        ctx.launch = launch
        launch()
        return x * weight

    @staticmethod
    def backward(ctx, gradient):
        ctx.launch()
        return gradient, gradient.sum(), None


class Launching(nn.Module):
    def __init__(self, launch):
        super().__init__()
        self.weight, self.launch = nn.Parameter(torch.ones(())), launch

    def forward(self, x):
        return Kernel.apply(x, self.weight, self.launch)


def queued(monkeypatch, host_s, device_s, clock):
    """Steps of four layers of a kernel each, on a host that needs long to attach hooks."""
    attach = Backward.call_at_changes

    def slowly(*arguments):
        attach(*arguments)
        clock.host_s += 100.0

    monkeypatch.setattr(Backward, "call_at_changes", slowly)
    monkeypatch.setattr(step.time, "perf_counter", lambda: clock.host_s)
    model = nn.Sequential(*[Launching(lambda: clock.launch(host_s, device_s)) for _ in range(4)])
    return Stepper(model, torch.ones(2), None, tracked(model, torch.ones(2)), clock)


@pytest.mark.parametrize(("host_s", "device_s"), [(1.0, 10.0), (10.0, 1.0), (5.0, 5.0)])
def test_attaching_hooks_leaves_the_queue_as_full_as_it_was(monkeypatch, host_s, device_s):
    steps = queued(monkeypatch, host_s, device_s, Queue())
    steps.instrumented()  # learns how long attaching takes
    assert steps.instrumented().step_s == pytest.approx(steps.bare())


def test_without_a_hold_the_backward_is_charged_for_a_queue_that_ran_dry(monkeypatch):
    steps = queued(monkeypatch, 1.0, 10.0, Queue(holds=False))
    steps.instrumented()
    assert steps.instrumented().backward_s == [10, 10, 10, 11]
    assert steps.instrumented().step_s > steps.bare()
