"""Recomputation, running statistics, weight versions, ties, models without weights, switches,
dataclasses, and checkpoints of the model's own.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from itertools import combinations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from partopt.errors import PartoptError
from partopt.profiler.as_trained import cast
from partopt.profiler.step import run_loss
from partopt.profiler.weightless import build_without_weights, fake_mode, is_fake
from partopt.replay.cuts import check_cuts, cut_before, held_parameter_names, shared_parameters
from partopt.replay.recording import record_model
from partopt.replay.replayed_stage import materialise
from partopt.replay.unit_calls import number_calls
from tests.profiler import zoo_language as language
from tests.profiler import zoo_odd as odd
from tests.profiler.helpers import Parts, linear, needs_transformers
from tests.replay.replayed import (
    error_of_stages,
    replay_stage,
    replayed,
    run_backwards,
    run_forwards,
    summed_gradients,
    worst_error,
)
from tests.replay.test_replayed_stage import (
    TOLERANCE,
    gpt_ids,
    gpt_loss,
    ids,
    small_gpt,
    thrice,
    vectors,
)

NAMES = ["a", "b", "c", "d"]


def leaves(build):
    """A model on vectors, each of whose leaves is a layer."""
    return replayed(build, vectors, size=4, granularity="leaf")


def in_turn(*modules):
    """The same of modules one after the other."""
    return leaves(lambda: nn.Sequential(*copy.deepcopy(modules)))


def units(forward, **modules):
    """A model of the layers "a" to "d", of which `modules` are some."""
    layers = {name: linear() for name in NAMES} | modules
    return replayed(lambda: Parts(forward, **layers), vectors, units=NAMES)


def chain(self, x):
    return self.d(self.c(self.b(self.a(x))))


@pytest.mark.slow
def test_what_is_recomputed_drops_the_same_numbers():
    case = in_turn(linear(), nn.Dropout(0.5), linear(), nn.Dropout(0.5), linear())
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


def test_random_numbers_between_layers_are_drawn_by_one_stage():
    def forward(self, x):
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


def test_recomputation_keeps_the_inputs_alone():
    case = in_turn(linear(), nn.Linear(4, 999), nn.Linear(999, 4), linear())
    kept = []
    for recompute in (False, True):
        first, middle, _ = case.stages([0, 1, 3], recompute=recompute)
        received, saved = first.forward(0, []), []
        pack = lambda tensor, saved=saved: saved.append(tensor.numel()) or tensor  # noqa: E731
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda each: each):
            middle.forward(0, received)
        kept.append(sum(saved))
    assert kept[0] > 0
    assert kept[1] == 0


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [False, True])
def test_running_statistics_are_those_of_the_model(recompute):
    norms = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
    case = in_turn(linear(), norms[0], nn.ReLU(inplace=True), linear(), norms[1])
    _, _, whole = case.reference
    stages = case.stages([0, 2, 3], recompute=recompute)
    run_forwards(stages)
    run_backwards(stages, recompute=recompute)
    for stage, layer in ((stages[0], "1"), (stages[2], "4")):
        own, expected = (each.get_submodule(layer) for each in (stage.model, whole))
        assert torch.equal(own.running_mean, expected.running_mean)
        assert torch.equal(own.running_var, expected.running_var)
        assert own.num_batches_tracked == 2


class Counting(nn.Linear):
    """Replaces its buffer in each forward."""

    def __init__(self):
        super().__init__(4, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls = self.calls + 1
        return super().forward(x)


def test_a_buffer_that_is_replaced_counts_each_microbatch_once():
    case = in_turn(linear(), Counting(), linear())
    assert case.record.changed_buffers == {"1.calls"}
    assert case.model.get_buffer("1.calls") == 0
    stages = case.stages([0, 1, 2], recompute=True)
    run_forwards(stages)
    run_backwards(stages, recompute=True)
    assert stages[1].model.get_buffer("1.calls") == 2


@pytest.mark.slow
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_a_microbatch_has_one_version_of_the_weights(split, recompute):
    """Each of two microbatches runs with memory of its own as weights, forward and backward."""
    case = leaves(thrice)
    stages = case.stages([0, 2, 4], recompute=recompute)
    own = dict(case.model.named_parameters())
    versions = [{name: torch.randn_like(each) for name, each in own.items()} for _ in case.inputs]
    expected = {name: torch.zeros_like(each) for name, each in own.items()}

    def use(version):
        for stage in stages:
            for name, each in stage.held_parameters.items():
                each.data = version[name]

    tensors = []
    for microbatch, version in enumerate(versions):
        use(version)
        for stage in stages:
            tensors = stage.forward(microbatch, tensors)
    for microbatch, version in enumerate(versions):
        use(version if recompute else versions[1 - microbatch])
        gradients = []
        for stage in reversed(stages):
            backward = stage.backward_input if split else stage.backward
            gradients = backward(microbatch, gradients)
            if split:
                stage.backward_weight(microbatch)
        whole = copy.deepcopy(case.model)
        whole.load_state_dict(version)
        (run_loss(whole, case.inputs[microbatch], None) / 2).backward()
        for name, each in whole.named_parameters():
            expected[name] += each.grad
    assert worst_error(summed_gradients(stages), expected) < 1e-6


@pytest.mark.slow
def test_a_tied_weight_has_one_name_in_all_stages():
    case = replayed(small_gpt, gpt_ids, loss_fn=gpt_loss)
    starts = [0, 2, len(case.layers) - 1]
    assert shared_parameters(case.record, starts) == {"tokens.weight": [0, 2]}
    first, middle, last = case.stages(starts)
    assert "tokens.weight" in first.held_parameters
    assert list(last.held_parameters) == ["tokens.weight"]
    assert "positions" in first.held_parameters
    assert not {"tokens.weight", "head.weight", "positions"} & middle.held_parameters.keys()
    assert last.parameters == [last.held_parameters["tokens.weight"]]


def test_a_frozen_stage_in_front_has_no_gradient():
    case = in_turn(linear().requires_grad_(False), linear(), linear())
    _, gradients, _ = case.reference
    stages = case.stages([0, 1, 2])
    assert [each.gradient for each in stages[1].receives] == [False]
    assert stages[0].parameters == []
    assert list(stages[0].held_parameters) == ["0.weight"]
    run_forwards(stages)
    run_backwards(stages, split=True)
    assert worst_error(summed_gradients(stages), gradients) == 0.0


class Handed(nn.Module):
    """A head that multiplies by the weight of a module that is not its own."""

    def __init__(self, owner):
        super().__init__()
        self.owner = [owner]

    def forward(self, x):
        return x @ self.owner[0].weight


@pytest.mark.slow
def test_a_weight_that_a_unit_reads_from_elsewhere_is_its_stage_s():
    def handed():
        stem = linear()
        parts = {"stem": stem, "b": linear(), "head": Handed(stem)}
        return Parts(lambda self, x: self.head(self.b(self.stem(x))), **parts)

    case = leaves(handed)
    assert held_parameter_names(case.record, 2, 3) == ["stem.weight"]
    assert shared_parameters(case.record, [0, 1, 2]) == {"stem.weight": [0, 2]}
    called = leaves(thrice).record  # its block in two stages
    assert shared_parameters(called, [0, 2]) == {"block.weight": [0, 1], "block.bias": [0, 1]}


@pytest.mark.slow
@pytest.mark.parametrize("split", [False, True])
def test_gradients_add_up_in_the_memory_that_is_there(split):
    case = leaves(thrice)
    _, gradients, _ = case.reference
    stages, places = case.stages([0, 2, 4]), []
    for parameter in (each for stage in stages for each in stage.parameters):
        parameter.grad = torch.zeros_like(parameter)
        places.append((parameter, parameter.grad))
    run_forwards(stages)
    run_backwards(stages, split=split)
    assert all(parameter.grad is place and place.any() for parameter, place in places)
    assert worst_error(summed_gradients(stages), gradients) < 1e-6


def test_two_parts_of_a_backward_do_the_work_of_one():
    case, flops = in_turn(*(linear() for _ in range(5))), []
    for parts in (["backward"], ["backward_input", "backward_weight"]):
        stages = case.stages([0, 1, 4])
        run_forwards(stages)
        run_backwards(stages[2:], split=False)
        for part in parts:
            given = [] if part == "backward_weight" else [[torch.ones(4, 4)]]
            with FlopCounterMode(display=False) as counter:
                getattr(stages[1], part)(0, *given)
            flops.append(counter.get_total_flops())
            there = [each.grad is not None for each in stages[1].parameters]
            assert there == [part != "backward_input"] * 3
    whole, first, second = flops
    assert first == second == whole / 2 > 0


WITHOUT_WEIGHTS = {
    "gpt": (small_gpt, gpt_ids, gpt_loss),
    "routed": (lambda: odd.Chain(odd.Routed), lambda size: torch.randn(size, 16), None),
    "mixtral": (language.mixtral, ids, None),
    "t5": (language.t5, ids, None),
}


_NAMES = [
    pytest.param(name, marks=needs_transformers if name in ("mixtral", "t5") else ())
    for name in WITHOUT_WEIGHTS
]


@pytest.mark.slow
@pytest.mark.parametrize("name", _NAMES)
def test_a_model_without_weights_is_recorded_as_one_with_them(name):
    build, inputs, loss_fn = WITHOUT_WEIGHTS[name]
    case = replayed(build, inputs, loss_fn=loss_fn)
    with build_without_weights(fake_mode()):
        empty = build().train()
    record, whole = record_model(empty, case.inputs[0], loss_fn, case.layers), case.record
    assert [each.name for each in record.events] == [each.name for each in whole.events]
    assert record.holders == whole.holders
    for layer in range(1, len(case.layers)):
        found, expected = cut_before(record, layer), cut_before(whole, layer)
        assert (found.crossings, found.keys) == (expected.crossings, expected.keys)
    assert all(is_fake(each) or not each.is_cpu for each in empty.parameters())


@pytest.mark.slow
def test_a_model_on_meta_gets_the_weights_of_another():
    with torch.device("meta"):
        model = small_gpt()
    whole, inputs = small_gpt(), gpt_ids(2)
    layers = number_calls(["tokens", "blocks.0", "blocks.1", "blocks.2", "norm", "head"])
    record = record_model(model, inputs, gpt_loss, layers)
    names = held_parameter_names(record, 2, 6)
    materialise(model, names, whole)
    for name, each in model.named_parameters():
        assert each.is_meta == (name not in names)
        assert each.is_meta or torch.equal(each, whole.get_parameter(name))
    assert model.head.weight is model.tokens.weight
    given = gpt_loss, lambda _: inputs, 1.0
    first = replay_stage(whole, record, 0, 2, *given)
    last = replay_stage(model, record, 2, 6, *given)
    last.forward(0, first.forward(0, []))
    assert last.losses[0] == run_loss(whole, inputs, gpt_loss)


def test_a_recurrent_layer_gets_its_weights_where_it_looks_for_them():
    """Converted without weights, an LSTM no longer notices that it got others.

    A tensor that is a mere attribute is copied too.
    """

    def build():
        return nn.Sequential(nn.LSTM(4, 4)).to(torch.float32)

    with build_without_weights(fake_mode()):
        model = build()
    inputs, whole = torch.ones(2, 4), build()
    whole.noise = torch.randn(4)
    model.noise = torch.randn(4)
    materialise(model, dict(model.named_parameters()), whole)
    torch.testing.assert_close(model(inputs), whole(inputs), rtol=0.0, atol=0.0)
    assert torch.equal(model.noise, whole.noise)


# --- what models switch on and off within a forward -------------------------------------------


class Uncounted(nn.Module):
    """Switches gradients off within an autocast, and autocast off within that."""

    def __init__(self):
        super().__init__()
        self.first, self.second = linear(), linear()

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            x = self.first(x)
            with torch.no_grad():
                fixed = self.second(x)
                with torch.autocast("cpu", enabled=False):
                    fixed = fixed.float() @ self.second.weight
            return x * fixed


def frozen(self, x):
    with torch.no_grad():
        fixed = self.b(self.a(x) * 2.0) * 2.0
    return self.d(self.c(fixed))


SWITCHED = {
    "gradients within autocast": lambda: units(chain, a=Uncounted(), b=Uncounted()),
    "layers without gradients": lambda: units(frozen),
    "a frozen layer": lambda: units(chain, b=linear().requires_grad_(False)),
    "an identity": lambda: units(lambda self, x: chain(self, x) * 3.0, b=nn.Identity()),
    "a parameter between": lambda: units(
        lambda self, x: self.d(self.c(self.b(self.a(x) @ self.c.weight)))
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SWITCHED)
def test_what_is_switched_on_and_off(name):
    case = SWITCHED[name]()
    assert error_of_stages(case) < TOLERANCE
    assert error_of_stages(case, recompute=True) < TOLERANCE


def test_the_autocast_of_a_plan():
    def forward(self, x):
        return self.d(self.c(self.b(torch.tanh(self.a(x)))))

    case = units(cast(forward, torch.device("cpu"), torch.bfloat16), c=Uncounted())
    assert {each.dtype for each in cut_before(case.record, 1).likeness} == {torch.bfloat16}
    assert error_of_stages(case) < TOLERANCE


def test_a_module_says_each_time_what_it_drops():
    case = units(chain, b=nn.Dropout(0.5))
    stages = case.stages([0, 1, 2])
    assert run_forwards(stages) != run_forwards(stages)
    for stage in stages:
        stage.model.b.p = 0.0
    losses = run_forwards(stages)
    case.model.b.p = 0.0
    assert losses == case.reference[0]


# --- layers that return dataclasses, and checkpoints around layers ----------------------------


def check_all_cuts(case):
    """Cut into two and three stages in every way, whole, split and recomputed."""
    boundaries = range(1, len(case.layers))
    for cuts in (*combinations(boundaries, 1), *combinations(boundaries, 2)):
        for options in ({}, {"split": True}, {"recompute": True}):
            assert error_of_stages(case, [0, *cuts], **options) < TOLERANCE


@dataclass(frozen=True)
class Inner:
    scale: Tensor
    count: int = 2


@dataclass
class Result:
    hidden: Tensor
    inner: Inner
    names: list[str] = field(init=False)

    def __post_init__(self):
        self.names = ["x"]


@dataclass(slots=True)
class Slotted:
    hidden: Tensor


class Returning(nn.Module):
    """Takes and returns a dataclass, in which there is another one, or one that has slots."""

    def __init__(self):
        super().__init__()
        self.linear = linear()

    def forward(self, given):
        if isinstance(given, Tensor):
            return Slotted(self.linear(given))
        hidden = self.linear(given.hidden) * given.inner.scale
        return Result(hidden, Inner(given.inner.scale + hidden.mean(), given.inner.count))


@pytest.mark.slow
def test_layers_that_return_dataclasses():
    def forward(self, x):
        made = Result(self.a(x), Inner(torch.ones(())))
        made = self.c(self.b(made))
        assert made.names == ["x"] and made.inner.count == 2
        return self.d(made.hidden).square().mean() + made.inner.scale

    check_all_cuts(units(forward, b=Returning(), c=Returning()))
    slots = lambda self, x: self.d(self.c(self.b(self.a(x)).hidden))  # noqa: E731
    check_all_cuts(units(slots, b=Returning()))


def kept(layer, *given):
    return checkpoint(layer, *given, use_reentrant=False)


@pytest.mark.slow
def test_checkpoints_around_layers():
    def forward(self, x):
        first = kept(self.a, x)
        second = kept(lambda x, y: self.b(x) * y, first, first.detach())
        return kept(self.d, kept(self.c, second) + first)

    check_all_cuts(units(forward))


@pytest.mark.slow
def test_a_checkpoint_reads_what_it_is_not_given():
    def forward(self, x):
        first = self.a(x)
        second = self.b(first)
        return self.d(kept(lambda x: self.c(x) * first, second))

    check_all_cuts(units(forward))


def test_a_checkpoint_drops_the_same_numbers_in_the_backward():
    forward = lambda self, x: self.d(self.c(kept(self.b, self.a(x))))  # noqa: E731
    case = units(forward, b=nn.Sequential(linear(), nn.Dropout(0.5)))
    torch.manual_seed(3)
    case.reference  # noqa: B018
    torch.manual_seed(3)
    assert error_of_stages(case, [0, 1, 2]) < TOLERANCE


def test_a_checkpoint_around_several_layers_keeps_them_together():
    def forward(self, x):
        return self.d(kept(lambda x: self.c(self.b(x)), self.a(x)))

    case = units(forward)
    with pytest.raises(PartoptError, match=r'"b" and layer 2 "c" once more') as refused:
        check_cuts(case.record, [2])
    assert refused.value.fields["layers"] == ["b", "c"]
    for starts in ([0, 1], [0, 3], [0, 1, 3]):
        assert error_of_stages(case, starts) < TOLERANCE


def test_a_reentrant_checkpoint_keeps_its_layers_and_all_others_together():
    """Its gradients go to what it is given, which is no tensor that another stage has sent."""

    def forward(self, x):
        made = checkpoint(lambda x: self.c(self.b(x)), self.a(x), use_reentrant=True)
        return self.d(made)

    whole = Parts(forward, **{name: linear() for name in NAMES})
    seen = record_model(whole, vectors(2), None, number_calls(NAMES))
    for cut in (1, 2, 3):
        with pytest.raises(PartoptError, match='CheckpointFunction wraps what layer 1 "b" gets'):
            check_cuts(seen, [cut])
