"""The device on paper does what CUDA says of its own: a host that launches goes on."""

import time

import pytest
import torch

from tests.gpu.device import FakeDevice, PaperTime, installed


@pytest.fixture
def device():
    with installed(FakeDevice(PaperTime(), launch_s=1e-5)) as found:
        yield found


def test_work_is_over_long_after_it_was_launched(device):
    began_s = time.perf_counter()
    first, second = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    device.launch(0.3)
    second.record()
    assert time.perf_counter() - began_s == pytest.approx(1e-5)
    assert not second.query()
    torch.cuda.synchronize()
    assert time.perf_counter() - began_s == pytest.approx(0.3, abs=1e-4)
    assert first.elapsed_time(second) == pytest.approx(300, rel=1e-3)


def test_streams_go_on_beside_each_other_unless_one_waits(device):
    side = torch.cuda.Stream()
    device.launch(0.2)
    with torch.cuda.stream(side):
        device.launch(0.1)
    assert side.end_s < torch.cuda.current_stream().end_s
    side.wait_stream(torch.cuda.current_stream())
    device.launch(0.1, side)
    assert side.end_s == pytest.approx(torch.cuda.current_stream().end_s + 0.1)


def test_an_event_is_read_only_once_it_is_over(device):
    first, second = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    device.launch(0.1)
    second.record()
    with pytest.raises(RuntimeError, match="not ready"):
        first.elapsed_time(second)


def test_an_error_is_heard_of_where_the_host_waits_and_memory_ends(device):
    device.fail()
    device.launch(0.1)
    with pytest.raises(torch.AcceleratorError):
        torch.cuda.synchronize()
    device.allocate(device.memory_bytes)
    with pytest.raises(torch.OutOfMemoryError):
        device.allocate(1)
    device.free(device.memory_bytes)
    assert torch.cuda.max_memory_allocated() == device.memory_bytes
