"""The device that is measured: choosing it, describing it, making its steps repeatable."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
from collections.abc import Iterator
from pathlib import Path

import torch

from partopt import __version__
from partopt.documents.profile import Device, Environment
from partopt.errors import PartoptError, did_you_mean
from partopt.profiler.clock import Clock, CpuClock, CudaClock

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # the names and numbers of malloc.h
DEVICES = ("auto", "cuda", "cpu")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def choose_device(name: str) -> torch.device:
    """The device that `name` stands for; `auto` is CUDA where available, else the CPU.

    Raises PartoptError for a device that is unknown or not available.
    """
    if name not in DEVICES:
        raise PartoptError(
            f"`device={name}`: not a device that partopt measures",
            did_you_mean(str(name), DEVICES),
            code="invalid-option",
            option="device",
            value=name,
        )
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
        raise PartoptError(
            f"`dtype={name}`: not a dtype that partopt measures",
            did_you_mean(str(name), DTYPES),
            code="invalid-option",
            option="dtype",
            value=name,
        )
    return DTYPES[name]


def describe_device(device: torch.device) -> Device:
    """Name, type and memory of the device."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return Device(name=properties.name, type="cuda", memory_bytes=properties.total_memory)
    return Device(name=_processor(), type="cpu", memory_bytes=_host_memory_bytes())


def describe_environment(device: torch.device) -> Environment:
    """Versions of what was measured with."""
    cuda = torch.version.cuda if device.type == "cuda" else None
    return Environment(
        torch=str(torch.__version__),
        cuda=cuda,
        python=platform.python_version(),
        partopt=__version__,
    )


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


def return_freed_memory() -> None:
    """Give what the C library has kept back to the system; do nothing with one other than glibc."""
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def _set_allocator(mapped_blocks: int, trim_bytes: int) -> None:
    """Set two limits of glibc's allocator; do nothing with another C library.

    `mapped_blocks` is how many blocks it may map on their own, `trim_bytes` how many free bytes
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
