"""Compiled layers and autocast: what is measured is what runs, and the model is left as it came."""

import contextlib
import functools
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from partopt.errors import PartoptError
from partopt.profiler import measure, measure_source
from tests.profiler.helpers import CHAINS, EXAMPLES, flows, linear, names, stash, structure

# the compiler's own, about itself
pytestmark = pytest.mark.filterwarnings("ignore")


class Block(nn.Module):
    """Keeps more for its backward than a compiler has to: the results of a chain of sines."""

    def __init__(self):
        super().__init__()
        self.a, self.b = linear(), linear()

    def forward(self, x):
        return self.b(self.a(x).sin().sin().sin())


@pytest.fixture
def graphs(monkeypatch):
    """Compile without generating code; the list of the forward graphs that were compiled."""
    seen = []

    def backend(graph, inputs):
        from functorch.compile import min_cut_rematerialization_partition, nop
        from torch._dynamo.backends.common import aot_autograd

        seen.append(graph)
        compiler = aot_autograd(fw_compiler=nop, partition_fn=min_cut_rematerialization_partition)
        return compiler(graph, inputs)

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    return seen


def blocks():
    return nn.Sequential(linear(), *[Block() for _ in range(4)], linear())


@pytest.mark.parametrize(
    "profile",
    [
        lambda: measure(nn.Linear(2, 2), lambda b: torch.ones(b, 2), compile=True, device="cpu"),
        lambda: measure_source(EXAMPLES / "mlp.py", compile=True, device="cpu"),
    ],
)
def test_the_layers_of_a_group_are_not_compiled(profile, monkeypatch):
    def two_ranks(_device):
        return contextlib.nullcontext(SimpleNamespace(ranks=2))

    monkeypatch.setattr("partopt.profiler.open_group", two_ranks)
    with pytest.raises(PartoptError, match="does not go with a group of 2 ranks") as refused:
        profile()
    assert (refused.value.code, refused.value.fields) == (
        *("conflicting-options", {"option": "compile"}),
    )


@pytest.mark.slow
def test_every_layer_is_compiled_and_timed(graphs):
    model, options = blocks(), {"granularity": "auto", "microbatch_sizes": [2, 4]}
    profile = structure(model, compile=True, autocast="bfloat16", **options)
    assert profile.compiled
    assert len(graphs) >= 2 * 2  # two kinds of layer, two sizes
    assert len(profile.layers) == 6
    for measured in profile.measurements:
        assert all(layer.forward_s > 0 and layer.backward_s > 0 for layer in measured.layers)
    assert not any("forward" in vars(module) for module in model.modules())  # left as it came


@pytest.mark.slow
def test_layers_of_one_class_that_need_graphs_of_their_own_are_all_compiled(graphs):
    class Numbered(Block):
        def __init__(self, number):
            super().__init__()
            self.number = number  # the compiler takes it for a constant

        def forward(self, x):
            return super().forward(x) * (self.number + 2)

    structure(nn.Sequential(*map(Numbered, range(12))), granularity="auto", compile=True)
    assert len(graphs) >= 12


@pytest.mark.slow
def test_the_stash_of_compiled_layers_is_what_they_keep(graphs):
    eager = structure(blocks(), granularity="auto")
    compiled = structure(blocks(), granularity="auto", compile=True)
    assert flows(compiled) == flows(eager)
    assert sum(size for _, size in stash(compiled)) < sum(size for _, size in stash(eager))


def in_parts(model):
    for name, child in model.named_children():
        setattr(model, name, torch.compile(child))
    return model


def in_place(model):
    for child in model.children():
        child.compile()
    return model


@pytest.mark.slow
@pytest.mark.parametrize("how", [torch.compile, in_parts, in_place])
@pytest.mark.parametrize("granularity", ["auto", "leaf"])
def test_a_model_that_comes_compiled_is_measured_under_its_own_names(graphs, how, granularity):
    plain = nn.Sequential(linear(), Block(), Block())
    expected = names(structure(plain, granularity=granularity))
    model = how(plain)
    before = [name for name, _ in model.named_modules()]
    calls = [module._compiled_call_impl for module in model.modules()]
    profile = structure(model, granularity=granularity)
    assert profile.compiled
    assert names(profile) == expected
    assert [name for name, _ in model.named_modules()] == before
    assert [module._compiled_call_impl for module in model.modules()] == calls


@pytest.mark.slow
@pytest.mark.parametrize("how", [torch.compile, in_parts, in_place])
def test_a_model_that_comes_compiled_has_its_own_name(graphs, how):
    options = {"microbatch_sizes": [1], "steps": 1, "device": "cpu"}
    model = how(nn.Sequential(linear()))
    assert measure(model, lambda size: torch.ones(size, 4), **options).model.name == "Sequential"


@pytest.mark.slow
def test_a_layer_that_cannot_be_compiled_is_named_before_anything_is_timed(monkeypatch):
    def refuse_sines(graph, inputs):
        if any(node.target == "sin" for node in graph.graph.nodes):
            raise NotImplementedError("no sine here")
        return graph

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=refuse_sines))
    seen, model = [], nn.Sequential(linear(), Block(), Block())
    options = {"granularity": "auto", "progress": lambda *step: seen.append(step)}
    with pytest.raises(PartoptError) as caught:
        structure(model, compile=True, **options)
    assert caught.value.message.startswith(
        "`compile`: layer 1 cannot be compiled: raised NotImplementedError: no sine here"
    )
    assert (caught.value.code, caught.value.exit_code) == ("compile-failed", 2)
    assert not any(done for _, done, _ in seen)


class Noting(nn.Module):
    """A linear layer that writes down the dtypes of its result, and of the gradient to it."""

    def __init__(self):
        super().__init__()
        self.inner, self.forward_dtypes, self.outside = linear(), set(), set()

    def forward(self, x):
        result = self.inner(x)
        self.forward_dtypes.add(result.dtype)
        if result.requires_grad:
            result.register_hook(lambda _: self.outside.add(not torch.is_autocast_enabled("cpu")))
        return result


@pytest.mark.slow
@pytest.mark.parametrize("autocast", ["bfloat16", "float16"])
def test_under_autocast_layers_compute_in_its_dtype_and_keep_their_weights(autocast):
    model, losses = Noting(), set()

    def loss_fn(output, _inputs):
        losses.add(torch.is_autocast_enabled("cpu"))
        return output.float().sum()

    options = {"granularity": "auto", "autocast": autocast, "loss_fn": loss_fn}
    profile = structure(nn.Sequential(model, linear()), **options)
    assert (profile.dtype, profile.autocast, profile.compiled) == ("float32", autocast, False)
    assert flows(profile) == [(0, [1], 8)]  # half as many bytes
    assert model.forward_dtypes == {getattr(torch, autocast)}
    assert (model.outside, losses) == ({True}, {True})  # the backward is outside, the loss inside
    assert model.inner.weight.dtype == torch.float32
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.slow
def test_the_cast_weight_of_a_shared_layer_does_not_cross():
    plain, cast = (
        [(made, read) for made, read, _ in flows(structure(CHAINS["called twice"](), **options))]
        for options in ({}, {"autocast": "bfloat16"})
    )
    assert cast == plain


def test_autocasts_that_cannot_be():
    for options, message, hint in (
        ({"autocast": "bf16"}, "`autocast=bf16`: not a dtype that autocast runs in", "bfloat16"),
        (
            {"autocast": "float16", "dtype": "bfloat16"},
            "`autocast=float16`: autocast runs over float32 weights, and `dtype=bfloat16` casts "
            "them",
            "leave one",
        ),
    ):
        with pytest.raises(PartoptError) as caught:
            structure(linear(), **options)
        assert caught.value.message == message
        assert hint in caught.value.hint
