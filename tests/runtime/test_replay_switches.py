"""What models switch on and off within a forward, and what it must leave as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from partopt.profiler.as_trained import cast
from partopt.runtime.cuts import cut_before
from tests.profiler.helpers import Parts, linear
from tests.runtime.replayed import (
    Replayed,
    error_of_stages,
    replayed,
    run_forwards,
)
from tests.runtime.test_replay import TOLERANCE, vectors
from tests.runtime.test_replay_refusals import chain


def parts(forward: Callable[[Any, Tensor], Any], **modules: nn.Module) -> Replayed:
    """A model of the layers "a", "b" and "c", of which `modules` are some."""
    layers = {"a": linear(), "b": linear(), "c": linear(), **modules}
    return replayed(lambda: Parts(forward, **layers), vectors, units=["a", "b", "c"])


class Uncounted(nn.Module):
    """Switches gradients off within an autocast, and autocast off within that."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = linear(), linear()

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            x = self.first(x)
            with torch.no_grad():
                fixed = self.second(x)
                with torch.autocast("cpu", enabled=False):
                    fixed = fixed.float() @ self.second.weight
            return x * fixed


def frozen(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        fixed = self.b(self.a(x) * 2.0) * 2.0
    return self.c(fixed)


SWITCHED = {
    "gradients within autocast": lambda: parts(chain, a=Uncounted(), b=Uncounted()),
    "layers without gradients": lambda: parts(frozen),
    "a frozen layer": lambda: parts(chain, b=linear().requires_grad_(False)),
    "an identity": lambda: parts(lambda self, x: self.c(self.b(self.a(x)) * 3.0), b=nn.Identity()),
    "a parameter between": lambda: parts(lambda self, x: self.c(self.b(self.a(x) @ self.c.weight))),
}


@pytest.mark.parametrize("name", SWITCHED)
def test_what_is_switched_on_and_off(name: str) -> None:
    case = SWITCHED[name]()
    assert error_of_stages(case) < TOLERANCE
    assert error_of_stages(case, recompute=True) < TOLERANCE


def test_the_autocast_of_a_plan() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.c(self.b(torch.tanh(self.a(x))))

    case = parts(cast(forward, torch.device("cpu"), torch.bfloat16), c=Uncounted())
    assert {each.dtype for each in cut_before(case.record, 1).likeness} == {torch.bfloat16}
    assert error_of_stages(case) < TOLERANCE


def test_a_module_says_each_time_what_it_drops() -> None:
    case = parts(chain, b=nn.Dropout(0.5))
    stages = case.stages([0, 1, 2])
    assert run_forwards(stages) != run_forwards(stages)
    for stage in stages:
        stage.model.b.p = 0.0
    losses = run_forwards(stages)
    case.model.b.p = 0.0
    assert losses == case.reference[0]


def test_the_model_is_left_as_it_was() -> None:
    layers = {"a": nn.BatchNorm1d(4), "b": nn.Sequential(nn.Dropout(0.5), linear())}
    case = parts(chain, **layers)
    attributes = [set(vars(each)) for each in case.model.modules()]
    state = {name: each.clone() for name, each in case.model.state_dict().items()}
    before = torch.get_rng_state()
    assert case.record.changed_buffers == {
        "a.running_mean",
        "a.running_var",
        "a.num_batches_tracked",
    }
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(each, state[name]) for name, each in case.model.state_dict().items())
    assert [set(vars(each)) for each in case.model.modules()] == attributes
