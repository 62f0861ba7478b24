"""A stage of any model by replay: as an nn.Module, and as an engine runs it.

What crosses the cuts of the stage goes into the module and comes out of it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from partopt.errors import PartoptError
from partopt.profiler.tensors import Inputs, Loss
from partopt.profiler.weightless import RandomNumbers
from partopt.replay.buffers import BufferState, buffer_slots
from partopt.replay.cuts import check_cuts, cut_before, held_parameter_names, with_stride
from partopt.replay.events import Key, Record
from partopt.replay.forward import StageForward, absent
from partopt.replay.packing import Packing
from partopt.replay.split_backward import WeightPart, backward_of_inputs
from partopt.replay.stage import Crossing, RunnableStage, with_gradient
from partopt.replay.weightless import has_no_values


def materialise(
    model: nn.Module,
    names: Collection[str],
    whole: nn.Module,
    device: torch.device | None = None,
) -> None:
    """Give the parameters `names` of `model`, and all its other tensors, the values of `whole`.

    They are copies. The other parameters of `model` are on the meta device afterwards, frozen. Tied
    parameters stay tied, and number formats as they were.
    """
    values = dict(whole.named_parameters(remove_duplicate=False))
    buffers = dict(whole.named_buffers(remove_duplicate=False))
    modules = dict(whole.named_modules())
    kept_names = set(names)
    keep = {id(p) for name, p in model.named_parameters() if name in kept_names}
    made: dict[int, nn.Parameter] = {}

    def copy(value: Tensor, dtype: torch.dtype) -> Tensor:
        return value.detach().to(device or value.device, dtype, copy=True)

    for prefix, module in model.named_modules():
        dot = f"{prefix}." if prefix else ""
        for name, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            if id(parameter) in keep and id(parameter) not in made:
                value = copy(values[dot + name], parameter.dtype)
                made[id(parameter)] = nn.Parameter(value, requires_grad=parameter.requires_grad)
            elif id(parameter) not in made:
                empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
                made[id(parameter)] = nn.Parameter(empty, requires_grad=False)
            setattr(module, name, made[id(parameter)])  # an RNN keeps a list of them, too
        for name, buffer in list(module._buffers.items()):
            if buffer is not None:
                module._buffers[name] = copy(buffers[dot + name], buffer.dtype)
        for name, value in vars(modules[prefix]).items():
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                vars(module)[name] = copy(value, value.dtype)


class StageModule(nn.Module):
    """Layers [start, stop) of a recorded model, run by the model's forward.

    They are the stage `stage` of `stages`. `receives` and `sends` are what crosses the cuts before
    and behind them. Parameters, buffers and `state_dict` are those of these layers, by their names
    in the model, of whose modules this one is made; a parameter that other stages need, too, is
    there as well. `changing` are the slots of the buffers that a forward may change.
    """

    def __init__(
        self,
        model: nn.Module,
        record: Record,
        start: int,
        stop: int,
        loss_fn: Loss | None,
        place: tuple[int, int] = (0, 1),
        example: Inputs = None,
    ) -> None:
        """The parameters of other layers may lack values; `example` are inputs of the model.

        `place` is the stage's number, and how many there are.

        Raises PartoptError where the model cannot be cut there, or has no weights there.
        """
        super().__init__()
        check_cuts(record, (start, stop))
        names = held_parameter_names(record, start, stop)
        for name in names:
            if has_no_values(model.get_parameter(name)):
                raise PartoptError(
                    f'the parameter "{name}" of layers {start} to {stop - 1} has no values',
                    "call `materialise` with the names of the stage's parameters",
                    code="no-weights",
                )
        self.stage, self.stages = place
        self._before, self._behind = cut_before(record, start), cut_before(record, stop)
        self.receives, self.sends = self._before.crossings, self._behind.crossings
        self._named = f"the stage of layers {start} to {stop - 1}"
        self._written = {
            storage
            for event in record.events
            if start <= event.layer < stop
            for storage in event.storages_written
        }
        span = range(start, stop)
        self._forward = StageForward(model, record, span, self._behind.keys, loss_fn)
        self._absent = absent(example, self._named)
        self._models = (model,)  # not a child: its children are
        self._modules, self._parameters = model._modules, model._parameters
        self._buffers = model._buffers
        self._non_persistent_buffers_set = model._non_persistent_buffers_set
        kept = {id(model.get_parameter(name)) for name in names}
        parameters = model.named_parameters(remove_duplicate=False)
        self._foreign = {name for name, parameter in parameters if id(parameter) not in kept}
        units = {key.name: False for key in record.layers}  # whether it is of this stage
        units |= {key.name: True for key in record.layers[start:stop]}
        for name, _ in model.named_buffers(remove_duplicate=False):
            owners = [o for unit, o in units.items() if not unit or name.startswith(f"{unit}.")]
            if owners and not any(owners):  # of a unit of another stage, not of none
                self._foreign.add(name)
        changed = record.changed_buffers
        self.changing = buffer_slots(
            model,
            lambda name: name not in self._foreign and (changed is None or name in changed),
        )
        self.register_load_state_dict_post_hook(_forgive_foreign)  # type: ignore[no-untyped-call]

    @property
    def whole(self) -> nn.Module:
        """The model of which this is a stage."""
        return self._models[0]

    def forward(self, *received: Tensor, inputs: Inputs = None) -> tuple[Tensor, ...] | Tensor:
        """The tensors of `sends` from those of `receives`; of the last stage the loss.

        `inputs` are the model's, of the same microbatch; a stage that looks at no more of them than
        shapes goes without. Raises PartoptError where it needs them, where it is given other
        tensors, or where the forward takes another way than the recorded one.
        """
        found = [(list(tensor.shape), tensor.dtype) for tensor in received]
        expected = [(list(crossing.shape), crossing.dtype) for crossing in self.receives]
        if found != expected:
            raise PartoptError(
                f"{self._named} receives {expected}, it was given {found}",
                "give it what the stage before returns, of as many samples as the plan's",
                code="cut-mismatch",
            )
        given: dict[Key, Tensor] = {}
        arrived: dict[Key, Tensor] = {}
        before = zip(self._before.keys, self._before.likeness, received, strict=True)
        for key, like, tensor in before:
            arrived[key] = with_stride(tensor, like)
            given[key] = arrived[key].clone() if like.storage in self._written else arrived[key]
        made, loss = self._forward.run(self._absent if inputs is None else inputs, given)
        if loss is not None:
            return loss
        results = [made[key] if key in made else arrived[key] for key in self._behind.keys]
        return tuple(result.contiguous() for result in results)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The stage's parameters, frozen ones too, by the first of their names."""
        return self._of_stage(prefix, super().named_parameters("", recurse, remove_duplicate))

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """The buffers of the stage's layers, and those of no layer."""
        return self._of_stage(prefix, super().named_buffers("", recurse, remove_duplicate))

    def state_dict(
        self, *, destination: Any = None, prefix: str = "", keep_vars: bool = False
    ) -> Any:
        """The stage's part of the model's."""
        state = super().state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        for name in self._foreign:
            state.pop(prefix + name, None)
        return state

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load the stage's part, of what may be the whole model's."""
        state = {name: value for name, value in state_dict.items() if name not in self._foreign}
        return super().load_state_dict(state, strict, assign)

    def train(self, mode: bool = True) -> Self:
        """Set the mode of the stage and of all layers."""
        self.whole.training = mode
        return super().train(mode)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Convert what has values (`Module.to`, `half`, `cuda`)."""
        super()._apply(lambda tensor: tensor if tensor.is_meta else fn(tensor), recurse)  # type: ignore
        return self

    def _of_stage(self, prefix: str, found: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        for name, value in found:
            if name not in self._foreign:
                yield f"{prefix}.{name}" if prefix else name, value


def _forgive_foreign(stage: StageModule, incompatible: Any) -> None:
    """A state that lacks what is of other stages lacks nothing."""
    missing = incompatible.missing_keys
    missing[:] = [name for name in missing if name not in stage._foreign]


class _Graph(NamedTuple):
    """Where the backward of a microbatch starts.

    `leaves` are the received tensors that have a gradient, `outputs` the sent ones or the loss.
    """

    leaves: list[Tensor]
    outputs: list[Tensor]


class ReplayStage(RunnableStage):
    """A `module` that runs microbatches; see `partopt.replay.stage.RunnableStage`.

    `inputs_of(microbatch)` are the model's inputs on this rank, `scale` is what the loss is
    multiplied by: 1 / microbatches of an iteration. With `recompute` forwards keep their inputs
    alone. `held_parameters` are those that the stage needs, frozen ones too, by the first of their
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
        # draws ahead on a GPU alone: a processor that draws does not compute
        self.needs_inputs, self.draws_ahead = True, False
        self.model = module.whole
        self.held_parameters = dict(module.named_parameters())
        self.parameters = [p for p in self.held_parameters.values() if p.requires_grad]
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
        return {name: buffer for name, buffer in buffers.items() if buffer is not None}

    def warm_up(self, inputs: Inputs, device: torch.device) -> None:
        """Run forwards, backwards and packing, on zeros and these inputs, and leave no trace.

        A GPU loads a kernel when it first runs, and may wait for all its work before it does; of
        a second backward the one that adds gradients up.
        """
        numbers, buffers, number = RandomNumbers(), BufferState(self._module.changing), -1
        received = [
            torch.zeros(
                crossing.shape, dtype=crossing.dtype, device="cpu" if crossing.on_host else device
            )
            for crossing in self.receives
        ]
        self.needs_inputs = not 0 < self._module.stage < self._module.stages - 1
        if not self.needs_inputs:
            try:
                self._module(*received)
            except PartoptError as error:
                self.needs_inputs = error.code == "inputs-missing"
        self.draws_ahead = self.needs_inputs
        for _ in range(2):
            self._inputs[number] = inputs if self.needs_inputs else None
            made = self.forward(number, received)
            sent = zip(made, self.sends, strict=True)
            back = self.backward(
                number, [torch.zeros_like(tensor) for tensor, crossing in sent if crossing.gradient]
            )
        for tensors, crossings in ((made, self.sends), (back, with_gradient(self.receives))):
            packing = Packing(crossings)
            packing.give_back(packing.unpack(packing.pack(tensors, device)))
        self.losses.pop(number, None)
        for parameter in self.parameters:
            parameter.grad = None
        buffers.restore()
        numbers.restore()

    def prepare(self, microbatch: int) -> None:
        """Have the model's inputs of a microbatch ready, whose forward comes next."""
        self._inputs[microbatch] = self._inputs_of(microbatch) if self.needs_inputs else None

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
        given = gradients or [torch.ones_like(output) for output in graph.outputs]
        pairs = [p for p in zip(graph.outputs, given, strict=True) if p[0].requires_grad]
        return graph.leaves, [output for output, _ in pairs], [gradient for _, gradient in pairs]

    def _run(self, microbatch: int, received: Sequence[Tensor]) -> tuple[list[Tensor], _Graph]:
        taken = [tensor.detach() for tensor in received]
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
        return [tensor.detach() for tensor in made], _Graph(leaves, graded)
