"""Compiled layers and autocast: what is measured is what runs, and the model is left as it came."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from partopt.errors import PartoptError
from partopt.profiler import measure
from tests.profiler.helpers import Parts, flows, linear, names, stash, structure

# the compiler's own, about itself
pytestmark = pytest.mark.filterwarnings("ignore")


class Block(nn.Module):
    """Keeps more for its backward than a compiler has to: the results of a chain of sines."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = linear(), linear()

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).sin().sin().sin())


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Compile without generating code; the list of the forward graphs that were compiled."""
    seen: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        from functorch.compile import min_cut_rematerialization_partition, nop
        from torch._dynamo.backends.common import aot_autograd

        seen.append(graph)
        compiler = aot_autograd(fw_compiler=nop, partition_fn=min_cut_rematerialization_partition)
        return compiler(graph, inputs)

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    return seen


def blocks() -> nn.Module:
    return nn.Sequential(linear(), *[Block() for _ in range(12)], linear())


def test_every_layer_is_compiled_and_timed(graphs: list[Any]) -> None:
    profile = structure(blocks(), granularity="auto", compile=True, microbatch_sizes=[2, 4])
    assert profile.compiled
    assert len(graphs) >= 2 * 2  # two kinds of layer, two sizes
    assert len(profile.layers) == 14
    for measured in profile.measurements:
        assert all(layer.forward_s > 0 and layer.backward_s > 0 for layer in measured.layers)


def test_layers_of_one_class_that_need_graphs_of_their_own_are_all_compiled(
    graphs: list[Any],
) -> None:
    class Numbered(Block):
        def __init__(self, number: int) -> None:
            super().__init__()
            self.number = number  # the compiler takes it for a constant

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (self.number + 2)

    structure(nn.Sequential(*map(Numbered, range(12))), granularity="auto", compile=True)
    assert len(graphs) >= 12


def test_the_stash_of_compiled_layers_is_what_they_keep(graphs: list[Any]) -> None:
    eager = structure(blocks(), granularity="auto")
    compiled = structure(blocks(), granularity="auto", compile=True)
    assert flows(compiled) == flows(eager)
    assert sum(size for _, size in stash(compiled)) < sum(size for _, size in stash(eager))


def test_the_model_is_left_as_it_came(graphs: list[Any]) -> None:
    model = blocks()
    structure(model, granularity="auto", compile=True, autocast="bfloat16")
    assert not any("forward" in vars(module) for module in model.modules())


def compiled_whole(model: nn.Module) -> nn.Module:
    return torch.compile(model)


def compiled_in_parts(model: nn.Module) -> nn.Module:
    for name, child in model.named_children():
        setattr(model, name, torch.compile(child))
    return model


def compiled_in_place(model: nn.Module) -> nn.Module:
    for child in model.children():
        child.compile()
    return model


@pytest.mark.parametrize("compiled", [compiled_whole, compiled_in_parts, compiled_in_place])
@pytest.mark.parametrize("granularity", ["auto", "leaf"])
def test_a_model_that_comes_compiled_is_measured_under_its_own_names(
    graphs: list[Any], compiled: Callable[[nn.Module], nn.Module], granularity: str
) -> None:
    model = compiled(nn.Sequential(linear(), Block(), Block()))
    before = [name for name, _ in model.named_modules()]
    calls = [module._compiled_call_impl for module in model.modules()]
    profile = structure(model, granularity=granularity)
    assert profile.compiled
    assert names(profile) == names(
        structure(nn.Sequential(linear(), Block(), Block()), granularity=granularity)
    )
    assert [name for name, _ in model.named_modules()] == before
    assert [module._compiled_call_impl for module in model.modules()] == calls


def test_a_compiled_model_is_called_by_its_class(graphs: list[Any]) -> None:
    profile = measure(
        torch.compile(linear()),
        lambda size: torch.ones(size, 4),
        microbatch_sizes=[1],
        steps=1,
        device="cpu",
    )
    assert profile.model.name == "Linear"


def test_a_layer_that_cannot_be_compiled_is_named_before_anything_is_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse_sines(graph: Any, inputs: Any) -> Any:
        if any(node.target == "sin" for node in graph.graph.nodes):
            raise NotImplementedError("no sine here")
        return graph

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=refuse_sines))
    seen: list[tuple[int, int, int]] = []
    with pytest.raises(PartoptError) as caught:
        structure(
            nn.Sequential(linear(), Block(), Block()),
            granularity="auto",
            compile=True,
            progress=lambda *step: seen.append(step),
        )
    assert caught.value.message.startswith(
        "`compile`: layer 1 cannot be compiled: raised NotImplementedError: no sine here"
    )
    assert (caught.value.code, caught.value.exit_code) == ("compile-failed", 2)
    assert not any(done for _, done, _ in seen)


class Noting(nn.Module):
    """A linear layer that writes down the dtypes of its result, and of the gradient to it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.forward_dtypes, self.outside = linear(), set(), set()

    def forward(self, x: Tensor) -> Tensor:
        result = self.inner(x)
        self.forward_dtypes.add(result.dtype)
        if result.requires_grad:
            result.register_hook(lambda _: self.outside.add(not torch.is_autocast_enabled("cpu")))
        return result


@pytest.mark.parametrize("autocast", ["bfloat16", "float16"])
def test_under_autocast_layers_compute_in_its_dtype_and_keep_their_weights(autocast: str) -> None:
    model, losses = Noting(), set()

    def loss_fn(output: Tensor, _inputs: Any) -> Tensor:
        losses.add(torch.is_autocast_enabled("cpu"))
        return output.float().sum()

    profile = structure(
        nn.Sequential(model), granularity="auto", autocast=autocast, loss_fn=loss_fn
    )
    assert (profile.dtype, profile.autocast, profile.compiled) == ("float32", autocast, False)
    assert model.forward_dtypes == {getattr(torch, autocast)}
    assert (model.outside, losses) == ({True}, {True})  # the backward is outside, the loss inside
    assert model.inner.weight.dtype == torch.float32
    assert not torch.is_autocast_enabled("cpu")


def test_half_as_many_bytes_cross_between_layers_under_autocast() -> None:
    plain = structure(nn.Sequential(linear(), linear()))
    cast = structure(nn.Sequential(linear(), linear()), autocast="bfloat16")
    assert flows(plain) == [(0, [1], 16)]
    assert flows(cast) == [(0, [1], 8)]


def test_the_cast_weight_of_a_shared_layer_does_not_cross() -> None:
    def twice() -> nn.Module:
        return Parts(lambda self, x: self.a(self.b(self.a(x))), a=linear(), b=linear())

    cast = structure(twice(), autocast="bfloat16")
    assert [(made, read) for made, read, _ in flows(cast)] == [
        (made, read) for made, read, _ in flows(structure(twice()))
    ]


@pytest.mark.parametrize(
    ("options", "message", "hint"),
    [
        ({"autocast": "bf16"}, "`autocast=bf16`: not a dtype that autocast runs in", "bfloat16"),
        (
            {"autocast": "float16", "dtype": "bfloat16"},
            "`autocast=float16`: autocast runs over float32 weights, and `dtype=bfloat16` casts "
            "them",
            "leave one",
        ),
    ],
)
def test_autocasts_that_cannot_be(options: dict[str, Any], message: str, hint: str) -> None:
    with pytest.raises(PartoptError) as caught:
        structure(linear(), **options)
    assert caught.value.message == message
    assert hint in caught.value.hint
