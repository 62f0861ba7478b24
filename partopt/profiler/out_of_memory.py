"""Running out of memory: recognising it among other errors, and recovering from it."""

from __future__ import annotations

import gc

import torch

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
