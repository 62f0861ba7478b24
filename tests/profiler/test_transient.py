"""What is in memory only while a layer runs, worked by hand.

float32: 4 bytes an element; the bytes below are those of whole storages.
"""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from partopt.importers.repeat import repeat
from partopt.profiler.layers import Tracker
from partopt.profiler.observation import StorageEvent, transient_bytes
from partopt.profiler.observation import observe as observe_step
from partopt.profiler.settings import ProfileSettings, Subject
from tests.profiler import witnesses
from tests.profiler import zoo_language as language
from tests.profiler.helpers import (
    FakeClock,
    Parts,
    linear,
    needs_transformers,
    stash,
    structure,
)


def events(text, backward):
    """Events written as `layer:block+bytes` or `layer:block-bytes`."""
    made = []
    for word in text.split():
        layer, change = word.split(":")
        sign = "+" if "+" in change else "-"
        block, size = change.split(sign)
        made.append(StorageEvent(int(layer), backward, int(block), int(f"{sign}{size}")))
    return made


@pytest.mark.parametrize(
    ("forward", "backward", "kept", "peaks"),
    [
        # layer 0 keeps block 0 and has 1 for a while; layer 1 keeps 2 and frees nothing
        ("0:0+10 0:1+7 0:1-7 1:2+5", "", {0: 0, 2: 1}, {0: 7, 1: 0}),
        # layer 1 frees block 2 before it makes 4: its peak is with 3 alone beside all that is kept;
        # layer 0 begins with 3 and 4 alive, beside the 10 bytes of block 0
        ("0:0+10 1:2+20", "1:3+4 1:2-20 1:4+6 0:5+3 0:0-10", {0: 0, 2: 1}, {1: 4, 0: 13}),
        # block 1 is made by layer 0, and only layer 1 keeps it: a stage that ends with layer 0 has
        # it nevertheless while layer 0 runs
        ("0:0+10 0:1+7 1:2+5", "1:2-5 1:1-7 0:0-10", {0: 0, 1: 1, 2: 1}, {0: 7, 1: 0}),
        # the larger of forward and backward counts
        ("0:0+8 0:0-8", "0:1+3", {}, {0: 8}),
        ("0:0+3 0:0-3", "0:1+8", {}, {0: 8}),
        # the gradient that layer 1 leaves is alive in layer 0
        ("", "1:0+6 0:1+5 0:0-6 0:1-5", {}, {1: 6, 0: 11}),
    ],
)
def test_peaks_of_events_beyond_what_is_kept(forward, backward, kept, peaks):
    assert transient_bytes(events(forward, False) + events(backward, True), kept) == peaks


def transient(model, size=1, **options):
    [measured] = structure(model, lambda _: torch.randn(size, 4), **options).measurements
    return [layer.transient_bytes for layer in measured.layers]


@pytest.mark.slow
def test_a_chain_of_linear_layers():
    # The loss and its gradient (1 element each) live throughout. Layer 2 makes its weight's
    # gradient (8 x 2), which lives until it is added, then its input's (8); layer 1 begins with
    # that, makes its weight's (8 x 8), then its input's (8); layer 0 makes none of its input
    model = nn.Sequential(linear(4, 8), linear(8, 8), linear(8, 2))
    assert transient(model) == [4 * (2 + 8 + 4 * 8), 4 * (2 + 8 + 8 * 8 + 8), 4 * (2 + 2 * 8 + 8)]
    model[1].requires_grad_(False)
    assert transient(model)[1] == 4 * (2 + 8 + 8)


@pytest.mark.slow
def test_what_a_checkpoint_computes_again_is_transient():
    class Block(nn.Module):
        def __init__(self, again):
            super().__init__()
            self.inner = nn.Sequential(linear(4, 64), nn.Sigmoid(), linear(64, 4))
            self.again = again

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=False) if self.again else self.inner(x)

    units = {"units": ("1",), "granularity": "auto", "size": 32}
    plain, again = (
        transient(nn.Sequential(linear(), Block(b), linear()), **units) for b in (False, True)
    )
    # the sigmoid's result, 32 x 64 elements, and at the peak its argument or its gradient
    assert again[1] - plain[1] >= 4 * 32 * 64


class Checkpointed(nn.Module):
    """Blocks that are computed again, by themselves or by the model that calls them."""

    def __init__(self, blocks, inside, reentrant):
        super().__init__()

        def run(function, x):
            return checkpoint(function, x, use_reentrant=reentrant)

        class Block(nn.Sequential):
            def forward(self, x):
                return run(super().forward, x) if inside else super().forward(x)

        self.stem, self.head = linear(4, 8), linear(8, 4)
        self.blocks = nn.ModuleList(
            Block(linear(8, 16), nn.Sigmoid(), linear(16, 8)) for _ in range(blocks)
        )
        self.call = (lambda block, x: block(x)) if inside else run

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = self.call(block, x)
        return self.head(x)


# torch's, while the units are chosen
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("reentrant", [True, False])
def test_models_that_checkpoint_themselves_take_what_torchs_tracker_finds(inside, reentrant):
    """Each block keeps its input; two blocks that are repeated say what six say."""
    inputs = torch.randn(64, 4)
    deep, two = Checkpointed(6, inside, reentrant), Checkpointed(2, inside, reentrant)
    options = {"granularity": "auto", "units": ("stem", "blocks.*", "head")}
    of_six, of_two = (structure(each, lambda size: inputs, **options) for each in (deep, two))
    peak = witnesses.peak_bytes(deep, inputs, None)
    for profile in (of_six, repeat(of_two, "blocks", 6)):
        assert witnesses.modelled_bytes(profile) == pytest.approx(peak, rel=1e-3)
        kept = {layer: size for layers, size in stash(profile) for layer in layers}
        assert [kept[layer] for layer in range(1, 7)] == [64 * 8 * 4] * 6


@pytest.mark.slow
@needs_transformers
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_of_transformers_takes_what_torchs_tracker_finds(reentrant):
    model, inputs = language.llama().train(), language.ids(4)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    profile = structure(model, lambda size: inputs, granularity="auto")
    peak = witnesses.peak_bytes(model, inputs, None)
    assert witnesses.modelled_bytes(profile) == pytest.approx(peak, rel=1e-3)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.hidden = torch.cat([x, x])
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.hidden[: len(gradient)]


class Dropped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        torch.cat([x, x])
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


class Remembers(nn.Linear):
    def forward(self, x):
        self.last = super().forward(x)
        return self.last * 2


@pytest.mark.slow
def test_what_is_kept_outside_of_autograd_is_kept():
    # both linear layers keep their inputs
    for function, kept in ((Doubled, 32), (Dropped, 0)):
        own = lambda self, x, own=function: self.b(own.apply(self.a(x)))  # noqa: E731
        model = Parts(own, a=linear(), b=linear())
        assert stash(structure(model)) == [([0], 16 + kept), ([1], 16)]
    assert stash(structure(nn.Sequential(Remembers(4, 4), linear()))) == [([0], 32), ([1], 16)]


def observe(model, inputs):
    settings = ProfileSettings(microbatch_sizes=[1], device="cpu", granularity="leaf", steps=1)
    subject = Subject(model, lambda size: inputs, None, settings, FakeClock())
    names = [name for name, _ in model.named_children()]
    structure = observe_step(subject, inputs, Tracker(model, names))
    return structure.stash_groups, structure.transient_bytes


def net():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(True), nn.Flatten(), nn.Linear(288, 5)
    )


@pytest.mark.slow
def test_the_first_gradients_count_as_those_that_are_added():
    model, inputs = net(), torch.randn(2, 3, 8, 8)
    first = observe(model, inputs)
    assert all(parameter.grad is None for parameter in model.parameters())
    model(inputs).sum().backward()
    assert observe(model, inputs) == first
    assert all(parameter.grad is not None for parameter in model.parameters())
    with FakeTensorMode():
        assert observe(net(), torch.randn(2, 3, 8, 8)) == first
