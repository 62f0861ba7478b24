"""What decides a device's speed beside the model: versions, settings of torch, the clock rate.

The clock rate and what lowers it come from NVIDIA's management library, where its Python module
(nvidia-ml-py) is installed. `describe_host` looks for all that partopt uses of a machine.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import platform
import shutil
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from msgspec.structs import replace

from partopt import __version__
from partopt.documents.doctor import Accelerator, Check, Machine
from partopt.documents.profile import Environment
from partopt.profiler.device import describe_device

_DRIVER = Path("/sys/module/nvidia/version")
_SM = 1  # NVML_CLOCK_SM of nvml.h
# bits of nvmlDeviceGetCurrentClocksThrottleReasons (nvml.h) that lower the clock of a busy device
_REASONS = {
    0x02: "application clocks",
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x10: "sync boost",
    0x20: "thermal slowdown by the driver",
    0x40: "thermal slowdown by the hardware",
    0x80: "power brake",
}
# of Environment: what a profile that is gone on with must share, where it says so
SETTINGS = (
    "driver",
    "cudnn",
    "nccl",
    "float32_matmul_precision",
    "matmul_tf32",
    "cudnn_tf32",
    "cudnn_benchmark",
)


def describe_environment(device: torch.device) -> Environment:
    """Versions and settings of what is measured with."""
    found = Environment(
        torch=str(torch.__version__),
        python=platform.python_version(),
        partopt=__version__,
        float32_matmul_precision=torch.get_float32_matmul_precision(),
    )
    if device.type != "cuda":
        return found
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    return replace(
        found,
        cuda=torch.version.cuda,
        driver=_known(lambda: _DRIVER.read_text().strip() or None),
        cudnn=_known(lambda: str(cudnn.version())),  # type: ignore[no-untyped-call]
        nccl=_known(lambda: ".".join(map(str, torch.cuda.nccl.version()))),  # type: ignore[no-untyped-call]
        matmul_tf32=_known(lambda: bool(matmul.allow_tf32)),
        cudnn_tf32=_known(lambda: bool(cudnn.allow_tf32)),
        cudnn_benchmark=_known(lambda: bool(cudnn.benchmark)),
    )


def _known(read: Any) -> Any:
    """What `read` returns; None where this build of torch, or this machine, does not know it."""
    with contextlib.suppress(AttributeError, ImportError, OSError, RuntimeError):
        return read()
    return None


class ClockRate:
    """The clock rate of a device while it is measured, and what lowers it; unknown on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._rates_hz: list[float] = []
        self._reasons = 0
        self._nvml: Any = None
        self._handle: Any = None
        if device.type == "cuda":
            # whatever is missing: the module, its library, the device under this name
            with contextlib.suppress(Exception):
                import pynvml

                pynvml.nvmlInit()
                name = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
                self._handle = pynvml.nvmlDeviceGetHandleByUUID(name)
                self._nvml = pynvml

    def sample(self) -> None:
        """Read it now, best when the device has just worked."""
        if self._nvml is None:
            return
        with contextlib.suppress(Exception):  # a device or a driver that does not tell
            self._rates_hz.append(self._nvml.nvmlDeviceGetClockInfo(self._handle, _SM) * 1e6)
            self._reasons |= self._nvml.nvmlDeviceGetCurrentClocksThrottleReasons(self._handle)

    def describe(self, environment: Environment) -> Environment:
        """The environment with the median rate, and all reasons that were seen to lower it."""
        reasons = [name for bit, name in _REASONS.items() if self._reasons & bit]
        rate_hz = statistics.median(self._rates_hz) if self._rates_hz else None
        seen = dict.fromkeys([*environment.throttled_by, *reasons])
        return replace(
            environment, sm_clock_hz=rate_hz or environment.sm_clock_hz, throttled_by=list(seen)
        )


# --- a machine ------------------------------------------------------------------------------------


class Host(NamedTuple):
    """A machine, its GPUs, what is missing on it, and the backend that two of its ranks can use."""

    environment: Environment
    machine: Machine
    devices: list[Accelerator]
    backend: str
    checks: list[Check]


def describe_host() -> Host:
    """This machine, as torch sees it."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    device, cpu = torch.device("cuda" if count else "cpu"), torch.device("cpu")
    machine = Machine(
        system=f"{platform.system()} {platform.machine()}",
        processor=describe_device(cpu),
        cores=os.cpu_count() or 1,
    )
    checks = list(_checks(count))
    backend = "nccl" if count > 1 and dist.is_nccl_available() else "gloo"
    devices = [_accelerator(number, count) for number in range(count)]
    return Host(describe_environment(device), machine, devices, backend, checks)


def _accelerator(number: int, count: int) -> Accelerator:
    device = torch.device("cuda", number)
    properties = torch.cuda.get_device_properties(device)
    others = [other for other in range(count) if other != number]
    return Accelerator(
        device=describe_device(device),
        capability=f"{properties.major}.{properties.minor}",
        processors=properties.multi_processor_count,
        reaches=[peer for peer in others if torch.cuda.can_device_access_peer(number, peer)],
    )


def _checks(devices: int) -> Iterator[Check]:
    """What partopt uses of a machine, and whether it is there."""
    why = "torch sees no GPU" if torch.version.cuda else "this torch was built without CUDA"
    without = f"{why}: profiles and runs are those of processors"
    nccl = dist.is_available() and dist.is_nccl_available()
    for name, there, text in (
        ("GPU", devices > 0, without),
        ("second GPU", devices > 1, "two ranks exchange over gloo, on processors"),
        ("NCCL", nccl, "this torch was built without it: ranks exchange over gloo"),
        (
            "nvidia-ml-py",
            importlib.util.find_spec("pynvml") is not None,
            "not installed: clock rates, and what lowers them, are not recorded",
        ),
        ("C++ compiler", bool(shutil.which("g++")), "there is no g++: `compile` does not work"),
    ):
        yield Check(name=name, status="ok" if there else "missing", text="" if there else text)
