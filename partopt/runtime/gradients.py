"""Gradients summed over the replicas of a stage, and over all ranks that hold a tied parameter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
import torch.distributed as dist
from torch import Tensor, nn

from partopt.runtime.context import Context, lost_connections

_EPSILON = 1e-6  # as in torch.nn.utils.clip_grad_norm_


@dataclass(frozen=True)
class Tied:
    """A parameter that several stages hold: its name, and all ranks that hold it.

    `parameters` are what this rank holds of it, one for each stage that has its own.
    """

    name: str
    ranks: Sequence[int]
    parameters: Sequence[nn.Parameter] = ()


class Gradients:
    """The gradients on one rank, whose stages have `parameters` and lie on `ranks`, by stage.

    They are exchanged after the backward that they belong to, not in buckets beside it.
    """

    def __init__(
        self,
        context: Context,
        parameters: Mapping[int, Sequence[nn.Parameter]],
        ranks: Sequence[Sequence[int]],
        tied: Sequence[Tied],
    ) -> None:
        self.context, self.ranks, self.tied = context, ranks, tied
        apart = {id(own) for each in tied for own in each.parameters}
        self.own = {
            s: [parameter for parameter in held if id(parameter) not in apart]
            for s, held in parameters.items()
        }
        self.working = sorted({rank for replicas in ranks for rank in replicas})
        # every rank makes all groups, in one order
        self.replicas = [context.group(each) if len(each) > 1 else None for each in ranks]
        self.holders = [context.group(each.ranks) if len(each.ranks) > 1 else None for each in tied]

    def sum_over_replicas(self, stage: int) -> None:
        """Add up the gradients of a stage over its replicas; tied ones are left out."""
        group = self.replicas[stage]
        if group is not None:
            for alike in _by_format(self.own[stage]):
                _sum_in_place([gradient_of(parameter) for parameter in alike], group)

    def sum_tied(self) -> None:
        """Add up the gradients of each tied parameter over all ranks and stages that hold it."""
        for each, group in zip(self.tied, self.holders, strict=True):
            if self.context.rank not in each.ranks:
                continue
            held = [gradient_of(parameter) for parameter in each.parameters]
            total = torch.stack(held).sum(0) if len(held) > 1 else held[0]
            if group is not None:
                _sum_in_place([total], group)
            for gradient in held:
                gradient.copy_(total)

    def clip(self, limit: float) -> float:
        """Scale all gradients so that their norm over the whole model is at most `limit`.

        Every parameter counts once, whatever ranks hold it. Returns the norm before.
        """
        rank = self.context.rank
        counted = [
            gradient_of(parameter)
            for s, held in self.own.items()
            if self.ranks[s][0] == rank
            for parameter in held
        ]
        counted += [
            gradient_of(each.parameters[0]) for each in self.tied if min(each.ranks) == rank
        ]
        square = torch.zeros(1, dtype=torch.float64, device=self.context.device)
        for gradient in counted:
            square += torch.linalg.vector_norm(gradient, dtype=torch.float64) ** 2
        with lost_connections():
            dist.all_reduce(square, group=self.context.group(self.working, "working"))
        norm = float(square.sqrt())
        factor = min(1.0, limit / (norm + _EPSILON))
        every = [parameter for held in self.own.values() for parameter in held]
        every += [parameter for each in self.tied for parameter in each.parameters]
        for parameter in {id(each): each for each in every}.values():
            gradient_of(parameter).mul_(factor)
        return norm


def gradient_of(parameter: nn.Parameter) -> Tensor:
    """The gradient of a parameter, zeros where no backward has reached it."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def _by_format(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    by_name = sorted(parameters, key=lambda parameter: str(parameter.dtype))
    return [list(alike) for _, alike in groupby(by_name, lambda parameter: parameter.dtype)]


def _sum_in_place(gradients: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    whole = torch.cat([gradient.reshape(-1) for gradient in gradients])
    with lost_connections():
        dist.all_reduce(whole, group=group)
    sizes = [gradient.numel() for gradient in gradients]
    for gradient, summed in zip(gradients, torch.split(whole, sizes), strict=True):
        gradient.copy_(summed.view_as(gradient))
