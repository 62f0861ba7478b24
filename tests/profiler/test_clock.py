"""What each clock counts: processor time of the host, and the time of a device behind a queue."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from partopt.profiler.device import CpuClock, CpuStamp, CudaClock
from partopt.profiler.layers import Backward
from partopt.profiler.step import Stepper
from tests.forked import run_forked
from tests.gpu.device import CYCLES_PER_S, FakeDevice, PaperTime, installed
from tests.gpu.layers import layers
from tests.helpers import ROOT
from tests.profiler.helpers import tracked


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


@pytest.fixture
def device():
    with installed(FakeDevice(PaperTime())) as found:
        yield found


def test_a_hold_on_cuda_is_a_kernel_that_spins_for_at_most_a_second(device, monkeypatch):
    clock, spun = CudaClock(), []
    clock.hold(0.002)  # before it is calibrated nothing spins, and nothing waits
    assert device.log == []
    clock.calibrate()
    monkeypatch.setattr(torch.cuda, "_sleep", spun.append)
    for seconds in (0.0, 0.002, 60.0):
        clock.hold(seconds)
    assert spun == [pytest.approx(each * CYCLES_PER_S, rel=1e-6) for each in (0.002, 1.0)]


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


def runs_here(forward):
    """Whether the backward of a function runs on the thread that calls it."""
    Located.threads = []
    forward(torch.ones(2, requires_grad=True)).sum().backward()
    [thread] = Located.threads
    return thread == threading.get_ident()


@pytest.mark.slow
@pytest.mark.parametrize(
    "forward",
    [
        Located.apply,
        lambda x: checkpoint(Located.apply, x, use_reentrant=False),
        lambda x: nested(1, x),
        lambda x: nested(60, x),
    ],
    ids=["custom function", "checkpoint", "reentrant", "60 deep"],
)
def test_the_backward_runs_on_the_calling_thread(forward):
    assert runs_here(forward)


@pytest.mark.slow
def test_a_backward_in_too_many_others_runs_on_a_thread_of_its_own(tmp_path):
    """In another process: where torch began such a thread no later fork can train."""
    script = tmp_path / "deep.py"
    script.write_text(
        "from tests.profiler.test_clock import nested, runs_here\n"
        "assert not runs_here(lambda x: nested(61, x))\n"
    )
    done = run_forked(str(script), cwd=ROOT)
    assert done.returncode == 0, done.stderr


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


def queued(device, monkeypatch, host_s, device_s, calibrated=True):
    """Steps of four layers of a kernel each, on a host that needs long to attach hooks."""
    clock, attach = CudaClock(), Backward.call_at_changes

    def slowly(*arguments):
        attach(*arguments)
        device.host.sleep(0.5)

    monkeypatch.setattr(Backward, "call_at_changes", slowly)
    model = layers(device, *[(host_s, device_s)] * 4)
    if calibrated:
        clock.calibrate()
    return Stepper(model, torch.ones(2), None, tracked(model, torch.ones(2)), clock)


@pytest.mark.parametrize(("host_s", "device_s"), [(0.01, 0.1), (0.1, 0.01), (0.05, 0.05)])
def test_attaching_hooks_leaves_the_queue_as_full_as_it_was(device, monkeypatch, host_s, device_s):
    steps = queued(device, monkeypatch, host_s, device_s)
    for _ in range(2):
        steps.bare()
    steps.time_layers()  # learns how long attaching takes
    assert steps.time_layers().step_s == pytest.approx(steps.bare())


def test_without_a_hold_the_backward_is_charged_for_a_queue_that_ran_dry(device, monkeypatch):
    steps = queued(device, monkeypatch, 0.01, 0.1, calibrated=False)
    steps.time_layers()
    assert steps.time_layers().backward_s == pytest.approx([0.1, 0.1, 0.1, 0.11])
    assert steps.time_layers().step_s > steps.bare()
