"""The optimizer of a stage: that of the model's file, or else the plan's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from partopt.errors import PartoptError
from partopt.profiler.source import ModelSource

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
    """The optimizer of some parameters: that of the model's file, or else the one
    that plans call `name`, with this learning rate.

    Raises PartoptError where torch has none of that name.
    """
    if source.optimizer is not None:
        own = source.optimizer_of(list(parameters))
        if not isinstance(own, Optimizer):
            raise PartoptError(
                f"{source.place}: optimizer(parameters) returned {type(own).__name__}",
                "return a torch.optim.Optimizer",
                code="no-optimizer",
            )
        return own
    if name not in OPTIMIZERS:
        raise PartoptError(
            f"torch has no optimizer {name}",
            f"write optimizer(parameters) in {source.place}",
            code="no-optimizer",
        )
    kind, options = OPTIMIZERS[name]
    return kind(parameters, lr=rate, **options)


def steps_rows_alone(make: Callable[[Sequence[nn.Parameter]], Optimizer]) -> bool:
    """Whether the optimizers that `make` makes step rows of a parameter as they step the whole.

    Found by two steps of a small matrix and of its halves, with gradients of other sizes in each.
    """
    numbers = torch.Generator().manual_seed(0)
    start, *gradients = torch.randn(3, 8, 8, generator=numbers)
    size = torch.logspace(-1, 1, 8).unsqueeze(1)
    whole = nn.Parameter(start.clone())
    halves = [nn.Parameter(half.clone()) for half in start.chunk(2)]
    optimizers = [make([whole]), *(make([half]) for half in halves)]
    for gradient in gradients:
        whole.grad = gradient * size
        for half, own in zip(halves, whole.grad.chunk(2), strict=True):
            half.grad = own.clone()
        for optimizer in optimizers:
            optimizer.step()
    return torch.allclose(torch.cat(list(halves)), whole, rtol=1e-5, atol=1e-7)


def mean_over(microbatches: int) -> Callable[..., None]:
    """What is called before a step: it divides gradients that are sums over so many."""

    def divide(optimizer: Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.div_(microbatches)

    return divide
