"""The input part of the backward. The clock counts the work of matrix products instead of time, so
that every part is exact.
"""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from partopt.cost.chain import chain_of
from partopt.profiler.layers import Backward
from tests.profiler.helpers import CHAINS, FakeClock, linear, structure, tracked

_PRODUCTS = {torch.ops.aten.mm.default: (0, 1), torch.ops.aten.addmm.default: (1, 2)}


class WorkClock(FakeClock, TorchDispatchMode):
    """Multiplications of matrix products so far; everything else takes no time."""

    def __init__(self):
        TorchDispatchMode.__init__(self)
        self.work = 0.0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in _PRODUCTS:
            left, right = (args[position] for position in _PRODUCTS[func])
            self.work += left.numel() * right.shape[1]
        return func(*args, **(kwargs or {}))

    def stamp(self):
        return self.work


def parts(model, **options):
    """The backward of each layer and its input part, in multiplications of one row of 4."""
    with WorkClock() as clock:
        [measurement] = structure(model, clock=clock, **options).measurements
    return [(layer.backward_s, layer.backward_input_s) for layer in measurement.layers]


@pytest.mark.slow
def test_the_input_part_by_hand():
    # each 1 x 4 by 4 x 4: 16 multiplications; the first has no input gradient at all
    assert parts(nn.Sequential(linear(), linear(), linear())) == [(16, 0), (32, 16), (32, 16)]
    assert parts(linear()) == [(16, 0)]
    # a custom function cannot be split
    assert parts(nn.Sequential(linear(), Custom(4, 4))) == [(16, 0), (32, 32)]


@pytest.mark.slow
def test_an_mlp_layer_s_input_part_is_its_backward_without_weights():
    def mlp(trained):
        block = nn.Sequential(linear(4, 16), nn.GELU(), linear(16, 4)).requires_grad_(trained)
        return nn.Sequential(linear(), block)

    assert parts(mlp(True), granularity="block")[1] == (256, 128)
    assert parts(mlp(False), granularity="block")[1] == (128, 128)


@pytest.mark.parametrize("build", CHAINS.values(), ids=CHAINS.keys())
def test_weights_take_as_much_as_they_have_products(build):
    """Every product of the forward has one in the backward for its weight: what is left out."""
    model = build()
    with WorkClock() as clock:
        [measurement] = structure(model, clock=clock).measurements
    for layer in measurement.layers:
        assert layer.backward_s - layer.backward_input_s == layer.forward_s


# in place no tensor holds its gradient
@pytest.mark.parametrize("name", sorted(CHAINS.keys() - {"in place"}))
def test_the_gradients_asked_for_are_those_between_layers(name):
    model, x = CHAINS[name](), torch.randn(3, 4)
    tracker, results, order = tracked(model, x), [], []

    def left(_layer, output):
        output.retain_grad()
        results.append(output)

    with tracker.watch(left=left):
        loss = model(x).sum()
    edges = Backward(loss, tracker.began).input_gradients(order.append)
    loss.backward(retain_graph=True)
    # in whatever order of their numbers: views may lie between layers
    crossing = [result.grad.flatten().sort().values for result in results[:-1]]
    model.zero_grad()
    order.clear()
    found = torch.autograd.grad(loss, edges)
    assert order == sorted(order, reverse=True)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert len(found) >= len(crossing)
    for gradient in found:
        assert any(torch.equal(gradient.flatten().sort().values, other) for other in crossing)


class Both(torch.autograd.Function):
    """Computes both gradients at once, as custom Functions do."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ weight.t(), x.t() @ gradient


class Custom(nn.Linear):
    def forward(self, x):
        return Both.apply(x, self.weight)


def in_checkpoint(reentrant):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(linear(), linear())

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=reentrant)

    return nn.Sequential(linear(), Block(), Block())


def test_a_recomputed_forward_belongs_to_the_input_part():
    blocks = parts(in_checkpoint(reentrant=False), granularity="block")[1:]
    assert blocks == [(80, 48), (80, 48)]  # the first product is run again, the last need not be


# torch's, while the units are chosen
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
def test_where_autograd_refuses_nothing_is_said_and_the_rest_is_measured():
    measured = parts(in_checkpoint(reentrant=True), granularity="block")
    assert [input_part for _, input_part in measured] == [None] * 3
    assert all(backward > 0 for backward, _ in measured)


def test_a_part_longer_than_the_whole_is_cut_to_it(monkeypatch):
    monkeypatch.setattr("partopt.profiler.step.Stepper.input_gradients", lambda self: [1e9, 1e9])
    assert parts(nn.Sequential(linear(), linear())) == [(16, 16), (32, 32)]


@pytest.mark.parametrize(("stamp", "bound"), [(8, True), (2, False), (1, False), (0, False)])
def test_what_hooks_take_is_taken_off_every_part_where_it_is_much(stamp, bound):
    class Hooked(WorkClock):
        def stamp(self):
            self.work += stamp
            return self.work

    model = nn.Sequential(linear(), linear(), linear())
    with Hooked() as clock:
        [measured] = structure(model, clock=clock).measurements
    assert measured.overhead == pytest.approx((128 + 6 * stamp) / (128 + stamp))
    assert measured.overhead_bound is bound
    scale = measured.overhead if stamp > 1 else 1.0  # by 4 % nothing is scaled
    first = 16 + stamp, 16 + stamp, 0
    for layer, expected in zip(
        measured.layers, [first, *[(16 + stamp, 32 + stamp, 16 + stamp)] * 2], strict=True
    ):
        times = layer.forward_s, layer.backward_s, layer.backward_input_s
        assert times == pytest.approx([each / scale for each in expected])
        assert (layer.forward_stdev_s, layer.backward_stdev_s) == (0.0, 0.0)  # of one step


@pytest.mark.slow
def test_planning_puts_off_what_the_weights_take():
    with WorkClock() as clock:
        profile = structure(nn.Sequential(linear(), linear()), clock=clock, microbatch_sizes=[2, 6])
    assert list(chain_of(profile, 4).gw) == [64, 64]
    assert list(chain_of(profile, 4).g) == [64, 128]
