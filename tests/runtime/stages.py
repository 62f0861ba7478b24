"""A model of linear layers, a stage each, and the same model trained in one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from partopt.replay.stage import Crossing

BATCH, WIDTH = 3, 4

# activations, the number of the microbatch, and a side sum that the loss uses
CUT = [
    Crossing((BATCH, WIDTH), torch.float64, True),
    Crossing((1,), torch.int64, False),
    Crossing((BATCH,), torch.float64, True),
]


def layer_of(s: int) -> nn.Linear:
    """Layer s, the same in every process."""
    torch.manual_seed(100 + s)
    return nn.Linear(WIDTH, WIDTH, dtype=torch.float64)


def sample(number: int) -> Tensor:
    """The input of a microbatch."""
    generator = torch.Generator().manual_seed(number)
    return torch.randn(BATCH, WIDTH, dtype=torch.float64, generator=generator)


class Passed(NamedTuple):
    """A forward that waits for its backward."""

    inputs: list[Tensor]
    outputs: list[Tensor]


class LinearStage:
    """Layer s of S, and behind the last one the loss of a microbatch, over M."""

    def __init__(
        self, s: int, S: int, M: int, recompute: bool = False, tied: bool = False, log: Any = None
    ) -> None:
        self.s, self.last, self.M, self.recomputes = s, s == S - 1, M, recompute
        self.layer = layer_of(0 if tied and self.last else s)
        self.parameters = list(self.layer.parameters())
        self.receives: Sequence[Crossing] = CUT if s > 0 else []
        self.sends: Sequence[Crossing] = [] if self.last else CUT
        self.passed: dict[int, Passed] = {}
        self.losses: dict[int, float] = {}
        self.forwards = 0
        self.log: list[str] = [] if log is None else log  # what was run, as orders name it

    def prepare(self, microbatch: int) -> None:
        """There are no inputs but those that are received."""

    def forward(self, microbatch: int, received: Sequence[Tensor]) -> list[Tensor]:
        self.log.append(f"{self.s}F{microbatch % self.M}")
        inputs = self._inputs(microbatch, received)
        with torch.set_grad_enabled(not self.recomputes):
            outputs = self._compute(microbatch, inputs)
        self.passed[microbatch] = Passed(inputs, [] if self.recomputes else outputs)
        if self.last:
            self.losses[microbatch] = float(outputs[0].detach())
            return []
        return [outputs[0], torch.tensor([microbatch]), outputs[1]]

    def recompute(self, microbatch: int) -> None:
        self.log.append(f"{self.s}R{microbatch % self.M}")
        self._recompute(microbatch)

    def _recompute(self, microbatch: int) -> None:
        inputs = self.passed[microbatch].inputs
        self.passed[microbatch] = Passed(inputs, self._compute(microbatch, inputs))

    def backward(self, microbatch: int, gradients: Sequence[Tensor]) -> list[Tensor]:
        self.log.append(f"{self.s}B{microbatch % self.M}")
        found = self._backward_input(microbatch, gradients)
        self._backward_weight(microbatch)
        return found

    def backward_input(self, microbatch: int, gradients: Sequence[Tensor]) -> list[Tensor]:
        self.log.append(f"{self.s}I{microbatch % self.M}")
        return self._backward_input(microbatch, gradients)

    def _backward_input(self, microbatch: int, gradients: Sequence[Tensor]) -> list[Tensor]:
        if not self.passed[microbatch].outputs:
            self._recompute(microbatch)
        self.gradients = getattr(self, "gradients", {}) | {microbatch: list(gradients)}
        inputs = [each for each in self.passed[microbatch].inputs if each.requires_grad]
        return self._gradients(microbatch, inputs) if inputs else []

    def backward_weight(self, microbatch: int) -> None:
        self.log.append(f"{self.s}W{microbatch % self.M}")
        self._backward_weight(microbatch)

    def _backward_weight(self, microbatch: int) -> None:
        outputs, gradients = self.passed[microbatch].outputs, self.gradients[microbatch]
        torch.autograd.backward(outputs, gradients or None, inputs=self.parameters)
        del self.passed[microbatch], self.gradients[microbatch]

    def _inputs(self, microbatch: int, received: Sequence[Tensor]) -> list[Tensor]:
        if self.s == 0:
            assert not received
            return [sample(microbatch), torch.zeros(BATCH, dtype=torch.float64)]
        activations, number, side = received
        assert int(number) == microbatch, f"stage {self.s} got microbatch {int(number)}"
        return [activations.requires_grad_(), side.requires_grad_()]

    def _compute(self, microbatch: int, inputs: Sequence[Tensor]) -> list[Tensor]:
        self.forwards += 1
        activations = torch.tanh(self.layer(inputs[0]))
        side = inputs[1] + activations.sum(1)
        return [loss_of(activations, side, self.M)] if self.last else [activations, side]

    def _gradients(self, microbatch: int, of: Sequence[Tensor]) -> list[Tensor]:
        outputs, gradients = self.passed[microbatch].outputs, self.gradients[microbatch]
        return list(torch.autograd.grad(outputs, list(of), gradients or None, retain_graph=True))


def loss_of(activations: Tensor, side: Tensor, M: int) -> Tensor:
    return ((activations**2).mean() + torch.sin(side).mean()) / M


def whole_model(S: int, tied: bool = False) -> list[nn.Linear]:
    """All layers; where they are tied the last is the first."""
    layers = [layer_of(s) for s in range(S)]
    return [*layers[:-1], layers[0]] if tied else layers


def whole_loss(layers: Sequence[Any], number: int, M: int) -> Tensor:
    """The loss of a microbatch, in one process."""
    activations, side = sample(number), torch.zeros(BATCH, dtype=torch.float64)
    for layer in layers:
        activations = torch.tanh(layer(activations))
        side = side + activations.sum(1)
    return loss_of(activations, side, M)
