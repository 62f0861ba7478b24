"""Running a model without weights far enough to record it.

Units run on fake tensors; between them there are real zeros in place of what they return, so that
the model's code meets real tensors there, as it does where the weights are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_map_only

from partopt.profiler.weightless import (
    fake_mode,
    fake_parameter,
    is_fake,
    memoize,
    real_buffers,
    replace_tensors,
    without_log,
)


def has_no_values(tensor: Tensor) -> bool:
    """Whether the tensor is fake, or on the meta device."""
    return tensor.is_meta or is_fake(tensor)


@contextlib.contextmanager
def stand_ins(model: nn.Module, device: torch.device) -> Iterator[StandIns | None]:
    """The context in which a model without weights can run on `device`; None for one with them."""
    if not any(has_no_values(parameter) for parameter in model.parameters()):
        yield None
        return
    mode = fake_mode()
    fake = memoize(lambda parameter: fake_parameter(mode, parameter, device))
    form = next((parameter.dtype for parameter in model.parameters()), torch.float32)
    with without_log(), replace_tensors(model, fake), real_buffers(model, device, form):
        yield StandIns(mode)


class StandIns:
    """Fakes for real tensors that enter a unit, and zeros for fakes that leave one."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode

    def enter(self, value: Any) -> tuple[Any, dict[int, Tensor]]:
        """Arguments with fakes of their tensors, and the real tensor behind every fake, by its id.

        The fakes live as long as the arguments that are returned.
        """
        real: dict[int, Tensor] = {}

        @memoize
        def fake(tensor: Tensor) -> Tensor:
            if isinstance(tensor, FakeTensor):
                return tensor
            made = self._mode.from_tensor(tensor)
            real[id(made)] = tensor
            return made

        return tree_map_only(Tensor, fake, value), real

    def leave(self, value: Any, real: dict[int, Tensor]) -> Any:
        """The result with the real tensors that came in, and zeros for other fakes."""

        @memoize
        def behind(tensor: Tensor) -> Tensor:
            if id(tensor) in real or not isinstance(tensor, FakeTensor):
                return real.get(id(tensor), tensor)
            return _zeros_like(tensor)

        return tree_map_only(Tensor, behind, value)

    def real_weights(self, unit: nn.Module) -> contextlib.AbstractContextManager[None]:
        """The context in which a unit has real weights, of no particular values."""

        @memoize
        def real(parameter: Tensor) -> Tensor:
            shape, dtype, device = parameter.shape, parameter.dtype, parameter.device
            values = torch.full(shape, 0.01, dtype=dtype, device=device)
            return nn.Parameter(values, parameter.requires_grad)

        return replace_tensors(unit, real)


def _zeros_like(fake: Tensor) -> Tensor:
    def zeros() -> Tensor:
        return torch.empty_strided(
            fake.shape, fake.stride(), dtype=fake.dtype, device=fake.device
        ).zero_()

    anchor = torch.zeros((), requires_grad=True)
    return _Made.apply(anchor, zeros) if fake.requires_grad else zeros()  # type: ignore


class _Made(torch.autograd.Function):
    """Makes a tensor that has a gradient and is no leaf: it can be written to in place."""

    @staticmethod
    def forward(_context: Any, _anchor: Tensor, make: Callable[[], Tensor]) -> Tensor:
        return make()

    @staticmethod
    def backward(_context: Any, *_gradients: Tensor) -> tuple[None, None]:
        return None, None
