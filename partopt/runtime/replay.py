"""A stage of any nn.Module: the model's own forward, or its graph by torch.export, run in part."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from partopt.errors import PartoptError
from partopt.profiler.step import Inputs, Loss
from partopt.runtime.buffers import BufferState, Slot, buffer_slots
from partopt.runtime.crossings import check_cuts, cut_before, with_stride
from partopt.runtime.events import Key, Record
from partopt.runtime.forward import StageForward
from partopt.runtime.graph_forward import GraphForward
from partopt.runtime.graph_record import GraphRecord
from partopt.runtime.parameters import Slots, own_parameter_names
from partopt.runtime.random_state import RandomState
from partopt.runtime.split_backward import WeightPart, backward_of_inputs
from partopt.runtime.stage import Crossing, Stage
from partopt.runtime.weightless import has_no_values


@dataclass
class _Graph:
    """What the backward of a microbatch starts from.

    `leaves` are the received tensors that have a gradient, `outputs` the sent ones or the loss.
    """

    leaves: list[Tensor]
    outputs: list[Tensor]
    weights: list[Tensor]


@dataclass
class _Kept:
    """What the forward of a microbatch starts from, to run it once more."""

    received: list[Tensor]
    random: RandomState
    weights: Mapping[str, Tensor] | None


class ReplayStage(Stage):
    """Layers [start, stop) of a recorded model; see `partopt.runtime.stage.Stage`.

    `own_parameters` are those that the stage needs, frozen ones too, by the first of their names:
    one that other stages need as well has the same name there. `losses` are those of the
    microbatches that the last stage has run, before they are scaled; who reads them clears them.
    """

    def __init__(
        self,
        model: nn.Module,
        record: Record,
        start: int,
        stop: int,
        loss_fn: Loss | None,
        inputs_of: Callable[[int], Inputs],
        scale: float,
        recompute: bool,
    ) -> None:
        names = own_parameter_names(record, start, stop)
        self._slots = Slots(model, names)
        self.own_parameters = self._slots.parameters
        self.parameters = [each for each in self.own_parameters.values() if each.requires_grad]
        self.losses: dict[int, Tensor] = {}
        self.model, self._inputs_of, self._scale = model, inputs_of, scale
        self._recomputes = recompute
        self._before, self._behind = cut_before(record, start), cut_before(record, stop)
        self.receives: Sequence[Crossing] = self._before.crossings
        self.sends: Sequence[Crossing] = self._behind.crossings
        self._written = _storages_written(record, start, stop)
        self._forward: GraphForward | StageForward = (
            GraphForward(model, record, start, stop, self._behind)
            if isinstance(record, GraphRecord)
            else StageForward(model, record, start, stop, self._behind, loss_fn)
        )
        self._buffers = _changing_buffers(model, record, start, stop)
        device = next((each.device for each in self.own_parameters.values()), torch.device("cpu"))
        self._device = device
        self._graphs: dict[int, _Graph] = {}
        self._kept: dict[int, _Kept] = {}
        self._weight_parts: dict[int, WeightPart] = {}

    @property
    def changing_buffers(self) -> dict[str, Tensor]:
        """The buffers that the stage's forwards may change, by their names in the model."""
        buffers = {name: holder[key] for holder, key, name in self._buffers}
        return {name: each for name, each in buffers.items() if each is not None}

    def use_weights(self, weights: Mapping[str, Tensor] | None) -> None:
        """Run from here on with these tensors in place of own parameters; None: with their own.

        The backward of a microbatch is that of the weights of its forward, in whose `.grad` its
        gradients add up. `weights` has names of `own_parameters`; those that it leaves out stay.
        """
        self._slots.use(weights)

    def forward(self, microbatch: int, received: Sequence[Tensor]) -> list[Tensor]:
        """Run the forward; where the stage recomputes, only its inputs are kept."""
        if not self._recomputes:
            sent, self._graphs[microbatch] = self._run(microbatch, received)
            return sent
        kept = _Kept(list(received), RandomState(self._device), self._slots.in_use)
        self._kept[microbatch] = kept
        with torch.no_grad():
            sent, _ = self._run(microbatch, received)
        return sent

    def recompute(self, microbatch: int) -> None:
        """Run the forward once more from the kept inputs, for a backward that comes next.

        It draws the same random numbers; buffers, such as running statistics, stay as they are.
        """
        kept = self._kept.pop(microbatch)
        buffers = BufferState(self._buffers)
        with kept.random.again(), self._slots.used(kept.weights):
            _, self._graphs[microbatch] = self._run(microbatch, kept.received)
        buffers.restore()

    def backward(self, microbatch: int, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Run the whole backward: gradients of `sends` to gradients of `receives`."""
        graph = self._take_graph(microbatch)
        outputs, gradients = _with_gradients(graph.outputs, gradients)
        if outputs:
            torch.autograd.backward(outputs, gradients)
        return [_gradient_of(leaf) for leaf in graph.leaves]

    def backward_input(self, microbatch: int, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Run the backward of the inputs alone; `backward_weight` follows some time later."""
        graph = self._take_graph(microbatch)
        outputs, gradients = _with_gradients(graph.outputs, gradients)
        found, self._weight_parts[microbatch] = backward_of_inputs(
            outputs, gradients, graph.leaves, graph.weights
        )
        return found

    def backward_weight(self, microbatch: int) -> None:
        """Run the backward of the weights alone."""
        self._weight_parts.pop(microbatch).run()

    def _take_graph(self, microbatch: int) -> _Graph:
        if microbatch in self._kept:  # the schedule recomputes within the backward
            self.recompute(microbatch)
        return self._graphs.pop(microbatch)

    def _run(self, microbatch: int, received: Sequence[Tensor]) -> tuple[list[Tensor], _Graph]:
        leaves: list[Tensor] = []
        given: dict[Key, Tensor] = {}
        own: dict[Key, Tensor] = {}
        for key, like, tensor in zip(
            self._before.keys, self._before.likeness, received, strict=True
        ):
            mine = with_stride(tensor.detach(), like)
            if like.gradient:
                leaves.append(mine.requires_grad_())
            own[key] = mine
            given[key] = mine.clone() if like.storage in self._written else mine
        made, loss = self._forward.run(self._inputs_of(microbatch), given)
        weights = self._slots.trained()
        if loss is not None:
            self.losses[microbatch] = loss.detach()
            return [], _Graph(leaves, [loss * self._scale], weights)
        results = [made[key] if key in made else own[key] for key in self._behind.keys]
        graded = [
            each for each, like in zip(results, self._behind.likeness, strict=True) if like.gradient
        ]
        return [each.detach().contiguous() for each in results], _Graph(leaves, graded, weights)


def replay_stage(
    model: nn.Module,
    record: Record,
    start: int,
    stop: int,
    loss_fn: Loss | None,
    inputs_of: Callable[[int], Inputs],
    scale: float,
    recompute: bool = False,
) -> ReplayStage:
    """The stage of layers [start, stop) of `model`, of which `record` is.

    `inputs_of(microbatch)` are the model's inputs on this rank, `scale` is what the loss is
    multiplied by: 1 / microbatches of an iteration. With `recompute` forwards keep their inputs
    alone. Raises PartoptError where the model cannot be cut there, or has no weights there.
    """
    check_cuts(record, (start, stop))
    for name in own_parameter_names(record, start, stop):
        if has_no_values(model.get_parameter(name)):
            raise PartoptError(
                f'the parameter "{name}" of layers {start} to {stop - 1} has no values',
                "call `materialise` with the names of the stage's parameters",
                code="no-weights",
                parameter=name,
            )
    return ReplayStage(model, record, start, stop, loss_fn, inputs_of, scale, recompute)


def _storages_written(record: Record, start: int, stop: int) -> set[int]:
    return {
        storage
        for event in record.events
        if start <= event.layer < stop
        for storage in event.storages_written
    }


def _changing_buffers(model: nn.Module, record: Record, start: int, stop: int) -> list[Slot]:
    """The buffers that a forward of the stage changes, or may change."""
    units = {key.name for key in record.layers}
    own = {key.name for key in record.layers[start:stop]}
    changed = record.changed_buffers

    def is_own(name: str) -> bool:
        holders = {unit for unit in units if not unit or name.startswith(f"{unit}.")}
        return (changed is None or name in changed) and (not holders or bool(holders & own))

    return buffer_slots(model, is_own)


def _with_gradients(
    outputs: Sequence[Tensor], gradients: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """The outputs that have a gradient, with it; of a loss it is 1."""
    given = gradients or [torch.ones_like(each) for each in outputs]
    pairs = [pair for pair in zip(outputs, given, strict=True) if pair[0].requires_grad]
    return [output for output, _ in pairs], [gradient for _, gradient in pairs]


def _gradient_of(leaf: Tensor) -> Tensor:
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad.contiguous()
