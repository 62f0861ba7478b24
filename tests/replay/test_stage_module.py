"""Stages as modules, chained by hand, are the model."""

import gc
import re
import weakref

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from partopt import Job, solve
from partopt.errors import PartoptError
from partopt.profiler import measure_source
from partopt.profiler.source import find_model
from partopt.runtime import stage_module
from tests.forked import start_ranks
from tests.helpers import ROOT, flat
from tests.replay.replayed import replayed, worst_error
from tests.replay.test_replayed_stage import Dense, gpt_ids, gpt_loss, small_gpt, vectors
from tests.runtime.test_run import MODEL, UNTIED

PAGE = (ROOT / "docs/running.md").read_text()
LOOP = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def chain(modules, inputs):
    """The loss of a microbatch."""
    tensors = ()
    for module in modules[:-1]:
        tensors = module(*tensors, inputs=inputs)
        found = [(tuple(each.shape), each.dtype, each.requires_grad) for each in tensors]
        assert found == [(each.shape, each.dtype, each.gradient) for each in module.sends]
    return modules[-1](*tensors, inputs=inputs)


@pytest.fixture(scope="module")
def gpt():
    return replayed(small_gpt, gpt_ids, loss_fn=gpt_loss)


def gradients_of(modules):
    total = {}
    for name, each in (named for module in modules for named in module.named_parameters()):
        if each.grad is not None:
            total[name] = total[name] + each.grad if name in total else each.grad
    return total


@pytest.mark.slow
def test_three_stages_in_a_row_are_the_model(gpt):
    """What the first stage of the second makes goes through the next, and is written to."""
    skipping = replayed(Dense, vectors, granularity="leaf")
    for case in (gpt, skipping):
        modules = case.modules(case.thirds())
        losses = [chain(modules, inputs) for inputs in case.inputs]
        (sum(losses) / len(losses)).backward()
        expected, gradients, _ = case.reference
        torch.testing.assert_close([loss.detach() for loss in losses], expected)
        assert worst_error(gradients_of(modules), gradients) < 1e-6
        assert [(each.stage, each.stages) for each in modules] == [(0, 3), (1, 3), (2, 3)]
    first, middle = skipping.modules([0, 2, 4])[:2]
    made = first(inputs=skipping.inputs[0])
    there = middle(*made, inputs=skipping.inputs[0])
    assert (len(made), len(there)) == (2, 3)
    assert there[0].data_ptr() == made[0].data_ptr()


@torch.no_grad()
def test_a_stage_keeps_nothing_of_a_microbatch_that_went_through(gpt):
    first, second = gpt.modules([0, len(gpt.layers) // 2])
    made = first(inputs=gpt.inputs[0])
    second(*made, inputs=gpt.inputs[0])
    passed = [weakref.ref(each) for each in made]
    del made
    gc.collect()
    assert [each() for each in passed] == [None] * len(passed)


def test_the_states_of_all_stages_are_the_model_s(gpt):
    modules, whole = gpt.modules(gpt.thirds()), gpt.model.state_dict()
    states = [module.state_dict() for module in modules]
    assert set().union(*states) == whole.keys()
    assert "blocks.1.up.weight" in states[1] and "tokens.weight" not in states[1]
    assert "tokens.weight" in states[0] and {"tokens.weight", "head.weight"} <= states[2].keys()
    for module, state in zip(modules, states, strict=True):
        torch.testing.assert_close(state, {name: whole[name] for name in state})
        assert dict(module.named_parameters(remove_duplicate=False)).keys() == state.keys()
        assert not any(each.is_meta for each in module.parameters())
    # one loads its part of the model's state
    other = {name: torch.randn_like(each) for name, each in whole.items()}
    assert modules[1].load_state_dict(other).missing_keys == []
    loaded = modules[1].state_dict()
    torch.testing.assert_close(loaded, {name: other[name] for name in loaded})
    modules[1].load_state_dict(loaded)
    del other["positions"]
    with pytest.raises(RuntimeError, match=r'Missing key.*"positions"'):
        modules[0].load_state_dict(other)


class Counted(nn.Module):
    """Buffers of a layer, of none, and one that is in no state."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("scale", torch.ones(4))
        self.register_buffer("passing", torch.ones(4), persistent=False)

    def forward(self, x):
        return (self.b(self.a(x)) * self.scale * self.passing).square().mean()


def test_buffers_are_those_of_the_stage_and_of_no_layer():
    modules = replayed(Counted, vectors, size=4, granularity="leaf").modules([0, 1])
    assert [name for name, _ in modules[0].named_buffers()] == ["scale", "passing"]
    assert list(modules[0].state_dict()) == ["scale", "a.weight", "a.bias"]
    assert {"b.running_mean", "scale"} <= {name for name, _ in modules[1].named_buffers()}
    assert "b.running_mean" in modules[1].state_dict()


def test_a_stage_that_looks_at_shapes_alone_needs_no_inputs_and_others_are_refused(gpt):
    first, middle, last = gpt.modules(gpt.thirds())
    inputs = gpt.inputs[1]
    crossing = first(inputs=inputs)
    there = middle(*crossing)
    torch.testing.assert_close(there, middle(*crossing, inputs=inputs), rtol=0.0, atol=0.0)
    for module, tensors in ((first, ()), (last, there)):
        with pytest.raises(PartoptError, match="computes with the model's inputs") as raised:
            module(*tensors)
        assert raised.value.code == "inputs-missing"
    assert last(*there, inputs=inputs).ndim == 0
    for tensors in ((), crossing[:1] * 2, tuple(each[:1] for each in crossing)):
        with pytest.raises(PartoptError, match=r"receives .* it was given") as raised:
            middle(*tensors, inputs=inputs)
        assert raised.value.code == "cut-mismatch"


def test_a_stage_is_a_module_like_others(gpt):
    """It is converted, frozen, called with other weights, and recomputed as torch does it."""
    modules = gpt.modules(gpt.thirds())
    middle = modules[1]
    middle.eval()
    assert not any(each.training for each in (middle, *middle.whole.modules()))
    received = [each.detach().requires_grad_() for each in modules[0](inputs=gpt.inputs[0])]
    [made] = middle(*received)
    zeros = {name: torch.zeros_like(each) for name, each in middle.named_parameters()}
    [other] = functional_call(middle, zeros, tuple(received))
    assert not torch.equal(made, other)
    [again] = checkpoint(middle, *received, use_reentrant=False)
    found = []
    for result in (made, again):
        middle.zero_grad()
        result.sum().backward()
        found.append([each.grad.clone() for each in middle.parameters()])
    assert all(map(torch.equal, *found))
    middle.to(torch.float64)
    assert {each.dtype for each in middle.parameters()} == {torch.float64}
    middle.requires_grad_(False)
    assert not any(each.requires_grad for each in middle.parameters())


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Writes a model, and plans it; gives the plan and the path of the model."""
    folder, files = tmp_path_factory.mktemp("stages"), {}

    def make(text, devices, **options):
        if text not in files:
            path = folder / f"model{len(files)}.py"
            path.write_text(text)
            measured = {"microbatch_sizes": [2], "steps": 1, "granularity": "leaf"}
            files[text] = path, measure_source(str(path), **measured)
        path, profile = files[text]
        options = {"schedule": "1f1b", "microbatches": 4} | options
        return solve(Job(profile, flat(devices), **options)).plan, str(path)

    return make


@pytest.mark.slow
def test_the_stages_of_a_plan_are_the_model_of_its_file(made):
    plan, path = made(MODEL, 4, cuts=[1, 3], replicas=[1, 2, 1])
    source = find_model(path)
    modules = [stage_module(plan, rank, source, seed=3) for rank in (0, 1, 3)]
    torch.manual_seed(3)
    whole, inputs = source.build(), source.example_inputs(2)
    expected = nn.functional.cross_entropy(whole(inputs).flatten(0, 1), inputs.flatten())
    loss = chain(modules, inputs)
    torch.testing.assert_close(loss, expected)
    loss.backward()
    expected.backward()
    found = {name: each.grad for name, each in whole.named_parameters()}
    assert worst_error(gradients_of(modules), found) < 1e-6  # type: ignore[arg-type]
    again = stage_module(plan, 2, path, seed=3)  # the other replica
    torch.testing.assert_close(again.state_dict(), modules[1].state_dict(), rtol=0.0, atol=0.0)
    assert [plan.stages[1].rank_of(m) for m in range(3)] == [1, 2, 1]


@pytest.mark.slow
def test_which_stage_is_meant_is_said(made):
    options = {"schedule": "interleaved", "planner": "gpipe", "stages": 4, "chunks": 2}
    plan, path = made(MODEL, 2, **options)
    assert stage_module(plan, 1, path, stage=3).stage == 3
    with pytest.raises(PartoptError, match="rank 1 holds stages 1 and 3: which is meant") as raised:
        stage_module(plan, 1, path)
    assert raised.value.code == "no-such-stage"
    with pytest.raises(PartoptError, match="rank 1 holds stages 1 and 3: not stage 2"):
        stage_module(plan, 1, path, stage=2)
    with pytest.raises(PartoptError, match="no rank 2"):
        stage_module(plan, 2, path)
    with pytest.raises(PartoptError, match=r"model.*bytes of parameters in this model"):
        stage_module(plan, 0, path, stage=0, arguments={"width": 4})


@pytest.mark.slow
def test_the_loop_of_the_page_trains_as_one_process_does(made, tmp_path):
    plan, path = made(UNTIED, 2, cuts=[2])
    plan.save(str(tmp_path / "plan.json"))
    (tmp_path / "model.py").write_text(UNTIED)
    (tmp_path / "loop.py").write_text(LOOP[-1])
    ranks = [rank.wait() for rank in start_ranks(2, str(tmp_path / "loop.py"), cwd=tmp_path)]
    assert [rank.returncode for rank in ranks] == [0, 0], ranks
    source, losses = find_model(path), []
    torch.manual_seed(0)
    whole = source.build()
    for m in range(4):
        torch.manual_seed(m)
        ids = source.example_inputs(2)
        loss = nn.functional.cross_entropy(whole(ids).flatten(0, 1), ids.flatten())
        losses.append(float(loss.detach()))
        (loss / 4).backward()
    torch.optim.SGD(whole.parameters(), lr=0.1).step()
    printed = "".join(rank.stdout for rank in ranks)
    found = [float(each) for each in re.findall(r"loss (\S+)", printed)]
    assert found == pytest.approx(losses, abs=2e-6)
    states = [torch.load(tmp_path / f"stage{s}.pt") for s in (0, 1)]
    torch.testing.assert_close(states[0] | states[1], dict(whole.state_dict()))
