"""Recomputation, running statistics, weight versions, ties, and models without weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from partopt.profiler.step import run_loss
from partopt.profiler.weightless import build_without_weights, fake_mode
from partopt.runtime.cuts import cut_before, own_parameter_names, shared_parameters
from partopt.runtime.recording import record_model
from partopt.runtime.replay import ReplayStage, materialise
from partopt.runtime.units import number_calls
from tests.profiler import zoo_language as language
from tests.profiler import zoo_odd as odd
from tests.profiler.helpers import Parts, linear, needs_transformers
from tests.runtime.replayed import (
    Replayed,
    replay_stage,
    replayed,
    run_backwards,
    run_forwards,
    summed_gradients,
    worst_error,
)
from tests.runtime.test_replay import gpt_ids, gpt_loss, ids, small_gpt, thrice, vectors


def sequence(*modules: nn.Module) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(*copy.deepcopy(modules))


def leaves(build: Callable[[], nn.Module]) -> Replayed:
    """A model on vectors, each of whose leaves is a layer."""
    return replayed(build, vectors, size=4, granularity="leaf")


def test_what_is_recomputed_drops_the_same_numbers() -> None:
    case = leaves(sequence(linear(), nn.Dropout(0.5), linear(), nn.Dropout(0.5), linear()))
    gradients = []
    for recompute in (False, True):
        torch.manual_seed(3)
        stages = case.stages([0, 2, 4], recompute=recompute)
        torch.manual_seed(4)
        run_forwards(stages)
        after = torch.get_rng_state()
        run_backwards(stages, recompute=recompute)
        assert torch.equal(torch.get_rng_state(), after)
        gradients.append(summed_gradients(stages))
    assert worst_error(*gradients) == 0.0


def test_random_numbers_between_layers_are_drawn_by_one_stage() -> None:
    def forward(self: Parts, x: Tensor) -> Tensor:
        x = self.a(x)
        mask = torch.rand(4) > 0.5
        return self.c(self.b(x * mask) * mask).square().mean()

    case = leaves(lambda: Parts(forward, a=linear(), b=linear(), c=linear()))
    stages = case.stages([0, 1, 2])
    torch.manual_seed(3)
    losses, gradients, _ = case.reference
    torch.manual_seed(3)
    assert run_forwards(stages) == losses
    run_backwards(stages)
    assert worst_error(summed_gradients(stages), gradients) == 0.0


def test_recomputation_keeps_the_inputs_alone() -> None:
    case = leaves(sequence(linear(), nn.Linear(4, 999), nn.Linear(999, 4), linear()))
    kept = []
    for recompute in (False, True):
        first, middle, _ = case.stages([0, 1, 3], recompute=recompute)
        received = first.forward(0, [])
        saved: list[int] = []

        def pack(tensor: Tensor, saved: list[int] = saved) -> Tensor:
            saved.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda each: each):
            middle.forward(0, received)
        kept.append(sum(saved))
    assert kept[0] > 0
    assert kept[1] == 0


@pytest.mark.parametrize("recompute", [False, True])
def test_running_statistics_are_those_of_the_model(recompute: bool) -> None:
    norms = (nn.BatchNorm1d(4), nn.BatchNorm1d(4))
    case = leaves(sequence(linear(), norms[0], nn.ReLU(inplace=True), linear(), norms[1]))
    _, _, whole = case.reference
    stages = case.stages([0, 2, 3], recompute=recompute)
    run_forwards(stages)
    run_backwards(stages, recompute=recompute)
    for stage, layer in ((stages[0], "1"), (stages[2], "4")):
        own = stage.model.get_submodule(layer)
        expected = whole.get_submodule(layer)
        assert torch.equal(own.running_mean, expected.running_mean)
        assert torch.equal(own.running_var, expected.running_var)
        assert own.num_batches_tracked == 2


class Counting(nn.Linear):
    """Replaces its buffer in each forward."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return super().forward(x)


def test_a_buffer_that_is_replaced_counts_each_microbatch_once() -> None:
    case = leaves(sequence(linear(), Counting(), linear()))
    assert case.record.changed_buffers == {"1.calls"}
    assert case.model.get_buffer("1.calls") == 0
    stages = case.stages([0, 1, 2], recompute=True)
    run_forwards(stages)
    run_backwards(stages, recompute=True)
    assert stages[1].model.get_buffer("1.calls") == 2


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_a_microbatch_has_one_version_of_the_weights(split: bool, recompute: bool) -> None:
    """Each of two microbatches runs with memory of its own as weights, forward and backward."""
    case = leaves(thrice)
    stages = case.stages([0, 2, 4], recompute=recompute)
    versions = [
        {name: torch.randn_like(each) for name, each in case.model.named_parameters()}
        for _ in case.inputs
    ]
    expected: dict[str, Tensor] = {}
    tensors: list[Tensor] = []
    for microbatch, version in enumerate(versions):
        use(stages, version)
        for stage in stages:
            tensors = stage.forward(microbatch, tensors)
    for microbatch, version in enumerate(versions):
        use(stages, version if recompute else versions[1 - microbatch])
        gradients: list[Tensor] = []
        for stage in reversed(stages):
            backward = stage.backward_input if split else stage.backward
            gradients = backward(microbatch, gradients)
            if split:
                stage.backward_weight(microbatch)
        whole = copy.deepcopy(case.model)
        whole.load_state_dict(version)
        (run_loss(whole, case.inputs[microbatch], None) / 2).backward()
        for name, each in whole.named_parameters():
            assert each.grad is not None
            expected[name] = expected.get(name, torch.zeros_like(each)) + each.grad
    assert worst_error(summed_gradients(stages), expected) < 1e-6


def use(stages: list[ReplayStage], version: dict[str, Tensor]) -> None:
    """Give all stages the memory of these weights."""
    for stage in stages:
        for name, each in stage.own_parameters.items():
            each.data = version[name]


def test_a_tied_weight_has_one_name_in_all_stages() -> None:
    case = replayed(small_gpt, gpt_ids, loss_fn=gpt_loss)
    starts = [0, 2, len(case.layers) - 1]
    assert shared_parameters(case.record, starts) == {"tokens.weight": [0, 2]}
    first, middle, last = case.stages(starts)
    assert "tokens.weight" in first.own_parameters
    assert list(last.own_parameters) == ["tokens.weight"]
    assert "positions" in first.own_parameters
    assert not {"tokens.weight", "head.weight", "positions"} & middle.own_parameters.keys()
    assert last.parameters == [last.own_parameters["tokens.weight"]]


def test_a_block_called_in_two_stages_is_shared() -> None:
    case = leaves(thrice)
    assert shared_parameters(case.record, [0, 2]) == {"block.weight": [0, 1], "block.bias": [0, 1]}


def test_a_frozen_stage_in_front_has_no_gradient() -> None:
    def build() -> nn.Module:
        return nn.Sequential(linear().requires_grad_(False), linear(), linear())

    case = leaves(build)
    _, gradients, _ = case.reference
    stages = case.stages([0, 1, 2])
    assert [each.gradient for each in stages[1].receives] == [False]
    assert stages[0].parameters == []
    assert list(stages[0].own_parameters) == ["0.weight"]
    run_forwards(stages)
    run_backwards(stages, split=True)
    assert worst_error(summed_gradients(stages), gradients) == 0.0


class Handed(nn.Module):
    """A head that multiplies by the weight of a module that is not its own."""

    def __init__(self, owner: nn.Linear) -> None:
        super().__init__()
        self.owner = [owner]

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.owner[0].weight


def handed() -> nn.Module:
    stem = linear()
    return Parts(lambda self, x: self.head(self.b(self.stem(x))), stem=stem, b=linear(),
                 head=Handed(stem))  # fmt: skip


def test_a_weight_that_a_unit_reads_from_elsewhere_is_its_stage_s() -> None:
    case = leaves(handed)
    assert own_parameter_names(case.record, 2, 3) == ["stem.weight"]
    assert shared_parameters(case.record, [0, 1, 2]) == {"stem.weight": [0, 2]}


@pytest.mark.parametrize("split", [False, True])
def test_gradients_add_up_in_the_memory_that_is_there(split: bool) -> None:
    case = leaves(thrice)
    _, gradients, _ = case.reference
    stages = case.stages([0, 2, 4])
    places = [[torch.zeros_like(each) for each in stage.parameters] for stage in stages]
    for stage, own in zip(stages, places, strict=True):
        for parameter, place in zip(stage.parameters, own, strict=True):
            parameter.grad = place
    run_forwards(stages)
    run_backwards(stages, split=split)
    for stage, own in zip(stages, places, strict=True):
        assert all(
            parameter.grad is place and place.any()
            for parameter, place in zip(stage.parameters, own, strict=True)
        )
    assert worst_error(summed_gradients(stages), gradients) < 1e-6


def test_two_parts_of_a_backward_do_the_work_of_one() -> None:
    case = leaves(sequence(*(linear() for _ in range(5))))
    flops = []
    for parts in (["backward"], ["backward_input", "backward_weight"]):
        stages = case.stages([0, 1, 4])
        run_forwards(stages)
        run_backwards(stages[2:], split=False)
        gradient = torch.ones(4, 4)
        middle = stages[1]
        for part in parts:
            with FlopCounterMode(display=False) as counter:
                own = [] if part == "backward_weight" else [[gradient]]
                getattr(middle, part)(0, *own)
            flops.append(counter.get_total_flops())
            gradients = [each.grad is not None for each in middle.parameters]
            assert gradients == [part != "backward_input"] * 3
    whole, first, second = flops
    assert first == second == whole / 2 > 0


WITHOUT_WEIGHTS: dict[str, Any] = {
    "gpt": (small_gpt, gpt_ids, gpt_loss),
    "routed": (lambda: odd.Chain(odd.Routed), lambda size: torch.randn(size, 16), None),
    "gpt2": (language.gpt2, ids, None),
    "llama": (language.llama, ids, None),
    "mixtral": (language.mixtral, ids, None),
    "t5": (language.t5, ids, None),
}
_TRANSFORMERS = {"gpt2", "llama", "mixtral", "t5"}


_NAMES = [
    pytest.param(name, marks=needs_transformers if name in _TRANSFORMERS else ())
    for name in WITHOUT_WEIGHTS
]


@pytest.mark.parametrize("name", _NAMES)
def test_a_model_without_weights_is_recorded_as_one_with_them(name: str) -> None:
    build, inputs, loss_fn = WITHOUT_WEIGHTS[name]
    case = replayed(build, inputs, loss_fn=loss_fn)
    with build_without_weights(fake_mode()):
        empty = build().train()
    record, whole = record_model(empty, case.inputs[0], loss_fn, case.layers), case.record
    assert [each.name for each in record.events] == [each.name for each in whole.events]
    assert record.holders == whole.holders
    for layer in range(1, len(case.layers)):
        assert cut_before(record, layer).crossings == cut_before(whole, layer).crossings
        assert cut_before(record, layer).keys == cut_before(whole, layer).keys
    assert all(type(each).__name__ == "FakeTensor" or not each.is_cpu for each in
               (parameter.data for parameter in empty.parameters()))  # fmt: skip


def test_a_model_on_meta_gets_the_weights_of_another() -> None:
    with torch.device("meta"):
        model = small_gpt()
    whole = small_gpt()
    inputs = gpt_ids(2)
    layers = number_calls(["tokens", "blocks.0", "blocks.1", "blocks.2", "norm", "head"])
    record = record_model(model, inputs, gpt_loss, layers)
    names = own_parameter_names(record, 2, 6)
    materialise(model, names, whole)
    for name, each in model.named_parameters():
        assert each.is_meta == (name not in names)
        assert each.is_meta or torch.equal(each, whole.get_parameter(name))
    assert model.head.weight is model.tokens.weight
    first = _stage(whole, record, 0, 2, inputs)
    last = _stage(model, record, 2, 6, inputs)
    last.forward(0, first.forward(0, []))
    assert last.losses[0] == run_loss(whole, inputs, gpt_loss)


def test_a_recurrent_layer_gets_its_weights_where_it_looks_for_them() -> None:
    """Converted without weights, an LSTM no longer notices that it got others."""

    def build() -> nn.Module:
        return nn.Sequential(nn.LSTM(4, 4)).to(torch.float32)

    with build_without_weights(fake_mode()):
        model = build()
    inputs, whole = torch.ones(2, 4), build()
    materialise(model, dict(model.named_parameters()), whole)
    torch.testing.assert_close(model(inputs), whole(inputs), rtol=0.0, atol=0.0)


class Noisy(nn.Linear):
    """Has a tensor that is neither a parameter nor a buffer."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.noise = torch.randn(4)


def test_a_tensor_that_is_a_mere_attribute_is_copied_too() -> None:
    whole, model = Noisy(), Noisy()
    materialise(model, [], whole)
    assert torch.equal(model.noise, whole.noise)


def _stage(model: nn.Module, record: Any, start: int, stop: int, inputs: Tensor) -> ReplayStage:
    return replay_stage(model, record, start, stop, gpt_loss, lambda _: inputs, 1.0)
