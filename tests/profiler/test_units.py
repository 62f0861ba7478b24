from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from partopt.errors import PartoptError
from partopt.profiler.tensors import place
from partopt.profiler.units import called_modules, choose_units, find_branching
from tests.profiler.helpers import Parts, example, linear, needs_torchvision
from tests.profiler.zoo_odd import WIDTH, Routed


def units_of(
    model: nn.Module, inputs: object, granularity: str = "auto", globs: tuple[str, ...] = ()
) -> list[str]:
    branching = find_branching(model, inputs)
    return choose_units(model, called_modules(model, inputs), granularity, globs, branching)


def units_of_example(
    name: str, granularity: str = "auto", globs: tuple[str, ...] = (), **arguments: int
) -> list[str]:
    source = example(name, **arguments)
    model = source.build()
    return units_of(
        model,
        place(source.example_inputs(2), torch.device("cpu"), torch.float32),
        granularity,
        globs,
    )


GPT = {"layers": 2, "width": 8, "heads": 2, "context": 4, "vocabulary": 11}


def test_a_gpt_is_its_blocks_and_what_is_around_them() -> None:
    assert units_of_example("gpt", **GPT) == ["tokens", "blocks.0", "blocks.1", "norm", "head"]
    assert units_of_example("gpt", "block", **GPT) == [
        "tokens",
        "blocks.0",
        "blocks.1",
        "norm",
        "head",
    ]


def test_leaf_units_of_a_gpt() -> None:
    block = ["norm1", "attention.qkv", "attention.out", "norm2", "up", "down"]
    assert units_of_example("gpt", "leaf", **GPT) == [
        "tokens",
        *[f"blocks.{number}.{part}" for number in (0, 1) for part in block],
        "norm",
        "head",
    ]


@needs_torchvision
def test_vgg16_is_every_child_of_its_lists() -> None:
    expected = [
        *[f"features.{n}" for n in range(31)],
        "avgpool",
        *[f"classifier.{n}" for n in range(7)],
    ]
    assert units_of_example("vgg16", size=32) == expected
    assert units_of_example("vgg16", "block", size=32) == ["features", "avgpool", "classifier"]


@needs_torchvision
def test_resnet50_is_its_bottlenecks_and_its_stem() -> None:
    blocks = [
        f"layer{stage}.{n}"
        for stage, count in ((1, 3), (2, 4), (3, 6), (4, 3))
        for n in range(count)
    ]
    assert units_of_example("resnet50", size=32) == [
        "conv1",
        "bn1",
        "relu",
        "maxpool",
        *blocks,
        "avgpool",
        "fc",
    ]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = linear(), linear()

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x))


class Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_a_stage_is_opened_down_to_its_blocks() -> None:
    model = nn.Sequential(Stage(), linear(), Stage())
    assert units_of(model, torch.randn(1, 4)) == [
        "0.blocks.0",
        "0.blocks.1",
        "1",
        "2.blocks.0",
        "2.blocks.1",
    ]


def test_a_module_that_is_not_called_is_opened() -> None:
    model = Parts(
        lambda self, x: self.b.down(self.b.up(self.a(x))), a=Block(), b=Block(), never=Block()
    )
    assert units_of(model, torch.randn(1, 4)) == ["a", "b.up", "b.down"]


def test_a_model_that_calls_no_module_is_one_unit() -> None:
    model = Parts(lambda self, x: x @ self.a.weight, a=linear())
    assert units_of(model, torch.randn(1, 4)) == [""]
    assert units_of(model, torch.randn(1, 4), "leaf") == [""]


def test_globs_are_exact_and_what_is_left_is_covered() -> None:
    assert units_of_example("gpt", globs=("blocks.*",), **GPT) == [
        "tokens",
        "blocks.0",
        "blocks.1",
        "norm",
        "head",
    ]
    assert units_of_example("gpt", globs=("blocks.0.attention",), **GPT) == [
        "tokens",
        "blocks.0.norm1",
        "blocks.0.attention",
        "blocks.0.norm2",
        "blocks.0.up",
        "blocks.0.down",
        "blocks.1",
        "norm",
        "head",
    ]


def test_the_outermost_of_nested_globs_is_the_unit() -> None:
    assert "blocks.0" in units_of_example("gpt", globs=("blocks.*", "blocks.*.up"), **GPT)
    assert "blocks.0.up" not in units_of_example("gpt", globs=("blocks.*", "blocks.*.up"), **GPT)


def test_a_glob_that_matches_nothing_is_answered_with_the_nearest() -> None:
    with pytest.raises(PartoptError) as caught:
        units_of_example("gpt", globs=("block.0",), **GPT)
    assert caught.value.message == "`units=block.0`: matches no module that the forward calls"
    assert caught.value.hint == 'did you mean "blocks.0"?'
    assert caught.value.exit_code == 2


class Normed(nn.Module):
    """A convolution with its norm, in most models of pictures one module."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv1d(4, 4, 1), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.convolution(x))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(Normed(), Normed(), Normed())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.block(x)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = Normed(), Normed()

    def forward(self, x: Tensor) -> Tensor:
        return self.left(x) + self.right(x)


def test_convolutions_with_their_norms_open_no_block_that_holds_them() -> None:
    model = nn.Sequential(Normed(), Residual(), Residual(), Branches())
    assert units_of(model, torch.ones(2, 4, 3)) == ["0", "1", "2", "3"]


@pytest.mark.parametrize("granularity", ["auto", "block"])
def test_experts_that_a_router_sends_parts_of_the_data_to_stay_with_it(granularity: str) -> None:
    x = torch.randn(64, WIDTH)
    assert units_of(nn.Sequential(Routed(), linear(WIDTH, 4)), x, granularity) == ["0", "1"]
    assert units_of(nn.Sequential(Routed(), Routed()), x, granularity) == ["0", "1"]


class Listed(nn.Module):
    """Three blocks, of which each takes what `order` makes of the input and the last result."""

    def __init__(self, order: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.order = order

    def forward(self, x: Tensor) -> Tensor:
        made = x
        for block in self.blocks:
            made = made + block(self.order(x, made))
        return made


@pytest.mark.parametrize(
    ("order", "whole"),
    [
        (lambda x, made: made, False),
        (lambda x, made: x + 0 * made, False),
        (lambda x, made: torch.zeros_like(x).copy_(made), False),
        (lambda x, made: x, True),
        (lambda x, made: x[:1], True),
    ],
)
def test_a_list_is_opened_where_one_of_its_blocks_takes_what_another_made(
    order: Callable[[Tensor, Tensor], Tensor], whole: bool
) -> None:
    blocks = [f"0.blocks.{number}" for number in range(3)]
    model = nn.Sequential(Listed(order), linear())
    assert units_of(model, torch.randn(2, 4)) == [*(["0"] if whole else blocks), "1"]
    assert len(find_branching(model, torch.randn(2, 4))) == whole
    assert all(not each._forward_hooks and not each._forward_pre_hooks for each in model.modules())


def test_a_list_of_which_one_block_is_called_is_in_series() -> None:
    model = Listed(lambda x, made: made)
    model.forward = lambda x: model.blocks[1](x)  # type: ignore[method-assign]
    assert find_branching(model, torch.randn(2, 4)) == set()
