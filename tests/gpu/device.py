"""A device on paper, in the place of `torch.cuda`: streams, events, memory, errors that come late.

Tensors stay on the CPU and have their values at once; only the device's time is made up. The host
goes on where it launches work: a stream knows when its last work ends, an event when the work
before it does, and who synchronizes sleeps until then. So a test needs no GPU, and sees what a host
that measures itself would show of one.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

CYCLES_PER_S = 1e9  # of `torch.cuda._sleep`
FRAGMENTS_BYTES = 2**20  # of the allocator, beside the largest sum of tensors


class HostTime:
    """The time of the host: that of the system."""

    def now_s(self) -> float:
        return time.perf_counter()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


class PaperTime(HostTime):
    """A host whose time passes only where it is told to: tests are exact, and take no time."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def now_s(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds

    def patches(self) -> Iterator[Any]:
        """What puts this time in the place of the system's."""
        yield mock.patch("time.perf_counter", self.now_s)
        yield mock.patch("time.perf_counter_ns", lambda: round(self.seconds * 1e9))
        yield mock.patch("time.sleep", self.sleep)


class FakeDevice:
    """A device: its streams, its memory, and the error that it has met.

    `launch_s` is what a launch takes of the host. `log` has what the program asked of the device,
    in order: "launch", "event", "wait", "synchronize", "query".
    """

    def __init__(
        self,
        host: HostTime | None = None,
        launch_s: float = 0.0,
        memory_bytes: int = 80 * 10**9,
        name: str = "Paper GPU",
        devices: int = 1,
        capability: int = 9,
    ) -> None:
        self.host = HostTime() if host is None else host
        self.launch_s, self.memory_bytes, self.name, self.devices = (
            launch_s,
            memory_bytes,
            name,
            devices,
        )
        self.capability = capability  # of CUDA, without what is behind its point
        self.streams: list[Stream] = []
        self.default = Stream(self)
        self.current = self.default
        self.allocated_bytes = self.peak_bytes = 0
        self.others_bytes = 0  # of the context, of communicators
        self.error: Exception | None = None
        self.log: list[str] = []
        self.number = 0  # of the device that is set

    def launch(self, seconds: float, stream: Stream | None = None) -> None:
        """Let a stream, by default the current one, work for so long; the host goes on."""
        self.log.append("launch")
        self.host.sleep(self.launch_s)
        (stream or self.current).append(seconds)

    def allocate(self, size_bytes: int) -> None:
        """Take memory. Raises torch.OutOfMemoryError where there is not so much."""
        if self.allocated_bytes + size_bytes > self.memory_bytes:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate more than is free.")
        self.allocated_bytes += size_bytes
        self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)

    def free(self, size_bytes: int) -> None:
        """Give memory back."""
        self.allocated_bytes -= size_bytes

    def fail(self, error: Exception | None = None) -> None:
        """Meet an error that the host hears of where it next waits for the device, and ever on."""
        text = "CUDA error: device-side assert triggered"
        self.error = error or torch.AcceleratorError(text)

    def meet(self, end_s: float) -> None:
        """Let the host wait until a time of the device."""
        if self.error is not None:
            raise self.error
        if (left_s := end_s - self.host.now_s()) > 0:
            self.host.sleep(left_s)

    def synchronize(self, *_: Any) -> None:
        """Let the host wait for all streams."""
        self.log.append("synchronize")
        self.meet(max(stream.end_s for stream in self.streams))


class Stream:
    """A stream: work in its order, which ends at `end_s`."""

    def __init__(self, device: FakeDevice) -> None:
        self.device, self.end_s = device, 0.0
        device.streams.append(self)

    def append(self, seconds: float) -> None:
        """Work for so long, once all before it is done."""
        self.end_s = max(self.end_s, self.device.host.now_s()) + seconds

    def wait_until(self, end_s: float) -> None:
        """Let what comes next begin no earlier."""
        self.end_s = max(self.end_s, end_s)

    def wait_event(self, event: Event) -> None:
        self.device.log.append("wait")
        self.wait_until(event.end_s)

    def wait_stream(self, stream: Stream) -> None:
        self.device.log.append("wait")
        self.wait_until(stream.end_s)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event(self.device)
        event.record(self)
        return event

    def query(self) -> bool:
        return self.device.host.now_s() >= self.end_s

    def synchronize(self) -> None:
        self.device.log.append("synchronize")
        self.device.meet(self.end_s)


class Event:
    """An event: the time at which the work before it, in the stream that records it, is done."""

    def __init__(self, device: FakeDevice, enable_timing: bool = False, **_: Any) -> None:
        self.device, self.timing, self.end_s = device, enable_timing, 0.0

    def record(self, stream: Stream | None = None) -> None:
        self.device.log.append("event")
        stream = stream or self.device.current
        stream.append(0.0)
        self.end_s = stream.end_s

    def query(self) -> bool:
        self.device.log.append("query")
        if self.device.error is not None:
            raise self.device.error
        return self.device.host.now_s() >= self.end_s

    def synchronize(self) -> None:
        self.device.log.append("synchronize")
        self.device.meet(self.end_s)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self.device.current).wait_event(self)

    def elapsed_time(self, other: Event) -> float:
        """Milliseconds until another event, both of which are over."""
        if not (self.timing and other.timing):
            raise RuntimeError("Both events must be created with argument 'enable_timing=True'.")
        if self.device.host.now_s() < max(self.end_s, other.end_s):
            raise RuntimeError("CUDA error: device not ready")
        return (other.end_s - self.end_s) * 1e3


@contextlib.contextmanager
def installed(device: FakeDevice) -> Iterator[FakeDevice]:
    """The context in which `torch.cuda` is this device."""
    properties = SimpleNamespace(
        name=device.name,
        total_memory=device.memory_bytes,
        major=device.capability,
        minor=0,
        multi_processor_count=132,
        uuid="GPU-paper",
    )

    @contextlib.contextmanager
    def stream(chosen: Stream | None) -> Iterator[None]:
        before = device.current
        device.current = chosen or before
        try:
            yield
        finally:
            device.current = before

    def set_device(number: Any) -> None:
        device.number = torch.device(number).index if not isinstance(number, int) else number

    def reset_peak(*_: Any) -> None:
        device.peak_bytes = device.allocated_bytes

    values: dict[str, Callable[..., Any]] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: device.devices,
        "set_device": set_device,
        "current_device": lambda: device.number,
        "get_device_name": lambda *_: device.name,
        "get_device_properties": lambda *_: properties,
        "get_device_capability": lambda *_: (device.capability, 0),
        "Event": lambda enable_timing=False, **_: Event(device, enable_timing),
        "Stream": lambda *_, **__: Stream(device),
        "current_stream": lambda *_: device.current,
        "default_stream": lambda *_: device.default,
        "stream": stream,
        "synchronize": device.synchronize,
        "_sleep": lambda cycles: device.launch(cycles / CYCLES_PER_S),
        "memory_allocated": lambda *_: device.allocated_bytes,
        "max_memory_allocated": lambda *_: device.peak_bytes,
        "max_memory_reserved": lambda *_: device.peak_bytes + FRAGMENTS_BYTES,
        "reset_peak_memory_stats": reset_peak,
        "empty_cache": lambda: None,
        "mem_get_info": lambda *_: (
            device.memory_bytes - device.allocated_bytes - device.others_bytes,
            device.memory_bytes,
        ),
        "get_rng_state_all": list,
        "set_rng_state_all": lambda _: None,
        "manual_seed_all": lambda _: None,
    }
    with contextlib.ExitStack() as stack:
        for name, value in values.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        for patch in device.host.patches() if isinstance(device.host, PaperTime) else ():
            stack.enter_context(patch)
        yield device
