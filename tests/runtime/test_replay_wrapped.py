"""Layers that return dataclasses, and checkpoints of the model's own around layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from partopt.errors import PartoptError
from partopt.runtime.cuts import check_cuts
from partopt.runtime.recording import record_model
from partopt.runtime.units import number_calls
from tests.profiler.helpers import Parts, linear
from tests.runtime.replayed import Replayed, error_of_stages, replayed
from tests.runtime.test_replay import TOLERANCE, vectors

NAMES = ["a", "b", "c", "d"]


def model(forward: Any, **modules: nn.Module) -> Replayed:
    layers = {name: linear() for name in NAMES} | modules
    return replayed(lambda: Parts(forward, **layers), vectors, units=NAMES)


def check_all_cuts(case: Replayed) -> None:
    """Cut into two and three stages in every way, whole, split and recomputed."""
    boundaries = range(1, len(case.layers))
    every: list[Sequence[int]] = [[0, cut] for cut in boundaries]
    every += [[0, *cuts] for cuts in combinations(boundaries, 2)]
    for starts in every:
        for options in ({}, {"split": True}, {"recompute": True}):
            assert error_of_stages(case, starts, **options) < TOLERANCE


@dataclass(frozen=True)
class Inner:
    scale: Tensor
    count: int = 2


@dataclass
class Result:
    hidden: Tensor
    inner: Inner
    names: list[str] = field(init=False)

    def __post_init__(self) -> None:
        self.names = ["x"]


@dataclass(slots=True)
class Slotted:
    hidden: Tensor


class Returning(nn.Module):
    """Takes and returns a dataclass, in which there is another one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()

    def forward(self, given: Result) -> Result:
        hidden = self.linear(given.hidden) * given.inner.scale
        return Result(hidden, Inner(given.inner.scale + hidden.mean(), given.inner.count))


class Slotting(nn.Module):
    """Returns a dataclass without a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()

    def forward(self, x: Tensor) -> Slotted:
        return Slotted(self.linear(x))


def test_layers_that_return_dataclasses() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        made = Result(self.a(x), Inner(torch.ones(())))
        made = self.c(self.b(made))
        assert made.names == ["x"] and made.inner.count == 2
        return self.d(made.hidden).square().mean() + made.inner.scale

    check_all_cuts(model(forward, b=Returning(), c=Returning()))


def test_a_dataclass_with_slots() -> None:
    check_all_cuts(model(lambda self, x: self.d(self.c(self.b(self.a(x)).hidden)), b=Slotting()))


def kept(layer: nn.Module, *given: Any) -> Any:
    return checkpoint(layer, *given, use_reentrant=False)


def test_checkpoints_around_layers() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        first = kept(self.a, x)
        second = kept(lambda x, y: self.b(x) * y, first, first.detach())
        return kept(self.d, kept(self.c, second) + first)

    check_all_cuts(model(forward))


def test_a_checkpoint_reads_what_it_is_not_given() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        first = self.a(x)
        second = self.b(first)
        return self.d(kept(lambda x: self.c(x) * first, second))

    check_all_cuts(model(forward))


def test_a_checkpoint_drops_the_same_numbers_in_the_backward() -> None:
    case = model(
        lambda self, x: self.d(self.c(kept(self.b, self.a(x)))),
        b=nn.Sequential(linear(), nn.Dropout(0.5)),
    )
    torch.manual_seed(3)
    case.reference  # noqa: B018
    torch.manual_seed(3)
    assert error_of_stages(case, [0, 1, 2]) < TOLERANCE


def test_a_checkpoint_around_several_layers_keeps_them_together() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.d(kept(lambda x: self.c(self.b(x)), self.a(x)))

    case = model(forward)
    with pytest.raises(PartoptError, match=r'"b" and layer 2 "c" once more') as refused:
        check_cuts(case.record, [2])
    assert refused.value.fields["layers"] == ["b", "c"]
    for starts in ([0, 1], [0, 3], [0, 1, 3]):
        assert error_of_stages(case, starts) < TOLERANCE


def test_a_reentrant_checkpoint_keeps_its_layers_and_all_others_together() -> None:
    """Its gradients go to what it is given, which is no tensor that another stage has sent."""

    def forward(self: Any, x: Tensor) -> Tensor:
        made = checkpoint(lambda x: self.c(self.b(x)), self.a(x), use_reentrant=True)
        return self.d(made)

    whole = Parts(forward, **{name: linear() for name in NAMES})
    seen = record_model(whole, vectors(2), None, number_calls(NAMES))
    for cut in (1, 2, 3):
        with pytest.raises(PartoptError, match='CheckpointFunction wraps what layer 1 "b" gets'):
            check_cuts(seen, [cut])
