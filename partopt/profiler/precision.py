"""Steps under autocast, as people train: the forward and the loss in it, the backward outside.

The weights stay float32; `torch.autocast` casts them once a forward and keeps the copies.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from partopt.profiler.step import loss_of_output
from partopt.profiler.subject import Subject


@contextlib.contextmanager
def under_autocast(subject: Subject) -> Iterator[Subject]:
    """The subject with its forward and its loss under the autocast of its settings, if any."""
    dtype, device = subject.settings.autocast, subject.settings.device
    if dtype is None:
        yield subject
        return

    with replace_forward(subject.model, cast(subject.model.forward, device, dtype)):
        yield replace(subject, loss_fn=cast(subject.loss_fn or loss_of_output, device, dtype))


def cast(
    function: Callable[..., Any], device: torch.device, dtype: torch.dtype
) -> Callable[..., Any]:
    """The function under autocast to `dtype`."""

    @functools.wraps(function)
    def called(*arguments: Any, **options: Any) -> Any:
        with torch.autocast(device.type, dtype):
            return function(*arguments, **options)

    return called


@contextlib.contextmanager
def replace_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Have `module` run `forward` in this context; its hooks run around it as before."""
    before = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if before is not None:
            module.forward = before


@contextlib.contextmanager
def no_cast_cache() -> Iterator[None]:
    """Have autocast cast a weight wherever it is used.

    A copy made by one layer and used by another would pass for a tensor that crosses between them,
    while each stage of a pipeline makes its own.
    """
    enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(enabled)
