from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from partopt.documents.profile import Profile
from tests.profiler.helpers import Parts, example, linear, structure


def distinct_bytes(profile: Profile) -> int:
    shared = {
        parameter.name: parameter.bytes
        for layer in profile.layers
        for parameter in layer.shared_parameters
    }
    own = sum(
        layer.parameter_bytes - sum(parameter.bytes for parameter in layer.shared_parameters)
        for layer in profile.layers
    )
    return own + sum(shared.values())


def total_bytes(model: nn.Module) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def shared(profile: Profile) -> list[list[str]]:
    return [[parameter.name for parameter in layer.shared_parameters] for layer in profile.layers]


@pytest.mark.parametrize("granularity", ["auto", "block", "leaf"])
def test_a_tied_gpt_adds_up_to_the_model(granularity: str) -> None:
    source = example("gpt", layers=2, width=8, heads=2, context=4, vocabulary=11)
    model = source.build()
    profile = structure(
        model, source.example_inputs, loss_fn=source.loss_fn, granularity=granularity
    )
    assert distinct_bytes(profile) == total_bytes(model)
    assert shared(profile)[0] == shared(profile)[-1] == ["tokens.weight"]
    # the embedding, and the positions that it is added to
    assert profile.layers[0].parameter_bytes == (11 * 8 + 4 * 8) * 4


def test_a_module_called_twice_shares_its_parameters_with_itself() -> None:
    model = Parts(lambda self, x: self.a(self.b(self.a(x))), a=linear(), b=linear())
    profile = structure(model)
    assert shared(profile) == [["a.weight"], [], ["a.weight"]]
    assert distinct_bytes(profile) == total_bytes(model)


def test_a_head_that_borrows_the_embeddings_weight_holds_it_too() -> None:
    model = Parts(
        lambda self, x: functional.linear(self.norm(self.a(x)), self.a.weight),
        a=linear(),
        norm=nn.LayerNorm(4),
    )
    profile = structure(model)
    assert shared(profile) == [["a.weight"], ["a.weight"]]
    assert profile.layers[1].parameter_bytes == 64 + 32
    assert distinct_bytes(profile) == total_bytes(model)


def test_a_parameter_that_nothing_uses_is_not_lost() -> None:
    model = Parts(lambda self, x: self.a(x), a=linear(), never=linear(4, 100))
    assert distinct_bytes(structure(model)) == total_bytes(model)


def test_bytes_are_those_of_the_dtype() -> None:
    def bytes_at(dtype: str) -> int:
        return structure(linear(), dtype=dtype).layers[0].parameter_bytes

    assert bytes_at("float32") == 64
    assert bytes_at("bfloat16") == 32


def test_floating_inputs_follow_the_dtype() -> None:
    class Seen(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(x.dtype)
            return super().forward(x)

    seen: list[torch.dtype] = []
    structure(Seen(4, 4), dtype="bfloat16")
    assert set(seen) == {torch.bfloat16}


class Adapted(nn.Module):
    """LoRA: a frozen weight, and a trained product of rank 2 beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(4, 4, bias=False).requires_grad_(False)
        self.down, self.up = nn.Linear(4, 2, bias=False), nn.Linear(2, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def test_frozen_parameters_are_told_apart() -> None:
    model = nn.Sequential(linear(), Adapted(), Adapted())
    profile = structure(model, granularity="auto")
    # 4 x 4 frozen beside 4 x 2 and 2 x 4 trained
    assert [(layer.parameter_bytes, layer.frozen_bytes) for layer in profile.layers] == [
        (64, 0),
        (128, 64),
        (128, 64),
    ]
    assert list(profile.faults()) == []


def test_a_shared_parameter_is_frozen_wherever_it_is_used() -> None:
    def forward(self: Parts, x: Tensor) -> Tensor:
        return functional.linear(self.b(self.a(x)), self.a.weight)

    model = Parts(forward, a=linear().requires_grad_(False), b=linear())
    profile = structure(model)
    assert [layer.frozen_bytes for layer in profile.layers] == [64, 64]
    assert [[each.frozen for each in layer.shared_parameters] for layer in profile.layers] == [
        [True],
        [True],
    ]
    assert list(profile.faults()) == []


def test_a_buffer_is_no_frozen_parameter() -> None:
    profile = structure(nn.Sequential(linear(), nn.BatchNorm1d(4)), lambda size: torch.randn(8, 4))
    assert [layer.frozen_bytes for layer in profile.layers] == [0, 0]
