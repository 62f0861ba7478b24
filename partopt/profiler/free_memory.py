"""How much memory is free, on the device that is measured and on the host that builds the model."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

HEADROOM = 1.1  # what is needed beside the tensors that are counted
# A GPU says when it is full, and the measurement goes on without what did not fit. A host ends the
# process, so that everything counts there: weights, gradients, and the two moments of AdamW.
COPIES = {"cuda": 2, "cpu": 4}
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Memory:
    """Bytes free on the host and on the device, which are the same where it is the processor."""

    host_bytes: float
    device_bytes: float
    copies: int  # of a trained weight on the device while it is measured

    @classmethod
    def free(cls, device: torch.device) -> Memory:
        """What is free now; without limit where the system does not tell."""
        host = free_host_bytes()
        on_device = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else host
        return cls(host, on_device, COPIES[device.type])

    def holds(self, built_bytes: float, device_bytes: float) -> bool:
        """Whether what is built on the host, and what lies on the device, leave headroom."""
        return (
            HEADROOM * built_bytes <= self.host_bytes
            and HEADROOM * device_bytes <= self.device_bytes
        )


ENDLESS = Memory(float("inf"), float("inf"), copies=1)


@dataclass
class Size:
    """Bytes of a model's parameters as they are built, and while they are trained."""

    dtype: torch.dtype  # of the floating parameters on the device
    copies: int
    built_bytes: int = 0
    trained_bytes: int = 0

    def add(self, parameter: nn.Parameter) -> None:
        """Count one parameter, which takes nothing where it is built on the meta device."""
        dtype = self.dtype if parameter.is_floating_point() else parameter.dtype
        copies = self.copies if parameter.requires_grad else 1
        self.built_bytes += 0 if parameter.is_meta else parameter.nbytes
        self.trained_bytes += parameter.numel() * dtype.itemsize * copies


def size_of(model: nn.Module, dtype: torch.dtype, copies: int) -> Size:
    """The size of all parameters of a model, shared ones once."""
    size = Size(dtype, copies)
    for parameter in model.parameters():
        size.add(parameter)
    return size


def free_host_bytes() -> float:
    """The memory that is available, or what the control group leaves of it if that is less."""
    return min(_available_bytes(), _control_group_bytes())


def _available_bytes() -> float:
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return float("inf")


def _control_group_bytes() -> float:
    """What a container's limit leaves; pages of files count as free, they can be dropped."""
    with contextlib.suppress(OSError, ValueError):
        limit = int((_CGROUP / "memory.max").read_text())
        used = int((_CGROUP / "memory.current").read_text())
        return limit - used + _file_bytes()
    return float("inf")


def _file_bytes() -> int:
    with contextlib.suppress(OSError, ValueError):
        for line in (_CGROUP / "memory.stat").read_text().splitlines():
            if line.startswith("inactive_file "):
                return int(line.split()[1])
    return 0
