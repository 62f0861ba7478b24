"""A stage of any model as an nn.Module: what crosses its cuts goes in and comes out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self

from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from partopt.errors import PartoptError
from partopt.profiler.tensors import Inputs, Loss
from partopt.runtime.buffers import buffer_slots
from partopt.runtime.crossings import check_cuts, cut_before, with_stride
from partopt.runtime.events import Key, Likeness, Record
from partopt.runtime.forward import StageForward
from partopt.runtime.parameters import own_parameter_names
from partopt.runtime.placeholder import Absent
from partopt.runtime.weightless import has_no_values


class StageModule(nn.Module):
    """Layers [start, stop) of a recorded model, run by the model's own forward.

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
        own = own_parameter_names(record, start, stop)
        _check_values(model, own, f"layers {start} to {stop - 1}")
        self.stage, self.stages = place
        self._before, self._behind = cut_before(record, start), cut_before(record, stop)
        self.receives, self.sends = self._before.crossings, self._behind.crossings
        self._named = f"the stage of layers {start} to {stop - 1}"
        self._written = _storages_written(record, start, stop)
        self._forward = StageForward(model, record, start, stop, self._behind, loss_fn)
        self._absent = tree_map_only(
            Tensor, lambda each: Absent(Likeness.of(each), self._named), example
        )
        holds, changed = _holds_buffer(record, start, stop), record.changed_buffers
        self.changing = buffer_slots(
            model, lambda name: holds(name) and (changed is None or name in changed)
        )
        buffers = model.named_buffers(remove_duplicate=False)
        self._foreign = _parameters_without(model, own)
        self._foreign |= {name for name, _ in buffers if not holds(name)}
        self._models = (model,)  # not a child: its children are
        self._modules, self._parameters = model._modules, model._parameters
        self._buffers = model._buffers
        self._non_persistent_buffers_set = model._non_persistent_buffers_set
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
        self._check_received(received)
        given: dict[Key, Tensor] = {}
        own: dict[Key, Tensor] = {}
        for key, like, tensor in zip(
            self._before.keys, self._before.likeness, received, strict=True
        ):
            own[key] = with_stride(tensor, like)
            given[key] = own[key].clone() if like.storage in self._written else own[key]
        made, loss = self._forward.run(self._absent if inputs is None else inputs, given)
        if loss is not None:
            return loss
        results = [made[key] if key in made else own[key] for key in self._behind.keys]
        return tuple(each.contiguous() for each in results)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The stage's parameters, frozen ones too, by the first of their names."""
        return self._own(prefix, super().named_parameters("", recurse, remove_duplicate))

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """The buffers of the stage's layers, and those of no layer."""
        return self._own(prefix, super().named_buffers("", recurse, remove_duplicate))

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
        own = {name: each for name, each in state_dict.items() if name not in self._foreign}
        return super().load_state_dict(own, strict, assign)

    def train(self, mode: bool = True) -> Self:
        """Set the mode of the stage and of all layers."""
        self.whole.training = mode
        return super().train(mode)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Convert what has values (`Module.to`, `half`, `cuda`)."""
        super()._apply(lambda each: each if each.is_meta else fn(each), recurse)  # type: ignore
        return self

    def _own(self, prefix: str, found: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        for name, each in found:
            if name not in self._foreign:
                yield f"{prefix}.{name}" if prefix else name, each

    def _check_received(self, received: tuple[Tensor, ...]) -> None:
        found = [(list(each.shape), each.dtype) for each in received]
        expected = [(list(each.shape), each.dtype) for each in self.receives]
        if found != expected:
            raise PartoptError(
                f"{self._named} receives {expected}, it was given {found}",
                "give it what the stage before returns, of as many samples as the plan's",
                code="cut-mismatch",
            )


def _check_values(model: nn.Module, own: list[str], layers: str) -> None:
    for name in own:
        if has_no_values(model.get_parameter(name)):
            raise PartoptError(
                f'the parameter "{name}" of {layers} has no values',
                "call `materialise` with the names of the stage's parameters",
                code="no-weights",
                parameter=name,
            )


def _forgive_foreign(stage: StageModule, incompatible: Any) -> None:
    """A state that lacks what is of other stages lacks nothing."""
    missing = incompatible.missing_keys
    missing[:] = [name for name in missing if name not in stage._foreign]


def _parameters_without(model: nn.Module, own: list[str]) -> set[str]:
    """All names of the parameters that are not among those with the first names `own`."""
    kept = {id(model.get_parameter(name)) for name in own}
    every = model.named_parameters(remove_duplicate=False)
    return {name for name, each in every if id(each) not in kept}


def _holds_buffer(record: Record, start: int, stop: int) -> Callable[[str], bool]:
    """Whether a buffer is of a unit of layers [start, stop), or of none."""
    units = {key.name for key in record.layers}
    own = {key.name for key in record.layers[start:stop]}

    def holds(name: str) -> bool:
        holders = {unit for unit in units if not unit or name.startswith(f"{unit}.")}
        return not holders or bool(holders & own)

    return holds


def _storages_written(record: Record, start: int, stop: int) -> set[int]:
    return {
        storage
        for event in record.events
        if start <= event.layer < stop
        for storage in event.storages_written
    }
