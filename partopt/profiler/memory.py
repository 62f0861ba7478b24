"""Memory: how much is free, whether a model fits into it, and what to do where it ran out.

A GPU says when it is full, and the measurement goes on without what did not fit. A host ends the
process: there a model is refused before it is built, or trained, beyond what is free.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakTensorKeyDictionary

from partopt.errors import ANSWER_IS_NO, PartoptError
from partopt.profiler.weightless import replace_attribute
from partopt.units import format_bytes

HEADROOM = 1.1  # what is needed beside the tensors that are counted
_COPIES = 4  # of a trained weight: itself, its gradient, and the two moments of AdamW
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


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that the device, or the host, has no memory left."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(
        message.lower() in str(error).lower() for message in _MESSAGES
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


def build_within_memory(
    build: Callable[[], nn.Module], device: torch.device, dtype: torch.dtype
) -> nn.Module:
    """The model that `build` makes, where the host holds its weights.

    On the CPU also with their gradients and the optimizer's moments, the floating ones as `dtype`.
    Raises PartoptError as soon as what is registered comes to more than is free.
    """
    free, built = free_host_bytes(), 0
    register, seen = nn.Module.register_parameter, WeakTensorKeyDictionary()

    def check(needed_bytes: int) -> None:
        if HEADROOM * needed_bytes > free:
            raise PartoptError(
                f"training the model takes {format_bytes(needed_bytes)} or more beside "
                f"activations, and {format_bytes(int(free))} are free",
                "profile a few of its blocks and add the others by `repeat`, choose "
                "`dtype=bfloat16`, or `estimate`, which needs no memory",
                ANSWER_IS_NO,
                code="out-of-memory",
                bytes=needed_bytes,
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
        check(
            sum(
                each.numel()
                * (dtype if each.is_floating_point() else each.dtype).itemsize
                * (_COPIES if each.requires_grad else 1)
                for each in model.parameters()
                if not is_lazy(each)
            )
        )
    return model
