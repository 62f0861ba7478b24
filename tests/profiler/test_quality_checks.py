"""What is said of measurements that cannot be trusted."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from partopt.documents import Note
from partopt.documents.profile import Profile
from partopt.errors import PartoptError
from partopt.profiler import estimate
from partopt.profiler.notes import note_overhead
from tests.helpers import measurement, out_of_memory
from tests.profiler.helpers import FakeClock, Parts, linear, structure


def notes_of(profile: Profile, code: str) -> list[Note]:
    return [note for note in profile.notes if note.code == code]


def checkpointed(reentrant: bool) -> nn.Module:
    """Two layers, each in a checkpoint of its own, between plain ones."""

    def forward(self: Parts, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in (self.a, self.b):
            x = checkpoint(block, x, use_reentrant=reentrant)
        return self.last(x)

    return Parts(forward, first=linear(), a=linear(), b=linear(), last=linear())


# torch's, while the units are chosen
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
def test_layers_in_reentrant_checkpoints_are_named() -> None:
    profile = structure(checkpointed(reentrant=True), microbatch_sizes=[1, 2])
    [note] = notes_of(profile, "no-backward")
    assert note.fields == {"layers": ["a", "b"]}
    assert note.text.startswith(
        "a, b: no backward of its own is seen, its time is charged to its neighbours;"
    )
    assert "use_reentrant=False" in note.text
    assert "`units`" in note.text


def test_other_checkpoints_are_measured_without_a_note() -> None:
    assert notes_of(structure(checkpointed(reentrant=False)), "no-backward") == []


# torch's, while the units are chosen
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
def test_a_unit_that_holds_its_checkpoint_is_measured_without_a_note() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = linear()

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, x, use_reentrant=True)

    profile = structure(nn.Sequential(linear(), Block(), Block()), granularity="block")
    assert notes_of(profile, "no-backward") == []


def test_a_layer_that_the_loss_does_not_need_has_no_backward_and_no_note() -> None:
    def forward(self: Parts, x: Tensor) -> Tensor:
        made = self.a(x)
        self.unused(made)
        with torch.no_grad():
            self.frozen(made)
        return self.b(made)

    parts = {name: linear() for name in ("a", "unused", "frozen", "b")}
    assert notes_of(structure(Parts(forward, **parts)), "no-backward") == []


def test_a_busy_machine_is_noted() -> None:
    class Busy(FakeClock):
        def idle_share(self) -> float:
            return 0.4

    [note] = notes_of(structure(linear(), clock=Busy()), "busy-machine")
    assert note.text == (
        "the model had the processor for 60% of the time: the times are processor time, by wall "
        "time a step took 1.7 times as long; something else was running, or the model waits"
    )
    assert note.fields == {"idle_share": 0.4}


def test_each_size_at_which_steps_with_hooks_differ_from_bare_ones_is_noted() -> None:
    sizes = [
        measurement([1.0], microbatch_size=size, overhead=overhead, overhead_bound=overhead > 1.2)
        for size, overhead in enumerate([1.5, 1.25, 1.1, 1.05, 1.0, 0.95, 0.9], start=1)
    ]
    notes = list(note_overhead([*sizes, out_of_memory(8)]))
    assert [(note.code, note.fields) for note in notes] == [
        ("hook-overhead", {"microbatch_size": 1, "overhead": 1.5}),
        ("hook-overhead", {"microbatch_size": 2, "overhead": 1.25}),
        ("hook-overhead", {"microbatch_size": 3, "overhead": 1.1}),
        ("uneven-steps", {"microbatch_size": 7, "overhead": 0.9}),
    ]
    assert [note.text.partition(";")[0] for note in notes] == [
        "microbatch 1: the hooks cost 50 % of the step: the layers' shares are in doubt",
        "microbatch 2: the hooks cost 25 % of the step: the layers' shares are in doubt",
        "microbatch 3: the hooks cost 10 % of the step: the layers' times are scaled to the bare "
        "step",
        "microbatch 7: steps with hooks took 10 % less time than bare ones: the device's speed "
        "changed meanwhile",
    ]


def sized(inputs: object, *sizes: int) -> list[dict[str, object]]:
    profile = structure(linear(), inputs, microbatch_sizes=list(sizes))  # type: ignore[arg-type]
    return [note.fields for note in notes_of(profile, "inputs-ignore-size")]


def test_inputs_that_do_not_grow_with_the_microbatch_are_noted_once() -> None:
    assert sized(lambda size: torch.randn(8, 4), 1, 2, 4) == [{"microbatch_size": 2}]
    assert sized(lambda size: torch.randn(7, 4), 8) == [{"microbatch_size": 8}]


def test_inputs_that_grow_are_not() -> None:
    assert sized(lambda size: torch.randn(size, 4), 1, 2, 4) == []
    assert sized(lambda size: torch.randn(size * 3, 4), 8) == []
    assert sized(lambda size: torch.randn(7, 4), 1) == []


class Sometimes(nn.Module):
    """Skips its block in one forward of `every`, the last of them."""

    def __init__(self, every: int) -> None:
        super().__init__()
        self.a, self.b, self.c = linear(), linear(), linear()
        self.every, self.forwards = every, 0

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        x = self.a(x)
        return self.c(x if self.forwards % self.every == 0 else self.b(x))


# within the first forwards, that choose the units, and only later, while steps are timed
@pytest.mark.parametrize("every", [2, 3, 4, 7, 12])
def test_layers_that_are_not_called_every_time_are_refused(every: int) -> None:
    with pytest.raises(PartoptError) as caught:
        structure(Sometimes(every), steps=5)
    assert caught.value.message == (
        "the model calls other layers from one forward to the next: not every forward calls b"
    )
    assert "layer drop" in caught.value.hint
    assert (caught.value.code, caught.value.fields) == ("calls-vary", {"layers": ["b"]})


class Skips(nn.Module):
    """Skips its own operations, in no module, in one forward of `every`."""

    def __init__(self, every: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4))
        self.every, self.forwards = every, 0

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        return x * 2 if self.forwards % self.every == 0 else x + (x @ self.weight).relu()


@pytest.mark.parametrize("inner", [Sometimes(2), Skips(2), Skips(5)])
def test_a_unit_that_varies_inside_is_named(inner: nn.Module) -> None:
    profile = structure(
        nn.Sequential(linear(), inner, linear()), units=("1",), granularity="auto", steps=5
    )
    assert len(profile.layers) == 3
    [note] = notes_of(profile, "runs-at-random")
    assert note.fields == {"layers": ["1"]}
    assert note.text.startswith("1: one forward does more than another")


class Depth(nn.Module):
    """Stochastic depth as torchvision and timm have it: a factor, and nothing is skipped."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.empty(len(x), 1).bernoulli_(0.5)


@pytest.mark.parametrize("random", [Depth, nn.Dropout])
def test_what_draws_numbers_but_does_the_same_work_is_not_named(random: type[nn.Module]) -> None:
    profile = structure(nn.Sequential(linear(), random(), linear()), steps=5)
    assert notes_of(profile, "runs-at-random") == []


def test_an_estimate_names_what_varies_inside() -> None:
    model = nn.Sequential(linear(), Skips(2), linear())
    made = estimate(model, lambda size: torch.randn(size, 4), "h100", microbatch_sizes=[1, 2])
    assert [note.fields for note in notes_of(made, "runs-at-random")] == [{"layers": ["1"]}]


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(10, 4, sparse=True), linear()

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.table(ids))


def test_an_optimizer_that_fails_costs_its_own_time_alone() -> None:
    profile = structure(Sparse(), lambda size: torch.arange(size), microbatch_sizes=[1, 2])
    assert [each.optimizer_s for each in profile.measurements] == [None, None]
    [note] = notes_of(profile, "optimizer-not-timed")
    assert note.text.startswith(
        "the optimizer step was not timed: AdamW raised RuntimeError: Adam does not support sparse"
    )


# torch's, while the units are chosen
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
@pytest.mark.parametrize("reentrant", [True, False])
def test_layers_that_compute_activations_again_are_named(reentrant: bool) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(linear(), nn.GELU())

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, x, use_reentrant=reentrant)

    model = nn.Sequential(linear(), Block(), nn.Sequential(linear()), Block())
    profile = structure(model, units=("?",), granularity="auto", microbatch_sizes=[1, 2])
    [note] = notes_of(profile, "recomputes-itself")
    assert note.fields == {"layers": ["1", "3"]}
    assert notes_of(structure(nn.Sequential(linear(), linear())), "recomputes-itself") == []
