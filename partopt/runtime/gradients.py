"""Gradients summed over the replicas of a stage, and over all ranks that hold a tied parameter."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from partopt.documents.plan import Plan
from partopt.runtime.buckets import Sum
from partopt.runtime.context import Context, lost_connections
from partopt.runtime.parameters import gradient_of

_EPSILON = 1e-6  # as in torch.nn.utils.clip_grad_norm_


@dataclass(frozen=True)
class Tied:
    """A parameter that several stages hold: its name, and all ranks that hold it.

    `parameters` are what this rank holds of it, one for each stage that has its own.
    """

    name: str
    ranks: Sequence[int]
    parameters: Sequence[nn.Parameter] = ()


def tied_parameters(
    plan: Plan, rank: int, parameter_of: Callable[[int, str], nn.Parameter]
) -> list[Tied]:
    """The tied parameters of `plan`, as it names them, in the same order on every rank.

    `parameter_of(s, name)` is a parameter of stage s on this rank. One object that several stages
    of the rank share is held once.
    """
    found = []
    for name, holding in sorted(tied_stages(plan).items()):
        own = [parameter_of(s, name) for s in holding if rank in plan.stages[s].ranks]
        ranks = sorted({each for s in holding for each in plan.stages[s].ranks})
        found.append(Tied(name, ranks, list({id(each): each for each in own}.values())))
    return found


def tied_stages(plan: Plan) -> dict[str, list[int]]:
    """The stages that hold each tied parameter of `plan`."""
    stages: dict[str, list[int]] = {}
    for flow in plan.communication:
        if flow.kind == "tied" and flow.stage is not None:
            for name in flow.parameters:
                stages.setdefault(name, []).append(flow.stage)
    return stages


class Gradients:
    """The gradients on one rank, whose stages have `parameters` and lie on `ranks`, by stage.

    Those of a stage are exchanged in buckets of `bucket_bytes` while the rank goes on: each when
    the backward that `watch` was called before has made it, or else when that has ended. `clips`
    says that `clip` is called. Of the `shared` stages each replica has the sums of its own rows
    alone, which are its parameters here.
    """

    def __init__(
        self,
        context: Context,
        parameters: Mapping[int, Sequence[nn.Parameter]],
        ranks: Sequence[Sequence[int]],
        tied: Sequence[Tied],
        clips: bool,
        bucket_bytes: float,
        shared: Collection[int] = (),
    ) -> None:
        self.context, self.ranks, self.tied, self.shared = context, ranks, tied, shared
        self.bucket_bytes = bucket_bytes
        self.watched: dict[int, Sum] = {}
        apart = {id(own) for each in tied for own in each.parameters}
        self.own = {
            s: [parameter for parameter in held if id(parameter) not in apart]
            for s, held in parameters.items()
        }
        working = sorted({rank for replicas in ranks for rank in replicas})
        # every rank makes all groups, in one order, and also those that it is not in
        self.working = context.group(working, "working") if clips else None
        self.replicas = [context.group(each) if len(each) > 1 else None for each in ranks]
        self.holders = [context.group(each.ranks) if len(each.ranks) > 1 else None for each in tied]

    def watch(self, stage: int) -> None:
        """Exchange gradients of a stage as the backward that comes now makes them, its last one."""
        group = self.replicas[stage]
        if group is not None:
            self.watched[stage] = Sum(self.own[stage], group, self.bucket_bytes)
            self.watched[stage].watch()

    def begin_sum(
        self, stage: int, done: Callable[[int], None], aside: Sequence[nn.Parameter] = ()
    ) -> Sum | None:
        """Begin to add up what is left of a stage's gradients over replicas, without tied ones.

        They are taken from the parameters until `Sum.finish` puts them back, those of `aside` as
        they are; `done` is called with the time at which the exchange ends. None where the stage
        has one replica.
        """
        group = self.replicas[stage]
        if group is None:
            return None
        own = self.watched.pop(stage, None) or Sum(self.own[stage], group, self.bucket_bytes)
        own.begin_rest(done, aside)
        return own

    def tied_of(self, parameters: Sequence[nn.Parameter]) -> list[tuple[nn.Parameter, Any]]:
        """Those of the parameters of a stage that are tied, each with the group of its holders."""
        mine = {id(parameter) for parameter in parameters}
        return [
            (parameter, group)
            for each, group in zip(self.tied, self.holders, strict=True)
            for parameter in each.parameters
            if id(parameter) in mine
        ]

    def sum_tied(self) -> None:
        """Add up the gradients of each tied parameter over all ranks and stages that hold it."""
        for each, group in zip(self.tied, self.holders, strict=True):
            if self.context.rank not in each.ranks:
                continue
            held = [gradient_of(parameter) for parameter in each.parameters]
            total = torch.stack(held).sum(0) if len(held) > 1 else held[0]
            if group is not None:
                with lost_connections():
                    dist.all_reduce(total, group=group)
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
            if self.ranks[s][0] == rank or s in self.shared
            for parameter in held
        ]
        counted += [
            gradient_of(each.parameters[0]) for each in self.tied if min(each.ranks) == rank
        ]
        square = torch.zeros(1, dtype=torch.float64, device=self.context.device)
        for gradient in counted:
            square += torch.linalg.vector_norm(gradient, dtype=torch.float64) ** 2
        with lost_connections():
            dist.all_reduce(square, group=self.working)
        norm = float(square.sqrt())
        factor = min(1.0, limit / (norm + _EPSILON))
        every = [parameter for held in self.own.values() for parameter in held]
        every += [parameter for each in self.tied for parameter in each.parameters]
        for parameter in {id(each): each for each in every}.values():
            gradient_of(parameter).mul_(factor)
        return norm
