import itertools

import pytest
import torch
from torch import nn

from partopt.errors import PartoptError
from partopt.profiler.layer_choice import (
    called_modules,
    choose_units,
    find_branching,
    split_large_units,
)
from partopt.profiler.tensors import place
from tests.profiler.helpers import Parts, example, linear, names, needs_torchvision, structure
from tests.profiler.zoo_odd import WIDTH, Routed


def units_of(model, inputs, granularity="auto", globs=()):
    branching = find_branching(model, inputs)
    return choose_units(model, called_modules(model, inputs), granularity, globs, branching)


def units_of_example(name, granularity="auto", globs=(), **arguments):
    source = example(name, **arguments)
    model = source.build()
    inputs = place(source.example_inputs(2), torch.device("cpu"), torch.float32)
    return units_of(model, inputs, granularity, globs)


GPT = {"layers": 2, "width": 8, "heads": 2, "context": 4, "vocabulary": 11}


def test_a_gpt_is_its_blocks_and_what_is_around_them():
    whole = ["tokens", "blocks.0", "blocks.1", "norm", "head"]
    for granularity, globs in (("auto", ()), ("block", ()), ("auto", ("blocks.*", "blocks.*.up"))):
        assert units_of_example("gpt", granularity, globs, **GPT) == whole
    parts = ["norm1", "attention.qkv", "attention.out", "norm2", "up", "down"]
    blocks = [f"blocks.{number}.{part}" for number in (0, 1) for part in parts]
    assert units_of_example("gpt", "leaf", **GPT) == ["tokens", *blocks, "norm", "head"]
    parts = ["norm1", "attention", "norm2", "up", "down"]  # what is left is covered
    blocks = [*(f"blocks.0.{part}" for part in parts), "blocks.1"]
    found = units_of_example("gpt", globs=("blocks.0.attention",), **GPT)
    assert found == ["tokens", *blocks, "norm", "head"]


@pytest.mark.slow
@needs_torchvision
def test_resnet50_is_its_bottlenecks_and_its_stem():
    counts = {1: 3, 2: 4, 3: 6, 4: 3}
    blocks = [f"layer{stage}.{n}" for stage, count in counts.items() for n in range(count)]
    stem = ["conv1", "bn1", "relu", "maxpool"]
    assert units_of_example("resnet50", size=32) == [*stem, *blocks, "avgpool", "fc"]


def test_a_model_of_lists_is_every_child_of_them():
    def lists():
        return nn.Sequential(nn.Sequential(linear(), nn.ReLU()), nn.ReLU(), nn.Sequential(linear()))

    assert units_of(lists(), torch.ones(1, 4)) == ["0.0", "0.1", "1", "2.0"]
    assert units_of(lists(), torch.ones(1, 4), "block") == ["0", "1", "2"]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = linear(), linear()

    def forward(self, x):
        return self.down(self.up(x))


class Stage(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def test_a_stage_is_opened_down_to_its_blocks():
    model = nn.Sequential(Stage(), linear(), Stage())
    stages = [[f"{n}.blocks.{block}" for block in (0, 1)] for n in (0, 2)]
    assert units_of(model, torch.randn(1, 4)) == [*stages[0], "1", *stages[1]]


def test_a_module_that_is_not_called_is_opened():
    model = Parts(
        lambda self, x: self.b.down(self.b.up(self.a(x))), a=Block(), b=Block(), never=Block()
    )
    assert units_of(model, torch.randn(1, 4)) == ["a", "b.up", "b.down"]


def test_a_model_that_calls_no_module_is_one_unit():
    model = Parts(lambda self, x: x @ self.a.weight, a=linear())
    assert units_of(model, torch.randn(1, 4)) == [""]
    assert units_of(model, torch.randn(1, 4), "leaf") == [""]


def test_a_glob_that_matches_nothing_is_answered_with_the_nearest():
    with pytest.raises(PartoptError) as caught:
        units_of_example("gpt", globs=("block.0",), **GPT)
    assert caught.value.message == "`units=block.0`: matches no module that the forward calls"
    assert caught.value.hint == 'did you mean "blocks.0"?'
    assert caught.value.exit_code == 2


class Normed(nn.Module):
    """A convolution with its norm, in most models of pictures one module."""

    def __init__(self):
        super().__init__()
        self.convolution, self.norm = nn.Conv1d(4, 4, 1), nn.BatchNorm1d(4)

    def forward(self, x):
        return self.norm(self.convolution(x))


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(Normed(), Normed(), Normed())

    def forward(self, x):
        return x + self.block(x)


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = Normed(), Normed()

    def forward(self, x):
        return self.left(x) + self.right(x)


def test_convolutions_with_their_norms_open_no_block_that_holds_them():
    model = nn.Sequential(Normed(), Residual(), Residual(), Branches())
    assert units_of(model, torch.ones(2, 4, 3)) == ["0", "1", "2", "3"]


@pytest.mark.parametrize("granularity", ["auto", "block"])
def test_experts_that_a_router_sends_parts_of_the_data_to_stay_with_it(granularity):
    x = torch.randn(64, WIDTH)
    assert units_of(nn.Sequential(Routed(), linear(WIDTH, 4)), x, granularity) == ["0", "1"]
    assert units_of(nn.Sequential(Routed(), Routed()), x, granularity) == ["0", "1"]


class Listed(nn.Module):
    """Three blocks, of which each takes what `order` makes of the input and the last result."""

    def __init__(self, order):
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.order = order

    def forward(self, x):
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
def test_a_list_is_opened_where_one_of_its_blocks_takes_what_another_made(order, whole):
    blocks = [f"0.blocks.{number}" for number in range(3)]
    model = nn.Sequential(Listed(order), linear())
    assert units_of(model, torch.randn(2, 4)) == [*(["0"] if whole else blocks), "1"]
    assert len(find_branching(model, torch.randn(2, 4))) == whole
    assert all(not each._forward_hooks and not each._forward_pre_hooks for each in model.modules())


def test_a_list_of_which_one_block_is_called_is_in_series():
    model = Listed(lambda x, made: made)
    model.forward = lambda x: model.blocks[1](x)  # type: ignore[method-assign]
    assert find_branching(model, torch.randn(2, 4)) == set()


# --- units that do much of the work are split where one layer's results cross -------------------


class Tower(nn.Module):
    """Linear layers that are attributes, not in a list: by itself one unit."""

    def __init__(self, *widths, skip=False):
        super().__init__()
        for number, (inputs, outputs) in enumerate(itertools.pairwise(widths)):
            self.add_module(f"layer{number}", linear(inputs, outputs))
        self.skip = skip

    def forward(self, x):
        made = x
        for layer in self.children():
            made = layer(made)
        return made + x if self.skip else made


def split_units(model, inputs=None):
    inputs = torch.ones(1, 4) if inputs is None else inputs
    calls = called_modules(model, inputs)
    return split_large_units(model, inputs, None, choose_units(model, calls), calls)


def test_a_tower_is_split_into_pieces_of_a_tenth_at_most():
    # 24 layers of equal work, a third in a piece would be an eighth: 12 pieces of 2
    tower = Tower(*[4] * 25)
    model = nn.Sequential(tower)
    assert split_units(model) == [f"0.layer{number}" for number in range(0, 24, 2)]


def in_turn(self, x):
    for module in self.children():
        x = module(x)
    return x


def test_a_unit_that_does_a_tenth_at_most_stays_whole():
    # 2 of 20 layers
    model = Parts(in_turn, **{f"tower{number}": Tower(4, 4, 4) for number in range(10)})
    assert split_units(model) == [f"tower{number}" for number in range(10)]


def test_towers_that_are_attributes_are_split_though_there_are_two():
    model = Parts(lambda self, x: self.a(x) + self.b(x), a=Tower(4, 4, 4), b=Tower(4, 4, 4))
    # while b runs, the result of a crosses too
    assert split_units(model) == ["a.layer0", "a.layer1", "b"]


def test_what_stays_whole():
    """Repeated blocks; what a skip connection spans, or is called twice; no matrix products."""
    for repeat in (nn.ModuleList, lambda blocks: nn.Sequential(*blocks)):
        blocks = repeat([Tower(4, 4, 4) for _ in range(3)])
        model = Parts(lambda self, x: in_turn(self.blocks, x), blocks=blocks)
        assert split_units(model) == ["blocks.0", "blocks.1", "blocks.2"]
    # what layer a makes crosses every cut inside of the tower, beside what the tower makes
    assert split_units(nn.Sequential(linear(), Tower(4, 4, 4, 4, skip=True))) == ["0", "1"]
    assert split_units(Parts(lambda self, x: self.a(self.a(x)), a=Tower(4, 4, 4))) == ["a"]
    model = nn.Sequential(nn.BatchNorm1d(4), nn.ReLU())
    assert split_units(model, torch.randn(8, 4)) == ["0", "1"]


def test_a_module_that_is_called_twice_inside_begins_no_piece():
    class Twice(Tower):
        def forward(self, x):
            return self.layer1(self.layer2(self.layer1(self.layer0(x))))

    assert split_units(nn.Sequential(Twice(4, 4, 4, 4), linear())) == ["0.layer0", "0.layer2", "1"]


def test_what_does_hardly_anything_is_no_piece_of_its_own():
    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.up, self.act = nn.LayerNorm(4), linear(4, 40), nn.ReLU()
            self.down, self.end = linear(40, 4), nn.Tanh()

        def forward(self, x):
            return self.end(self.down(self.act(self.up(self.norm(x)))))

    # norm and up; act, down and end
    assert split_units(nn.Sequential(Normed())) == ["0.norm", "0.act"]


@pytest.mark.slow
def test_the_pieces_hold_all_that_the_unit_held():
    def of(**options):
        return structure(nn.Sequential(linear(), Tower(4, 64, 64, 4)), **options)

    split, whole = of(granularity="auto"), of(granularity="block")
    assert names(split) == ["0", "1.layer0", "1.layer1", "1.layer2"]
    assert names(whole) == names(of(units=("1",), granularity="auto")) == ["0", "1"]
    assert split.parameter_bytes() == whole.parameter_bytes()
    assert [layer.parameter_bytes for layer in split.layers[1:]] == [1024, 16384, 1024]
