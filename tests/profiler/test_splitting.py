"""Units that do much of the work are split where one layer's results cross."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from partopt.profiler.units import called_modules, choose_units, split_large_units
from tests.profiler.helpers import Parts, linear, names, structure


class Tower(nn.Module):
    """Linear layers that are attributes, not in a list: by itself one unit."""

    def __init__(self, *widths: int, skip: bool = False) -> None:
        super().__init__()
        for number, (inputs, outputs) in enumerate(itertools.pairwise(widths)):
            self.add_module(f"layer{number}", linear(inputs, outputs))
        self.skip = skip

    def forward(self, x: Tensor) -> Tensor:
        made = x
        for layer in self.children():
            made = layer(made)
        return made + x if self.skip else made


def units_of(model: nn.Module, inputs: Tensor | None = None) -> list[str]:
    inputs = torch.ones(1, 4) if inputs is None else inputs
    calls = called_modules(model, inputs)
    return split_large_units(model, inputs, None, choose_units(model, calls), calls)


def test_a_tower_is_split_into_pieces_of_a_tenth_at_most() -> None:
    # 24 layers of equal work, a third in a piece would be an eighth: 12 pieces of 2
    tower = Tower(*[4] * 25)
    model = nn.Sequential(tower)
    assert units_of(model) == [f"0.layer{number}" for number in range(0, 24, 2)]


def test_a_unit_that_does_a_tenth_at_most_stays_whole() -> None:
    # 2 of 20 layers
    towers = [Tower(4, 4, 4) for _ in range(10)]
    model = Parts(run_in_turn, **{f"tower{number}": tower for number, tower in enumerate(towers)})
    assert units_of(model) == [f"tower{number}" for number in range(10)]


def run_in_turn(self: Parts, x: Tensor) -> Tensor:
    for module in self.children():
        x = module(x)
    return x


def test_towers_that_are_attributes_are_split_though_there_are_two() -> None:
    model = Parts(lambda self, x: self.a(x) + self.b(x), a=Tower(4, 4, 4), b=Tower(4, 4, 4))
    # while b runs, the result of a crosses too
    assert units_of(model) == ["a.layer0", "a.layer1", "b"]


@pytest.mark.parametrize("repeat", [nn.ModuleList, lambda blocks: nn.Sequential(*blocks)])
def test_a_repeated_block_in_a_list_stays_whole(
    repeat: Callable[[list[nn.Module]], nn.Module],
) -> None:
    def forward(self: Parts, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    model = Parts(forward, blocks=repeat([Tower(4, 4, 4) for _ in range(3)]))
    assert units_of(model) == ["blocks.0", "blocks.1", "blocks.2"]


def test_a_unit_that_a_skip_connection_spans_stays_whole() -> None:
    # what layer a makes crosses every cut inside of the tower, beside what the tower makes
    model = nn.Sequential(linear(), Tower(4, 4, 4, 4, skip=True))
    assert units_of(model) == ["0", "1"]


def test_a_unit_that_is_called_twice_stays_whole() -> None:
    model = Parts(lambda self, x: self.a(self.a(x)), a=Tower(4, 4, 4))
    assert units_of(model) == ["a"]


def test_a_module_that_is_called_twice_inside_begins_no_piece() -> None:
    class Twice(Tower):
        def forward(self, x: Tensor) -> Tensor:
            return self.layer1(self.layer2(self.layer1(self.layer0(x))))

    assert units_of(nn.Sequential(Twice(4, 4, 4, 4), linear())) == ["0.layer0", "0.layer2", "1"]


def test_what_does_hardly_anything_is_no_piece_of_its_own() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.up, self.act = nn.LayerNorm(4), linear(4, 40), nn.ReLU()
            self.down, self.end = linear(40, 4), nn.Tanh()

        def forward(self, x: Tensor) -> Tensor:
            return self.end(self.down(self.act(self.up(self.norm(x)))))

    # norm and up; act, down and end
    assert units_of(nn.Sequential(Normed())) == ["0.norm", "0.act"]


def test_a_model_without_matrix_products_stays_as_it_is() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.ReLU())
    assert units_of(model, torch.randn(8, 4)) == ["0", "1"]


def test_the_pieces_hold_all_that_the_unit_held() -> None:
    build: Callable[[], nn.Module] = lambda: nn.Sequential(linear(), Tower(4, 64, 64, 4))  # noqa: E731
    split, whole = structure(build(), granularity="auto"), structure(build(), granularity="block")
    assert names(split) == ["0", "1.layer0", "1.layer1", "1.layer2"]
    assert names(whole) == ["0", "1"]
    assert split.parameter_bytes() == whole.parameter_bytes()
    assert [layer.parameter_bytes for layer in split.layers[1:]] == [1024, 16384, 1024]


def test_units_of_ones_own_and_other_granularities_are_not_split() -> None:
    model = nn.Sequential(linear(), Tower(4, 64, 64, 4))
    for options in ({"units": ("1",), "granularity": "auto"}, {"granularity": "block"}):
        assert names(structure(model, **options)) == ["0", "1"]
