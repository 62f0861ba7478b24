"""What is said of measurements that cannot be trusted."""

import pytest
import torch
from msgspec.structs import replace
from torch import nn
from torch.utils.checkpoint import checkpoint

from partopt.documents.profile import Environment
from partopt.errors import PartoptError
from partopt.profiler.conditions import ClockRate
from partopt.profiler.estimating import estimate
from partopt.profiler.summary import note_overhead, note_throttled
from tests.helpers import measurement, out_of_memory
from tests.profiler.helpers import FakeClock, Parts, linear, structure


def notes_of(profile, code):
    return [note for note in profile.notes if note.code == code]


class Again(nn.Module):
    """Runs its layer again in the backward."""

    def __init__(self, reentrant):
        super().__init__()
        self.inner, self.reentrant = nn.Sequential(linear(), nn.GELU()), reentrant

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


def checkpointed(reentrant, together):
    """Two layers between plain ones, in a checkpoint each, or in one `together`."""

    def forward(self, x):
        x = self.first(x)
        both = lambda x: self.b(self.a(x))  # noqa: E731
        for block in (both,) if together else (self.a, self.b):
            x = checkpoint(block, x, use_reentrant=reentrant)
        return self.last(x)

    return Parts(forward, first=linear(), a=linear(), b=linear(), last=linear())


# torch's, while the units are chosen
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
def test_layers_that_share_a_reentrant_checkpoint_are_named_but_for_the_first():
    profile = structure(checkpointed(True, together=True), microbatch_sizes=[1, 2])
    [note] = notes_of(profile, "no-backward")
    assert note.fields == {"layers": ["b"]}
    told = "b: no backward of its own is seen, its time is charged to its neighbours;"
    assert note.text.startswith(told)
    assert "use_reentrant=False" in note.text
    assert "`units`" in note.text
    # others are measured without a note, and so is a unit that holds its checkpoint
    for reentrant, together in ((True, False), (False, False), (False, True)):
        assert notes_of(structure(checkpointed(reentrant, together)), "no-backward") == []
    holding = structure(nn.Sequential(linear(), Again(True), Again(True)), granularity="block")
    assert notes_of(holding, "no-backward") == []


# torch's, while the units are chosen
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
def test_a_layer_has_the_backward_of_its_reentrant_checkpoint():
    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, gradient):
            clock.now += 100.0
            return gradient

    class Clock(FakeClock):
        now = 0.0

        def stamp(self):
            self.now += 1.0
            return self.now

    clock = Clock()
    model = checkpointed(True, together=False)
    model.b = Parts(lambda self, x: Slow.apply(self.inner(x)), inner=linear())
    options = {"units": ("first", "a", "b", "last"), "granularity": "auto"}
    [measured] = structure(model, clock=clock, **options).measurements
    assert [layer.backward_s > 50 for layer in measured.layers] == [False, False, True, False]


def test_a_layer_that_the_loss_does_not_need_has_no_backward_and_no_note():
    def forward(self, x):
        made = self.a(x)
        self.unused(made)
        with torch.no_grad():
            self.frozen(made)
        return self.b(made)

    parts = {name: linear() for name in ("a", "unused", "frozen", "b")}
    assert notes_of(structure(Parts(forward, **parts)), "no-backward") == []


def test_a_busy_machine_is_noted():
    class Busy(FakeClock):
        def idle_share(self):
            return 0.4

    [note] = notes_of(structure(linear(), clock=Busy()), "busy-machine")
    assert note.text.startswith(
        "the model had the processor for 60% of the time: the times are processor time, by wall "
        "time a step took 1.7 times as long"
    )
    assert note.fields == {"idle_share": 0.4}


def test_each_size_at_which_steps_with_hooks_differ_from_bare_ones_is_noted():
    overheads = [1.5, 1.1, 1.05, 1.0, 0.95, 0.9]
    sizes = [
        measurement([1.0], microbatch_size=size, overhead=overhead, overhead_bound=overhead > 1.2)
        for size, overhead in enumerate(overheads, start=1)
    ]
    found = list(note_overhead([*sizes, out_of_memory(8)]))
    expected = {
        1: "the hooks cost 50 % of the step: the layers' shares are in doubt",
        2: "the hooks cost 10 % of the step: the layers' times are scaled to the bare step",
        6: "steps with hooks took 10 % less time than bare ones: the device's speed changed "
        "meanwhile",
    }
    assert [note.text.partition(";")[0] for note in found] == [
        f"microbatch {size}: {text}" for size, text in expected.items()
    ]
    assert [note.code for note in found] == ["hook-overhead", "hook-overhead", "uneven-steps"]
    for note, size in zip(found, expected, strict=True):
        assert note.fields == {"microbatch_size": size, "overhead": overheads[size - 1]}


@pytest.mark.slow
def test_inputs_that_do_not_grow_with_the_microbatch_are_noted_once():
    for rows, sizes, noted in (
        (lambda size: 8, [1, 2, 4], [2]),
        (lambda size: 7, [8], [8]),
        (lambda size: size, [1, 2, 4], []),
        (lambda size: size * 3, [8], []),
        (lambda size: 7, [1], []),
    ):
        inputs = lambda size, rows=rows: torch.randn(rows(size), 4)  # noqa: E731
        profile = structure(linear(), inputs, microbatch_sizes=sizes)
        found = [note.fields for note in notes_of(profile, "inputs-ignore-size")]
        assert found == [{"microbatch_size": size} for size in noted]


class Sometimes(nn.Module):
    """Skips its block in one forward of `every`, the last of them."""

    def __init__(self, every):
        super().__init__()
        self.a, self.b, self.c = linear(), linear(), linear()
        self.every, self.forwards = every, 0

    def skips(self):
        self.forwards += 1
        return self.forwards % self.every == 0

    def forward(self, x):
        skips, x = self.skips(), self.a(x)
        return self.c(x if skips else self.b(x))


# within the first forwards, that choose the units, and only later, while steps are timed
@pytest.mark.parametrize("every", [2, 3, 4, 7, 12])
def test_layers_that_are_not_called_every_time_are_refused(every):
    with pytest.raises(PartoptError) as caught:
        structure(Sometimes(every), steps=5)
    assert caught.value.message == (
        "the model calls other layers from one forward to the next: not every forward calls b"
    )
    assert "layer drop" in caught.value.hint
    assert (caught.value.code, caught.value.fields) == ("calls-vary", {"layers": ["b"]})


class Skips(Sometimes):
    """Skips its own operations, in no module."""

    def forward(self, x):
        return x * 2 if self.skips() else x + (x @ self.a.weight).relu()


@pytest.mark.parametrize("inner", [Sometimes(2), Skips(2), Skips(5)])
def test_a_unit_that_varies_inside_is_named(inner):
    model, options = nn.Sequential(linear(), inner, linear()), {"units": ("1",), "steps": 5}
    profile = structure(model, granularity="auto", **options)
    assert len(profile.layers) == 3
    [note] = notes_of(profile, "runs-at-random")
    assert note.fields == {"layers": ["1"]}
    assert note.text.startswith("1: one forward does more than another")


class Depth(nn.Module):
    """Stochastic depth as torchvision and timm have it: a factor, and nothing is skipped."""

    def forward(self, x):
        return x * torch.empty(len(x), 1).bernoulli_(0.5)


@pytest.mark.parametrize("random", [Depth, nn.Dropout])
def test_what_draws_numbers_but_does_the_same_work_is_not_named(random):
    profile = structure(nn.Sequential(linear(), random(), linear()), steps=5)
    assert notes_of(profile, "runs-at-random") == []


@pytest.mark.slow
def test_an_estimate_names_what_varies_inside():
    model = nn.Sequential(linear(), Skips(2), linear())
    made = estimate(model, lambda size: torch.randn(size, 4), "h100", microbatch_sizes=[1, 2])
    assert [note.fields for note in notes_of(made, "runs-at-random")] == [{"layers": ["1"]}]


@pytest.mark.slow
def test_an_optimizer_that_fails_costs_its_own_time_alone():
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True), linear())
    profile = structure(model, lambda size: torch.arange(size), microbatch_sizes=[1, 2])
    assert [each.optimizer_s for each in profile.measurements] == [None, None]
    [note] = notes_of(profile, "optimizer-not-timed")
    assert note.text.startswith(
        "the optimizer step was not timed: AdamW raised RuntimeError: Adam does not support sparse"
    )


class Telling:
    """What nvidia-ml-py is asked: clock rates in MHz, and bits of what lowers them."""

    def __init__(self, *told):
        self.rates, self.reasons = (iter(each) for each in zip(*told, strict=True))

    def nvmlDeviceGetClockInfo(self, handle, kind):
        return next(self.rates)

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle):
        return next(self.reasons)


def test_the_clock_rate_is_the_median_and_every_reason_that_was_seen_remains():
    before = Environment(torch="2", python="3", partopt="0", throttled_by=["power brake"])
    known = replace(before, sm_clock_hz=1e9)
    silent = ClockRate(torch.device("cpu"))
    silent.sample()
    assert silent.describe(known) == known  # of an earlier run that is gone on with
    rate = ClockRate(torch.device("cpu"))
    rate._nvml = Telling((1500, 0x04), (900, 0x01), (1400, 0x20 | 0x04))
    for _ in range(4):  # the last one fails
        rate.sample()
    found = rate.describe(known)
    assert found.sm_clock_hz == 1.4e9
    assert found.throttled_by == ["power brake", "power cap", "thermal slowdown by the driver"]
    [note] = note_throttled(found)
    assert note.text.endswith(
        "(power brake, power cap, thermal slowdown by the driver) to 1400 MHz"
    )
    assert list(note_throttled(replace(before, throttled_by=[]))) == []


@pytest.mark.parametrize(("step_s", "steps"), [(0.9, 10), (1.1, 5)])
def test_long_steps_are_fewer(step_s, steps):
    class Even(FakeClock):
        def intervals_s(self, stamps):
            return [step_s / (len(stamps) - 1)] * (len(stamps) - 1)

    told = []
    structure(linear(), clock=Even(), steps=None, progress=lambda *each: told.append(each))
    assert told[-1] == (1, steps, steps)
