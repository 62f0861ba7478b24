"""The whole model of a training in one process: what a run of many is held against."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from partopt.errors import PartoptError
from partopt.profiler.step import run_loss
from partopt.profiler.weightless import RandomNumbers
from partopt.runtime.inputs import Microbatches
from partopt.runtime.training import Training


class Reference(NamedTuple):
    """What one process finds: the loss of each microbatch, and a tensor for each parameter.

    It is the parameter's gradient, or its values behind a step. `scales` are the sizes that errors
    of these tensors are relative to.
    """

    losses: dict[int, float]
    tensors: dict[str, Tensor]
    scales: dict[str, float]


class WholeModel:
    """The model of a training with all its weights, without dropout, and its microbatches.

    `go_on` is called with what comes next, before each of them.
    """

    def __init__(
        self, training: Training, device: torch.device, go_on: Callable[[str], None]
    ) -> None:
        torch.manual_seed(training.seed)
        self.model = training.build().to(device)
        self._go_on = go_on
        self._loss_fn = training.cast(self.model, device)
        switch_off_dropout(self.model)
        size = training.plan.microbatch_size
        self._inputs = Microbatches(
            training.source, (0, 1), size, training.seed, device, training.dtype
        )

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Those that train, each by the first of its names."""
        return {name: each for name, each in self.model.named_parameters() if each.requires_grad}

    def backward(self, microbatch: int, scale: float = 1.0) -> float:
        """Run a microbatch: its loss, whose gradients times `scale` add up in the parameters.

        Raises PartoptError where the model draws random numbers.
        """
        self._go_on(f"check: microbatch {microbatch} in one process")
        inputs, before = self._inputs(microbatch), RandomNumbers()
        loss = run_loss(self.model, inputs, self._loss_fn)
        (loss * scale).backward()  # type: ignore[no-untyped-call]
        if before.advanced():
            raise PartoptError(
                "the model draws random numbers, which one process and several draw in other "
                "orders",
                "check it with dropout set to 0",
                code="not-comparable",
            )
        return float(loss.detach())


def train_alone(whole: WholeModel, microbatches: int) -> Reference:
    """The losses of an iteration's microbatches, and the gradients of their mean."""
    losses = {n: whole.backward(n, 1.0 / microbatches) for n in range(microbatches)}
    gradients = {
        name: each.grad for name, each in whole.parameters.items() if each.grad is not None
    }
    return Reference(losses, gradients, {n: largest(each) for n, each in gradients.items()})


def largest(tensor: Tensor) -> float:
    """The largest absolute entry of a tensor; 0 where it has none."""
    return float(tensor.detach().abs().max()) if tensor.numel() else 0.0


def switch_off_dropout(model: nn.Module) -> None:
    """Let the dropout layers of a model drop nothing."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
