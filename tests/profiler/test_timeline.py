"""Which layer each interval is charged to. The clock is a fake: stamp n reads n * n."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from partopt.profiler.layers import Backward, Tracker
from partopt.profiler.step import Stepper
from partopt.profiler.units import called_modules, choose_units
from tests.profiler.helpers import FakeClock, Parts, example, linear


class Logged(FakeClock):
    """Also writes down how many stamps each phase took."""

    def __init__(self) -> None:
        super().__init__()
        self.phases: list[list[float]] = []

    def intervals_s(self, stamps: list[float]) -> list[float]:
        self.phases.append(list(stamps))
        return super().intervals_s(stamps)


def stepper(
    model: nn.Module, inputs: object, granularity: str = "leaf", clock: FakeClock | None = None
) -> Stepper:
    tracker = Tracker(model, choose_units(model, called_modules(model, inputs), granularity))
    with tracker.discover():
        model(inputs)
    return Stepper(model, inputs, None, tracker, clock or FakeClock())


def backward_order(model: nn.Module, inputs: Tensor, granularity: str = "leaf") -> list[int]:
    """The layers that the backward comes to, in order, the last layer first."""
    tracker = Tracker(model, choose_units(model, called_modules(model, inputs), granularity))
    with tracker.discover():
        model(inputs)
    order: list[int] = []
    with tracker.watch():
        loss = model(inputs).sum()
    Backward(loss, tracker.began).call_at_changes(order.append)
    loss.backward()
    return [tracker.current, *order]


MODELS = {
    "chain": lambda: nn.Sequential(linear(), nn.ReLU(), linear()),
    "in place": lambda: nn.Sequential(
        linear(), nn.ReLU(inplace=True), linear(), nn.ReLU(inplace=True)
    ),
    "called twice": lambda: Parts(
        lambda self, x: self.a(self.b(self.a(x))), a=linear(), b=linear()
    ),
    "skip": lambda: Parts(
        lambda self, x: self.c((y := self.a(x)) + self.b(y)), a=linear(), b=linear(), c=linear()
    ),
    "view": lambda: Parts(
        lambda self, x: self.b(self.a(x).view(-1, 2, 2).transpose(1, 2).reshape(-1, 4)),
        a=linear(),
        b=linear(),
    ),
    "tied": lambda: Parts(
        lambda self, x: functional.linear(self.b(self.a(x)), self.a.weight), a=linear(), b=linear()
    ),
}


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
def test_the_layers_add_up_to_the_step_exactly(model: object) -> None:
    clock = Logged()
    steps = stepper(model(), torch.randn(3, 4), clock=clock)
    times = steps.instrumented()
    (f_first, *_, f_last), (b_first, *_, b_last) = clock.phases
    assert sum(times.forward_s) == f_last - f_first
    assert sum(times.backward_s) == b_last - b_first
    assert times.step_s == f_last - f_first + b_last - b_first
    assert all(second > 0 for second in times.forward_s + times.backward_s)


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
def test_the_backward_goes_through_the_layers_in_reverse(model: object) -> None:
    built = model()
    order = backward_order(built, torch.randn(3, 4))
    assert order == sorted(order, reverse=True)
    assert len(order) == len(set(order)) == order[0] + 1


def test_intervals_are_charged_to_the_layer_that_runs() -> None:
    # stamps: forward 0 [a] 1 [b] 4, backward 9 [b] 16 [a] 25
    times = stepper(nn.Sequential(linear(), linear()), torch.randn(1, 4)).instrumented()
    assert times.forward_s == [1, 3]
    assert times.backward_s == [9, 7]


def test_what_runs_between_units_belongs_to_the_one_before() -> None:
    class Between(nn.Module):
        def __init__(self, clock: FakeClock) -> None:
            super().__init__()
            self.a, self.b, self.clock = linear(), linear(), clock

        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x)
            self.clock.stamp()  # time passes between the units: the next stamp is b's
            return self.b(y)

    clock = FakeClock()
    steps = stepper(Between(clock), torch.randn(1, 4), clock=clock)
    begin = next(clock.stamps) + 1
    assert steps.instrumented().forward_s == [
        (begin + 2) ** 2 - begin**2,
        (begin + 3) ** 2 - (begin + 2) ** 2,
    ]


def test_a_backward_that_needs_no_input_gradient_is_charged_too() -> None:
    # the input needs no gradient: a full backward hook on the first module would never fire
    times = stepper(
        nn.Sequential(linear(), nn.ReLU(inplace=True)), torch.randn(1, 4)
    ).instrumented()
    assert times.backward_s[0] > 0


def test_a_call_that_the_numbering_does_not_know_stays_with_the_layer_before() -> None:
    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.twice = linear(), linear(), False

        def forward(self, x: Tensor) -> Tensor:
            x = self.b(self.a(x))
            return self.a(x) if self.twice else x

    model = Sometimes()
    steps = stepper(model, torch.randn(1, 4))
    model.twice = True
    assert len(steps.instrumented().forward_s) == 2


def test_hooks_are_gone_after_a_step() -> None:
    steps = stepper(nn.Sequential(linear(), linear()), torch.randn(1, 4))
    steps.instrumented()
    assert not any(
        module._forward_hooks or module._forward_pre_hooks for module in steps.model.modules()
    )


def test_gradients_of_an_instrumented_step_are_those_of_a_bare_one() -> None:
    source = example("gpt", layers=2, width=8, heads=2, context=4, vocabulary=11)
    model, ids = source.build(), source.example_inputs(2)
    gradients = []

    steps = stepper(model, ids, "auto")
    steps.loss_fn = source.loss_fn
    for run in (steps.bare, steps.instrumented):
        run()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    assert all(
        torch.equal(bare, instrumented) for bare, instrumented in zip(*gradients, strict=True)
    )
