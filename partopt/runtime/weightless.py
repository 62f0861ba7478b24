"""Running a model without weights far enough to record it.

Units run on fake tensors; between them there are real zeros in place of what they return, so that
the model's own code meets real tensors there, as it does where the weights are.
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
    if not any(has_no_values(each) for each in model.parameters()):
        yield None
        return
    mode = fake_mode()
    fakes: dict[int, nn.Parameter] = {}

    def fake(parameter: Any) -> Tensor:
        if id(parameter) not in fakes:
            fakes[id(parameter)] = fake_parameter(mode, parameter, device)
        return fakes[id(parameter)]

    form = next((each.dtype for each in model.parameters()), torch.float32)
    with without_log(), replace_tensors(model, fake), real_buffers(model, device, form):
        yield StandIns(mode)


class StandIns:
    """Fakes for real tensors that enter a unit, and zeros for fakes that leave one."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode

    def enter(self, value: Any) -> tuple[Any, dict[int, Tensor]]:
        """Arguments with fakes of their tensors, and the real tensor behind each fake, by its id.

        The fakes live as long as the arguments that are returned.
        """
        fakes: dict[int, Tensor] = {}
        real: dict[int, Tensor] = {}

        def fake(tensor: Tensor) -> Tensor:
            if isinstance(tensor, FakeTensor):
                return tensor
            if id(tensor) not in fakes:
                fakes[id(tensor)] = self._mode.from_tensor(tensor)
                real[id(fakes[id(tensor)])] = tensor
            return fakes[id(tensor)]

        return tree_map_only(Tensor, fake, value), real

    def leave(self, value: Any, real: dict[int, Tensor]) -> Any:
        """The result with the real tensors that came in, and zeros for other fakes."""
        made: dict[int, Tensor] = {}

        def behind(tensor: Tensor) -> Tensor:
            if not isinstance(tensor, FakeTensor) or id(tensor) in real:
                return real.get(id(tensor), tensor)
            if id(tensor) not in made:
                made[id(tensor)] = _zeros_like(tensor)
            return made[id(tensor)]

        return tree_map_only(Tensor, behind, value)

    def real_weights(self, unit: nn.Module) -> contextlib.AbstractContextManager[None]:
        """The context in which a unit has real weights, of no particular values."""
        made: dict[int, nn.Parameter] = {}

        def real(parameter: Any) -> Tensor:
            if id(parameter) not in made:
                values = torch.full(
                    parameter.shape, 0.01, dtype=parameter.dtype, device=parameter.device
                )
                made[id(parameter)] = nn.Parameter(values, parameter.requires_grad)
            return made[id(parameter)]

        return replace_tensors(unit, real)


def _zeros_like(fake: Tensor) -> Tensor:
    def zeros() -> Tensor:
        return torch.empty_strided(
            fake.shape, fake.stride(), dtype=fake.dtype, device=fake.device
        ).zero_()

    return _Made.apply(_anchor(), zeros) if fake.requires_grad else zeros()  # type: ignore


def _anchor() -> Tensor:
    return torch.zeros((), requires_grad=True)


class _Made(torch.autograd.Function):
    """Makes a tensor that has a gradient and is no leaf: it can be written to in place."""

    @staticmethod
    def forward(_context: Any, _anchor: Tensor, make: Callable[[], Tensor]) -> Tensor:
        return make()

    @staticmethod
    def backward(_context: Any, *_gradients: Tensor) -> tuple[None, None]:
        return None, None
