"""Time, charged to the right layer: exactly by a clock of stamps, in shares by the processor's."""

import time

import pytest
import torch
from torch import nn

from partopt.profiler.layers import Backward
from partopt.profiler.step import Stepper
from tests.profiler.helpers import (
    CHAINS,
    FakeClock,
    ProcessorClock,
    example,
    layer_seconds,
    linear,
    needs_torchvision,
    structure,
    tracked,
)


class Logged(FakeClock):
    """Stamp n reads n * n; also writes down the stamps of each phase."""

    def __init__(self):
        super().__init__()
        self.phases = []

    def intervals_s(self, stamps):
        self.phases.append(list(stamps))
        return super().intervals_s(stamps)


def stepper(model, inputs, granularity="leaf", clock=None, loss_fn=None):
    tracker = tracked(model, inputs, granularity)
    return Stepper(model, inputs, loss_fn, tracker, clock or FakeClock())


@pytest.mark.parametrize("build", CHAINS.values(), ids=CHAINS.keys())
def test_the_layers_add_up_to_the_step_and_the_backward_takes_them_in_reverse(build):
    clock = Logged()
    times = stepper(build(), torch.randn(3, 4), clock=clock).time_layers()
    (f_first, *_, f_last), (b_first, *_, b_last) = clock.phases
    assert sum(times.forward_s) == f_last - f_first
    assert sum(times.backward_s) == b_last - b_first
    assert times.step_s == f_last - f_first + b_last - b_first
    assert all(second > 0 for second in times.forward_s + times.backward_s)

    model, inputs = build(), torch.randn(3, 4)
    tracker, order = tracked(model, inputs), []
    with tracker.watch():
        loss = model(inputs).sum()
    Backward(loss, tracker.began).call_at_changes(order.append)
    loss.backward()
    assert [tracker.current, *order] == list(range(tracker.current, -1, -1))


def test_intervals_are_charged_to_the_layer_that_runs():
    # stamps: forward 0 [a] 1 [b] 4, backward 9 [b] 16 [a] 25
    steps = stepper(nn.Sequential(linear(), linear()), torch.randn(1, 4))
    times = steps.time_layers()
    assert (times.forward_s, times.backward_s) == ([1, 3], [9, 7])
    assert not any(each._forward_hooks or each._forward_pre_hooks for each in steps.model.modules())


class Between(nn.Module):
    """Time passes between its units, of which the first may be called once more."""

    def __init__(self, clock):
        super().__init__()
        self.a, self.b, self.clock, self.twice = linear(), linear(), clock, False

    def forward(self, x):
        y = self.a(x)
        self.clock.stamp()  # the next stamp is b's
        return self.a(self.b(y)) if self.twice else self.b(y)


def test_what_runs_between_units_belongs_to_the_one_before():
    clock = FakeClock()
    model = Between(clock)
    steps = stepper(model, torch.randn(1, 4), clock=clock)
    begin = next(clock.stamps) + 1
    squares = [(begin + n) ** 2 for n in (0, 2, 3)]
    assert steps.time_layers().forward_s == [squares[1] - squares[0], squares[2] - squares[1]]
    model.twice = True  # a call that was not numbered
    assert len(steps.time_layers().forward_s) == 2


def test_gradients_of_an_instrumented_step_are_those_of_a_bare_one():
    source = example("gpt", layers=2, width=8, heads=2, context=4, vocabulary=11)
    model, gradients = source.build(), []
    steps = stepper(model, source.example_inputs(2), "auto", loss_fn=source.loss_fn)
    for run in (steps.bare, steps.time_layers):
        run()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    assert all(map(torch.equal, *gradients))


# --- shares of the processor's time, in one of three tries -------------------------------------

FORWARD_S = [0.010, 0.020, 0.015, 0.030]  # and twice that backward; hooks take up to a millisecond
MODELS = {
    "gpt": ({"layers": 4, "width": 256, "context": 64}, []),
    "resnet50": ({"size": 64, "classes": 10}, [needs_torchvision]),
}


class Spinning(torch.autograd.Function):
    """Keeps the processor busy for a known time, forward and backward."""

    @staticmethod
    def forward(ctx, x, weight, forward_s):
        ctx.forward_s = forward_s
        spin(forward_s)
        return x * weight

    @staticmethod
    def backward(ctx, gradient):
        spin(2 * ctx.forward_s)
        return gradient, gradient.sum(), None


class Spinner(nn.Module):
    def __init__(self, forward_s):
        super().__init__()
        self.weight, self.forward_s = nn.Parameter(torch.ones(())), forward_s

    def forward(self, x):
        return Spinning.apply(x, self.weight, self.forward_s)


def spin(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


@pytest.mark.slow
def test_each_layer_is_charged_its_share_of_the_forward_and_of_the_backward():
    """The intervals of a step add up whoever is charged, so known shares are the witness."""
    tries, true = [], shares(FORWARD_S)
    while len(tries) < 3:
        model = nn.Sequential(*map(Spinner, FORWARD_S))
        layers = structure(model, clock=ProcessorClock(), steps=3).measurements[0].layers
        ways = [each.forward_s for each in layers], [each.backward_s for each in layers]
        if all(shares(way) == pytest.approx(true, rel=0.1) for way in ways):
            return
        tries.append(ways)
    pytest.fail(f"true shares {true}, measured {tries}")


def shares(seconds):
    return [each / sum(seconds) for each in seconds]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torchvision")
@pytest.mark.parametrize("name", [pytest.param(n, marks=MODELS[n][1]) for n in MODELS])
def test_the_layers_cover_the_bare_step_within_ten_percent(name, monkeypatch):
    # the optimizer's step is no part of what is asserted, and takes as long as all the others
    monkeypatch.setattr("partopt.profiler.step.Stepper.optimizer", lambda *_: None)
    source, tries, threads = example(name, **MODELS[name][0]), [], torch.get_num_threads()
    torch.set_num_threads(1)  # threads that wait for each other take time without doing anything
    while len(tries) < 3 and not (tries and 0.9 <= tries[-1] <= 1.1):
        options = {"microbatch_sizes": [2], "granularity": "auto", "steps": 5}
        [measured] = structure(
            source.build(), source.example_inputs, source.loss_fn, ProcessorClock(), **options
        ).measurements
        assert measured.coverage == pytest.approx(layer_seconds(measured) / measured.step_s)
        tries.append(measured.coverage)
    torch.set_num_threads(threads)
    assert 0.9 <= tries[-1] <= 1.1, tries


# --- how many steps are timed -------------------------------------------------------------------


@pytest.mark.parametrize(("step_s", "steps"), [(1.0, 10), (1.001, 5)])
def test_fewer_steps_are_timed_where_a_step_is_long(step_s, steps):
    class Paced(FakeClock):
        def intervals_s(self, stamps):
            return [step_s] * (len(stamps) - 1)

    told = []
    structure(
        linear(), clock=Paced(), steps=None, progress=lambda _size, _done, of: told.append(of)
    )
    assert max(told) == steps
