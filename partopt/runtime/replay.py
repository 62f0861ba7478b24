"""A stage of any nn.Module as an engine runs it, microbatch by microbatch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from partopt.profiler.tensors import Inputs
from partopt.profiler.weightless import RandomNumbers
from partopt.runtime.buffers import BufferState
from partopt.runtime.module import StageModule
from partopt.runtime.split_backward import WeightPart, backward_of_inputs
from partopt.runtime.stage import Crossing, Stage


class _Graph(NamedTuple):
    """Where the backward of a microbatch starts.

    `leaves` are the received tensors that have a gradient, `outputs` the sent ones or the loss.
    """

    leaves: list[Tensor]
    outputs: list[Tensor]


class ReplayStage(Stage):
    """A `module` that runs microbatches; see `partopt.runtime.stage.Stage`.

    `inputs_of(microbatch)` are the model's inputs on this rank, `scale` is what the loss is
    multiplied by: 1 / microbatches of an iteration. With `recompute` forwards keep their inputs
    alone. `own_parameters` are those that the stage needs, frozen ones too, by the first of their
    names: one that other stages need as well has the same name there. `losses` are those of the
    microbatches that the last stage has run, before they are scaled; who reads them clears them.
    """

    def __init__(
        self,
        module: StageModule,
        inputs_of: Callable[[int], Inputs],
        scale: float,
        recompute: bool = False,
    ) -> None:
        self._module, self._inputs_of, self._scale = module, inputs_of, scale
        self._recomputes = recompute
        self.model = module.whole
        self.own_parameters = dict(module.named_parameters())
        self.parameters = [each for each in self.own_parameters.values() if each.requires_grad]
        self.losses: dict[int, Tensor] = {}
        self.receives: Sequence[Crossing] = module.receives
        self.sends: Sequence[Crossing] = module.sends
        # by microbatch
        self._inputs: dict[int, Inputs] = {}
        self._kept: dict[int, tuple[list[Tensor], RandomNumbers]] = {}  # to run a forward again
        self._graphs: dict[int, _Graph] = {}
        self._weight_parts: dict[int, WeightPart] = {}

    @property
    def changing_buffers(self) -> dict[str, Tensor]:
        """The buffers that the stage's forwards may change, by their names in the model."""
        buffers = {name: holder[key] for holder, key, name in self._module.changing}
        return {name: each for name, each in buffers.items() if each is not None}

    def prepare(self, microbatch: int) -> None:
        """Have the model's own inputs of a microbatch ready, whose forward comes next."""
        self._inputs[microbatch] = self._inputs_of(microbatch)

    def forward(self, microbatch: int, received: Sequence[Tensor]) -> list[Tensor]:
        """Run the forward; where the stage recomputes, only its inputs are kept."""
        if not self._recomputes:
            sent, self._graphs[microbatch] = self._run(microbatch, received)
            return sent
        self._kept[microbatch] = list(received), RandomNumbers()
        with torch.no_grad():
            return self._run(microbatch, received)[0]

    def recompute(self, microbatch: int) -> None:
        """Run the forward once more from the kept inputs, for a backward that comes next.

        It draws the same random numbers; buffers, such as running statistics, stay as they are.
        """
        received, numbers = self._kept.pop(microbatch)
        buffers, now = BufferState(self._module.changing), RandomNumbers()
        numbers.restore()
        try:
            _, self._graphs[microbatch] = self._run(microbatch, received)
        finally:
            now.restore()
        buffers.restore()

    def backward(self, microbatch: int, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Run the whole backward: gradients of `sends` to gradients of `receives`."""
        leaves, outputs, gradients = self._begin_backward(microbatch, gradients)
        if outputs:
            torch.autograd.backward(outputs, gradients)
        return [
            torch.zeros_like(leaf) if leaf.grad is None else leaf.grad.contiguous()
            for leaf in leaves
        ]

    def backward_input(self, microbatch: int, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Run the backward of the inputs alone; `backward_weight` follows some time later."""
        leaves, outputs, gradients = self._begin_backward(microbatch, gradients)
        found, self._weight_parts[microbatch] = backward_of_inputs(
            outputs, gradients, leaves, self.parameters
        )
        return found

    def backward_weight(self, microbatch: int) -> None:
        """Run the backward of the weights alone."""
        self._weight_parts.pop(microbatch).run()

    def _begin_backward(
        self, microbatch: int, gradients: Sequence[Tensor]
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """The leaves, and the outputs that have a gradient, with it; of a loss it is 1."""
        if microbatch in self._kept:  # the schedule recomputes within the backward
            self.recompute(microbatch)
        graph = self._graphs.pop(microbatch)
        given = gradients or [torch.ones_like(each) for each in graph.outputs]
        pairs = [p for p in zip(graph.outputs, given, strict=True) if p[0].requires_grad]
        return graph.leaves, [output for output, _ in pairs], [each for _, each in pairs]

    def _run(self, microbatch: int, received: Sequence[Tensor]) -> tuple[list[Tensor], _Graph]:
        taken = [each.detach() for each in received]
        leaves = [
            tensor.requires_grad_()
            for tensor, crossing in zip(taken, self.receives, strict=True)
            if crossing.gradient
        ]
        if microbatch not in self._inputs:
            self.prepare(microbatch)
        made = self._module(*taken, inputs=self._inputs.pop(microbatch))
        if isinstance(made, Tensor):
            self.losses[microbatch] = made.detach()
            return [], _Graph(leaves, [made * self._scale])
        graded = [
            tensor for tensor, crossing in zip(made, self.sends, strict=True) if crossing.gradient
        ]
        return [each.detach() for each in made], _Graph(leaves, graded)
