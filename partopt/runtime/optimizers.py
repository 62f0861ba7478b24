"""The optimizer of a stage, and its state shared out over the stage's replicas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from partopt.errors import PartoptError
from partopt.profiler.source import ModelSource
from partopt.runtime.context import lost_connections

# Each by the name that a plan has for it: the class, and what it is given beside the rate
OPTIMIZERS: dict[str, tuple[Callable[..., Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {}),
    "momentum": (torch.optim.SGD, {"momentum": 0.9}),
    "adam": (torch.optim.AdamW, {}),
    "adafactor": (torch.optim.Adafactor, {}),
}


def optimizer_of(
    source: ModelSource, name: str, rate: float, parameters: Sequence[nn.Parameter]
) -> Optimizer:
    """The optimizer of the model's file, or the one that plans call `name`, with this rate.

    Raises PartoptError where torch has none of that name.
    """
    if source.optimizer is not None:
        optimizer = source.optimizer_of(list(parameters))
        if not isinstance(optimizer, Optimizer):
            raise PartoptError(
                f"{source.place}: optimizer(parameters) returned {type(optimizer).__name__}",
                "return a torch.optim.Optimizer",
                code="no-optimizer",
            )
        return optimizer
    if name not in OPTIMIZERS:
        raise PartoptError(
            f"torch has no optimizer {name}",
            f"write optimizer(parameters) in {source.place}",
            code="no-optimizer",
        )
    kind, options = OPTIMIZERS[name]
    return kind(parameters, lr=rate, **options)


def step_by_mean(optimizer: Optimizer, microbatches: int) -> None:
    """Have an optimizer divide gradients that are sums over so many microbatches."""

    def divide(optimizer: Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.div_(microbatches)

    optimizer.register_step_pre_hook(divide)


def warm_up(
    make: Callable[[Sequence[nn.Parameter]], Optimizer], parameters: Sequence[nn.Parameter]
) -> None:
    """Run what an update runs, on as many small parameters, whose kernels are those of these."""
    small = [nn.Parameter(p.detach()[(slice(0, 2),) * p.dim()].clone()) for p in parameters]
    optimizer = make(small)
    for _ in range(2):  # the first step makes the state
        for p in small:
            p.grad = torch.zeros_like(p)
        optimizer.step()
    for dtype in {p.dtype for p in small}:  # a bucket has one
        torch.cat([p.detach().reshape(-1) for p in small if p.dtype == dtype])


class SharedOptimizer:
    """Each replica in `group` steps some of the parameters whole, and sends them to the others.

    That is stage 1 of ZeRO (Rajbhandari et al., SC 2020, section 5.1). A parameter goes to the
    replica that has the fewest numbers so far, the largest first. `optimizer` is what `make` makes
    of this one's; None where it has none. torch's ZeroRedundancyOptimizer does the same for one
    number format and one group of parameters.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        make: Callable[[Sequence[nn.Parameter]], Optimizer],
        group: Any,
    ) -> None:
        self.group, rank = group, dist.get_rank()
        sizes = dict.fromkeys(dist.get_process_group_ranks(group), 0)
        self.owners: list[tuple[nn.Parameter, int]] = []
        for parameter in sorted(parameters, key=lambda parameter: parameter.numel(), reverse=True):
            owner = min(sizes, key=sizes.__getitem__)
            sizes[owner] += parameter.numel()
            self.owners.append((parameter, owner))
        stepped = {id(parameter) for parameter, owner in self.owners if owner == rank}
        self.stepped = [parameter for parameter in parameters if id(parameter) in stepped]
        self.optimizer = make(self.stepped) if self.stepped else None

    def step(self) -> None:
        """Step this replica's parameters, and get those of the others, all in place."""
        if self.optimizer is not None:
            self.optimizer.step()
        with lost_connections():
            works: list[Any] = [
                dist.broadcast(parameter.data, owner, group=self.group, async_op=True)
                for parameter, owner in self.owners
            ]
            for work in works:
                work.wait()
