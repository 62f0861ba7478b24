"""Stages of a model in one process, against the model itself."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from partopt.documents.profile import Profile
from partopt.profiler.layers import LayerKey
from partopt.profiler.step import run_loss
from partopt.replay.cuts import held_parameter_names
from partopt.replay.events import Record
from partopt.replay.recording import record_model
from partopt.replay.replayed_stage import ReplayStage, StageModule, materialise
from tests.profiler.helpers import structure

MICROBATCHES = 2


@dataclass
class Replayed:
    """A model, its layers, and the inputs of its microbatches."""

    model: nn.Module
    inputs: list[Any]
    loss_fn: Any
    layers: list[LayerKey]
    profile: Profile

    @cached_property
    def record(self) -> Record:
        return record_model(self.model, self.inputs[0], self.loss_fn, self.layers)

    def thirds(self) -> list[int]:
        """Where three stages begin, as equal as can be in layers."""
        return [0, len(self.layers) // 3, 2 * len(self.layers) // 3]

    def modules(self, starts: Sequence[int]) -> list[StageModule]:
        """Stages that begin there, each on a copy of the model with its own parameters alone."""
        record, modules = self.record, []
        for start, stop in zip(starts, [*starts[1:], len(self.layers)], strict=True):
            model = copy.deepcopy(self.model)
            names = held_parameter_names(record, start, stop)
            materialise(model, names, self.model)
            place, example = (len(modules), len(starts)), self.inputs[0]
            modules.append(StageModule(model, record, start, stop, self.loss_fn, place, example))
        return modules

    def stages(self, starts: Sequence[int], **options: Any) -> list[ReplayStage]:
        """The same, as an engine runs them."""
        scale = 1 / len(self.inputs)
        return [
            ReplayStage(module, self.inputs.__getitem__, scale, **options)
            for module in self.modules(starts)
        ]

    @cached_property
    def reference(self) -> tuple[list[Tensor], dict[str, Tensor], nn.Module]:
        """Losses and gradients of a copy of the model itself, which has seen the inputs once."""
        model = copy.deepcopy(self.model)
        losses = [run_loss(model, each, self.loss_fn) for each in self.inputs]
        sum(losses).backward()  # type: ignore[union-attr]
        gradients = {
            name: each.grad / len(self.inputs)
            for name, each in model.named_parameters()
            if each.grad is not None
        }
        return [loss.detach() for loss in losses], gradients, model


def replayed(
    build: Callable[[], nn.Module],
    inputs_of: Callable[[int], Any],
    size: int = 2,
    loss_fn: Any = None,
    **options: Any,
) -> Replayed:
    """The model on microbatches of `size` samples, with the layers of its profile."""
    torch.manual_seed(0)
    model = build().train()
    inputs = [inputs_of(size) for _ in range(MICROBATCHES)]
    options = {"granularity": "auto", "microbatch_sizes": [size], **options}
    profile = structure(copy.deepcopy(model), lambda _: inputs[0], loss_fn, **options)
    layers = [LayerKey(layer.name, layer.call) for layer in profile.layers]
    return Replayed(model, inputs, loss_fn, layers, profile)


def replay_stage(
    model: nn.Module, record: Record, start: int, stop: int, loss_fn: Any, *given: Any
) -> ReplayStage:
    """The stage of layers [start, stop); `given` are its inputs, a scale, and if it recomputes."""
    return ReplayStage(StageModule(model, record, start, stop, loss_fn), *given)


def run_forwards(stages: Sequence[ReplayStage]) -> list[Tensor]:
    """The forward of every microbatch; the losses."""
    for microbatch in range(MICROBATCHES):
        tensors: list[Tensor] = []
        for stage in stages:
            check_crossings(tensors, stage.receives)
            # a message is a copy
            tensors = stage.forward(microbatch, [each.clone() for each in tensors])
    return list(stages[-1].losses.values())


def run_backwards(
    stages: Sequence[ReplayStage], split: bool = False, recompute: bool = False
) -> None:
    """The backward of every microbatch."""
    for microbatch in range(MICROBATCHES):
        gradients: list[Tensor] = []
        for stage in reversed(stages):
            if recompute:
                stage.recompute(microbatch)
            backward = stage.backward_input if split else stage.backward
            gradients = [each.clone() for each in backward(microbatch, gradients)]
            check_crossings(gradients, [each for each in stage.receives if each.gradient])
    if split:
        for microbatch in range(MICROBATCHES):
            for stage in stages:
                stage.backward_weight(microbatch)


def check_crossings(tensors: Sequence[Tensor], crossings: Sequence[Any]) -> None:
    found = [(tuple(each.shape), each.dtype) for each in tensors]
    assert found == [(each.shape, each.dtype) for each in crossings]
    assert all(each.is_contiguous() for each in tensors)


def summed_gradients(stages: Sequence[ReplayStage]) -> dict[str, Tensor]:
    """Gradients by the first name of each parameter, summed over the stages that have it."""
    total: dict[str, Tensor] = {}
    for stage in stages:
        for name, each in stage.held_parameters.items():
            if each.grad is not None:
                total[name] = total[name] + each.grad if name in total else each.grad
    return total


def worst_error(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest difference of a gradient, over the largest entry of all of that parameter's."""
    assert found.keys() == expected.keys()
    return max(
        float((found[name] - each).abs().max() / each.abs().max().clamp_min(1e-3))
        for name, each in expected.items()
    )


def error_of_stages(case: Replayed, starts: Sequence[int] | None = None, **options: Any) -> float:
    """The worst error of the gradients of stages, whose losses must be those of the model."""
    recompute, tolerance = options.pop("recompute", False), options.pop("tolerance", 1e-6)
    losses, gradients, _ = case.reference
    stages = case.stages(starts or case.thirds(), recompute=recompute)
    torch.testing.assert_close(run_forwards(stages), losses, rtol=tolerance, atol=0.0)
    run_backwards(stages, recompute=recompute, **options)
    return worst_error(summed_gradients(stages), gradients)
