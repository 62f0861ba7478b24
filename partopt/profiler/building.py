"""Building the model that a source names: whole where it fits into memory, else without weights.

A model that fits is built once, as if nobody watched: parameters are only counted as they are
registered. Where they come to more than fits, the build is left, and done again without weights.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakTensorKeyDictionary

from partopt.errors import ANSWER_IS_NO, PartoptError
from partopt.profiler.fake import build_without_weights, fake_mode, replace_attribute
from partopt.profiler.foreign_errors import describe
from partopt.profiler.free_memory import Memory, Size, size_of
from partopt.profiler.out_of_memory import is_out_of_memory, release_memory
from partopt.profiler.random_numbers import RandomNumbers
from partopt.profiler.settings import check_larger
from partopt.units import format_bytes

Build = Callable[[], nn.Module]


class _TooLarge(BaseException):
    """The parameters registered so far do not fit.

    Not an Exception, so that no build takes it for an error of its own.
    """


def build_within(
    build: Build, memory: Memory, dtype: torch.dtype, larger: bool | None
) -> tuple[nn.Module, bool]:
    """The model, and whether it is to be measured as one that is larger than memory.

    `larger` says so beforehand; None decides by the size. Raises PartoptError where the model does
    not fit and cannot be built without its weights, and what the build raises.
    """
    if larger is False:
        whole = build()
        return whole, check_larger(larger, whole)
    before = RandomNumbers()
    if larger is None:
        model = _build_if_it_fits(build, Size(dtype, memory.copies), memory)
        if model is not None:
            return model, any(parameter.is_meta for parameter in model.parameters())
        before.restore()
    model = _build_without_weights(build, memory, dtype)
    size = size_of(model, dtype, memory.copies)
    if larger is None and memory.holds(size.built_bytes, size.trained_bytes):
        # it froze, or dropped, some of what it registered
        before.restore()
        return build(), False
    return model, True


def _build_if_it_fits(build: Build, size: Size, memory: Memory) -> nn.Module | None:
    """The model, or None as soon as what it registers comes to more than fits."""

    def count(parameter: nn.Parameter) -> None:
        size.add(parameter)
        if not memory.holds(size.built_bytes, size.trained_bytes):
            raise _TooLarge

    try:
        with _count_parameters(count):
            return build()
    except _TooLarge:
        pass
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    release_memory()  # the part that was built
    return None


def _build_without_weights(build: Build, memory: Memory, dtype: torch.dtype) -> nn.Module:
    """The model with fake parameters, or real ones where its build needs their values.

    Then they have to fit at least once.
    """
    try:
        with build_without_weights(fake_mode()):
            return build()
    except Exception as error:
        cause = error.__cause__ or error
    once = Memory(memory.host_bytes, float("inf"), copies=1)
    model = _build_if_it_fits(build, Size(dtype, 1), once)
    if model is None:
        raise PartoptError(
            f"the model does not fit into the {format_bytes(int(memory.host_bytes))} of memory "
            f"that are free, and building it without its weights {describe(cause)}",
            "build it on the meta device, leave reading and writing weights out of the build, or "
            "profile on a machine with more memory",
            ANSWER_IS_NO,
            code="out-of-memory",
        ) from cause
    return model


@contextlib.contextmanager
def _count_parameters(count: Callable[[nn.Parameter], None]) -> Iterator[None]:
    """Call `count` with each parameter that is registered for the first time."""
    register = nn.Module.register_parameter
    seen = WeakTensorKeyDictionary()

    def register_and_count(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is not None and not is_lazy(parameter) and parameter not in seen:
            seen[parameter] = True
            count(parameter)

    with replace_attribute(nn.Module, "register_parameter", register_and_count):
        yield
