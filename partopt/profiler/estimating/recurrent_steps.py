"""The steps of a recurrent layer as one operator, for tensors without values, and what they do.

A step is a product of the hidden states with the recurrent weights and a kernel for the gates; all
directions of the layer take theirs, one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

NAMESPACE = "partopt"
LAUNCHES = 2  # kernels of a step


@torch.library.custom_op(f"{NAMESPACE}::recurrent_steps", mutates_args=())
def recurrent_steps(
    reserve: Tensor, weights: Sequence[Tensor], steps: int, samples: int, width: int
) -> Tensor:
    """The output of all steps of a layer: it fills what is reserved, where the gates lie."""
    raise NotImplementedError("for tensors without values alone")


@torch.library.custom_op(f"{NAMESPACE}::recurrent_steps_backward", mutates_args=())
def recurrent_steps_backward(
    reserve: Tensor, weights: Sequence[Tensor], gradient: Tensor
) -> Tensor:
    """The gradient of the first states: those of the gates take the place of the gates."""
    raise NotImplementedError("for tensors without values alone")


@recurrent_steps.register_fake
def _(reserve: Tensor, weights: Sequence[Tensor], steps: int, samples: int, width: int) -> Tensor:
    return reserve.new_empty(steps, samples, width)


@recurrent_steps_backward.register_fake
def _(reserve: Tensor, weights: Sequence[Tensor], gradient: Tensor) -> Tensor:
    return gradient.new_empty(gradient.shape[1:])


def _count_flops(_reserve: Any, weights: Sequence[Tensor], *rest: Any, **_result: Any) -> int:
    """A product with each recurrent weight for each sample in each step."""
    steps, samples = _steps_and_samples(rest)
    return 2 * steps * samples * sum(each.numel() for each in weights)


register_flop_formula(
    [torch.ops.partopt.recurrent_steps, torch.ops.partopt.recurrent_steps_backward], get_raw=True
)(_count_flops)


def bytes_and_launches(arguments: Sequence[Any], result: Tensor) -> tuple[int, int]:
    """Bytes that either operator moves, and the kernels that it launches.

    Every step reads the recurrent weights again. What is reserved is read and written, the output
    too, as each step reads the state of the one before; of its gradient all is read.
    """
    reserve, weights, *rest = arguments
    steps, _ = _steps_and_samples(rest)
    passing = rest[0].nbytes if isinstance(rest[0], Tensor) else 2 * result.nbytes
    read = steps * sum(each.nbytes for each in weights)
    return read + 2 * reserve.nbytes + passing, LAUNCHES * steps * reserve.shape[0]


def _steps_and_samples(rest: Sequence[Any]) -> tuple[int, int]:
    """t and b of a call of either operator, from its arguments after the weights."""
    steps, samples = rest[0].shape[:2] if isinstance(rest[0], Tensor) else rest[:2]
    return int(steps), int(samples)
