"""The device that is measured: choosing it, describing it, its memory and its clock.

A GPU says when it is full, and the measurement goes on without what did not fit. A host ends the
process: there a model is refused before it is built, or trained, beyond what is free.

A stamp is taken where work is issued, and read as seconds once the step is over.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import os
import platform
import re
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakTensorKeyDictionary

from partopt.documents.profile import Device
from partopt.errors import ANSWER_IS_NO, PartoptError, unknown_value
from partopt.profiler.weightless import replace_attribute
from partopt.units import format_bytes

_OTHERS = 0.10  # share of the process's time that other threads may take before they count
_CALIBRATION_CYCLES = 1_000_000
_LONGEST_HOLD_S = 1.0
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # the names and numbers of malloc.h
HEADROOM = 1.1  # what is needed beside the tensors that are counted
_MOMENTS = 2  # of AdamW, for a trained weight
_CGROUP = Path("/sys/fs/cgroup")
_MESSAGES = (
    "can't allocate memory",
    "not enough memory",
    "out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "ALLOCATION_FAILED",
    "unable to find an engine",  # cuDNN, where no algorithm's workspace fits
)
DEVICES = ("auto", "cuda", "cpu")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def choose_device(name: str) -> torch.device:
    """The device that `name` stands for; `auto` is CUDA where available, else the CPU.

    Raises PartoptError for a device that is unknown or not available.
    """
    if name not in DEVICES:
        what = "not a device that partopt measures"
        raise unknown_value("device", name, DEVICES, what)
    if name == "cuda" and not torch.cuda.is_available():
        reason = (
            "this torch was built without CUDA"
            if torch.version.cuda is None
            else "torch sees no CUDA device"
        )
        raise PartoptError(
            f"`device=cuda`: {reason}",
            "`device=cpu` measures on the processor; nvidia-smi lists the GPUs of this machine",
            code="no-such-device",
            option="device",
            value=name,
        )
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def choose_dtype(name: str) -> torch.dtype:
    """The torch dtype called `name`. Raises PartoptError for one that partopt does not measure."""
    if name not in DTYPES:
        what = "not a dtype that partopt measures"
        raise unknown_value("dtype", name, DTYPES, what)
    return DTYPES[name]


def describe_device(device: torch.device) -> Device:
    """Name, type and memory of the device."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return Device(name=properties.name, type="cuda", memory_bytes=properties.total_memory)
    return Device(name=_processor(), type="cpu", memory_bytes=_host_memory_bytes())


def clock_of(device: torch.device) -> Clock:
    """The clock that measures on `device`."""
    return CudaClock() if device.type == "cuda" else CpuClock()


@contextlib.contextmanager
def hold_still(device: torch.device) -> Iterator[None]:
    """Make steps on the CPU repeatable in this context: one thread, and freed memory is kept.

    With one thread, its processor time is the time of a step. The C library gives large blocks
    back to the system as soon as they are freed, and the next step pays for every page again: two
    fifths of a step of VGG-16. CUDA's allocator keeps what is freed; here the CPU's does so too.
    """
    if device.type != "cpu":
        yield
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    keep_freed_memory()
    try:
        yield
    finally:
        _set_allocator(mapped_blocks=65536, trim_bytes=128 * 1024)  # glibc's defaults
        torch.set_num_threads(threads)


def keep_freed_memory() -> None:
    """Let the C library keep what is freed, for what is allocated next."""
    _set_allocator(mapped_blocks=0, trim_bytes=-1)


def _set_allocator(mapped_blocks: int, trim_bytes: int) -> None:
    """Set two limits of glibc's allocator; do nothing with another C library.

    `mapped_blocks` is how many blocks it may map alone, `trim_bytes` how many free bytes
    make it give memory back (-1: never).
    """
    with contextlib.suppress(OSError, AttributeError, TypeError):  # no glibc: no mallopt
        library = ctypes.CDLL(None)
        library.mallopt(_M_MMAP_MAX, mapped_blocks)
        library.mallopt(_M_TRIM_THRESHOLD, trim_bytes)


def _processor() -> str:
    """The processor's name, from the system."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _host_memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None


# --- memory ---------------------------------------------------------------------------------------


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that the device, or the host, has no memory left."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(
        message.lower() in str(error).lower() for message in _MESSAGES
    )


def is_device_failure(error: BaseException) -> bool:
    """Whether an exception says that the device failed: nothing runs on it in this process then."""
    return isinstance(error, RuntimeError) and any(
        message in str(error) for message in ("CUDA error", "cuDNN error", "NCCL error")
    )


def release_memory() -> None:
    """Give back what nothing refers to any more, on the host and on the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def free_host_bytes() -> float:
    """The memory that is available, or what the control group leaves of it if that is less.

    Without limit where the system does not tell. Pages of files count as free: they can be dropped.
    """
    available = left = float("inf")
    with contextlib.suppress(OSError, ValueError):
        available = _number(Path("/proc/meminfo"), "MemAvailable:") * 1024 or available
    with contextlib.suppress(OSError, ValueError):
        limit = int((_CGROUP / "memory.max").read_text())
        left = limit - int((_CGROUP / "memory.current").read_text())
        left += _number(_CGROUP / "memory.stat", "inactive_file")
    return min(available, left)


def _number(table: Path, name: str) -> int:
    """The number behind a name in a table of the system; 0 where it is not there."""
    lines = map(str.split, table.read_text().splitlines())
    return next((int(words[1]) for words in lines if words[0] == name), 0)


def is_stepped(name: str, blocks: Collection[str]) -> bool:
    """Whether the optimizer is timed on the parameter: all are, or those of second blocks alone."""
    return not blocks or any(re.match(rf"{re.escape(path)}\.?1\.", name) for path in blocks)


def key_in_block(name: str, parameter: nn.Parameter, blocks: Collection[str]) -> object:
    """What parameters of the same place in the blocks of one of these lists share; None of none."""
    matches = ((path, re.match(rf"{re.escape(path)}\.?[0-9]+\.(.+)", name)) for path in blocks)
    places = [(path, match[1]) for path, match in matches if match]
    return (places[0], parameter.shape, parameter.dtype) if places else None


def build_within_memory(
    build: Callable[[], nn.Module],
    device: torch.device,
    dtype: torch.dtype,
    blocks: Collection[str] = (),
) -> nn.Module:
    """The model that `build` makes, where the host holds its weights.

    On the CPU also with their gradients and the optimizer's moments, the floating ones as `dtype`;
    these `blocks` share their gradients, and one parameter at a time has moments. Raises
    PartoptError as soon as what is registered comes to more than is free.
    """
    free, built = free_host_bytes(), 0
    register, seen = nn.Module.register_parameter, WeakTensorKeyDictionary()

    def check(needed_bytes: int) -> None:
        if HEADROOM * needed_bytes > free:
            raise PartoptError(
                f"training the model takes {format_bytes(needed_bytes)} or more beside "
                f"activations, and {format_bytes(int(free))} are free",
                "profile two of its blocks and add the others by `repeat`, choose "
                "`dtype=bfloat16`, or `estimate`, which needs no memory",
                ANSWER_IS_NO,
                code="out-of-memory",
            )

    def count(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        nonlocal built
        register(module, name, parameter)
        if parameter is not None and not is_lazy(parameter) and parameter not in seen:
            seen[parameter] = True
            built += 0 if parameter.is_meta else parameter.nbytes
            check(built)

    with replace_attribute(nn.Module, "register_parameter", count):
        model = build()
    if device.type == "cpu":
        check(_training_bytes(model, dtype, blocks))
    return model


def _training_bytes(model: nn.Module, dtype: torch.dtype, blocks: Collection[str]) -> int:
    """Bytes of weights, gradients and moments as a profile of these blocks has them on a CPU."""
    weights_bytes, gradients, moments = 0, dict[object, int](), [0]
    for name, parameter in model.named_parameters():
        if not is_lazy(parameter):
            size_bytes = (
                parameter.numel()
                * (dtype if parameter.is_floating_point() else parameter.dtype).itemsize
            )
            weights_bytes += size_bytes
            if parameter.requires_grad:
                gradients[key_in_block(name, parameter, blocks) or name] = size_bytes
                moments.append(_MOMENTS * size_bytes)
    return weights_bytes + sum(gradients.values()) + (max(moments) if blocks else sum(moments))


# --- clocks ---------------------------------------------------------------------------------------


class Clock(ABC):
    """Takes stamps during a step, and turns them into seconds after it.

    `queues` says whether the host goes on while the device works: then a failure of the device
    shows where the host next waits for it. Where host and device are the same, as here, nothing is
    waited for and nothing held.
    """

    queues = False

    def calibrate(self) -> None:
        """Learn what `hold` needs to know; waits for the device, and so is no part of a step."""
        return

    def wait(self) -> None:
        """Wait until the device has done what was issued. Raises what it failed of."""
        return

    @abstractmethod
    def stamp(self) -> Any:
        """A mark of this moment, cheap enough to be taken between layers."""

    def intervals_s(self, stamps: Sequence[Any]) -> list[float]:
        """Seconds between every stamp and the next; waits for the device.

        The stamps must not be used again.
        """
        return [float(later - earlier) for earlier, later in itertools.pairwise(stamps)]

    def hold(self, seconds: float) -> None:
        """Have the device wait for `seconds` where it comes to this point; the host goes on.

        What the host does meanwhile does not eat the lead that its launches have.
        """
        return

    def idle_share(self) -> float | None:
        """Share of the wall time that is not in the intervals; None if unknown."""
        return None


class CpuStamp(NamedTuple):
    """A moment of the host: wall seconds, processor seconds of thread and process, the thread."""

    wall_s: float
    thread_s: float
    process_s: float
    thread: int


class CpuClock(Clock):
    """Processor time of the thread, with the wall time next to it.

    What else the machine does meanwhile does not count. Autograd runs the backward on the calling
    thread, checkpoints and custom functions included; only reentrant checkpoints nested more than
    60 deep go to another one. Where stamps come from several threads, or other threads of the
    process worked for more than a tenth of its time, the time of the whole process counts.
    """

    def __init__(self) -> None:
        self._wall_s = 0.0
        self._busy_s = 0.0

    def stamp(self) -> CpuStamp:
        """This moment on all clocks of the host."""
        return CpuStamp(
            time.perf_counter(), time.thread_time(), time.process_time(), threading.get_ident()
        )

    def intervals_s(self, stamps: Sequence[CpuStamp]) -> list[float]:
        """Processor seconds between stamps."""
        alone = _one_thread_worked(stamps)
        times = [stamp.thread_s if alone else stamp.process_s for stamp in stamps]
        self._wall_s += stamps[-1].wall_s - stamps[0].wall_s
        self._busy_s += times[-1] - times[0]
        return [later - earlier for earlier, later in itertools.pairwise(times)]

    def idle_share(self) -> float | None:
        """Share of the wall time in which the processor did something else, or nothing."""
        return max(1 - self._busy_s / self._wall_s, 0.0) if self._wall_s > 0 else None


def _one_thread_worked(stamps: Sequence[CpuStamp]) -> bool:
    first, last = stamps[0], stamps[-1]
    others_s = (last.process_s - first.process_s) - (last.thread_s - first.thread_s)
    return len({stamp.thread for stamp in stamps}) == 1 and others_s <= _OTHERS * (
        last.process_s - first.process_s
    )


class CudaClock(Clock):
    """Events on the current stream, taken from a pool.

    Recording one costs microseconds and does not wait for the device.
    """

    queues = True

    def __init__(self) -> None:
        self._pool: list[torch.cuda.Event] = []
        self._cycles_per_s = 0.0  # of the spinning kernel; before it is calibrated nothing is held

    def calibrate(self) -> None:
        """Time the spinning kernel at the clock rate that the device has now."""
        started = self.stamp()
        torch.cuda._sleep(_CALIBRATION_CYCLES)  # type: ignore[no-untyped-call]
        [spun_s] = self.intervals_s([started, self.stamp()])
        self._cycles_per_s = _CALIBRATION_CYCLES / spun_s

    def wait(self) -> None:
        """Wait for all streams of the device."""
        torch.cuda.synchronize()

    def stamp(self) -> torch.cuda.Event:
        """An event recorded now."""
        event = self._pool.pop() if self._pool else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def intervals_s(self, stamps: Sequence[torch.cuda.Event]) -> list[float]:
        """Device seconds between events, after one wait for all of them."""
        torch.cuda.synchronize()
        seconds = [
            earlier.elapsed_time(later) / 1000 for earlier, later in itertools.pairwise(stamps)
        ]
        self._pool.extend(stamps)
        return seconds

    def hold(self, seconds: float) -> None:
        """Enqueue a kernel that spins for about `seconds`, at most one second."""
        if cycles := int(min(seconds, _LONGEST_HOLD_S) * self._cycles_per_s):
            torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
