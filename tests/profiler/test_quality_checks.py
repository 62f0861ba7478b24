"""What is said of measurements that cannot be trusted."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from partopt.documents import Note
from partopt.documents.profile import Profile
from partopt.profiler.quality_checks import note_overhead
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


def test_each_size_at_which_the_hooks_cost_much_is_noted() -> None:
    sizes = [
        measurement([1.0], microbatch_size=size, overhead=overhead, overhead_bound=bound)
        for size, overhead, bound in [(1, 1.5, True), (2, 1.25, True), (4, 1.1, False)]
    ]
    notes = list(note_overhead([*sizes, out_of_memory(8)]))
    assert [note.fields for note in notes] == [
        {"microbatch_size": 1, "overhead": 1.5},
        {"microbatch_size": 2, "overhead": 1.25},
    ]
    assert {note.code for note in notes} == {"hook-overhead"}
    assert notes[0].text.startswith(
        "microbatch 1: the hooks cost 50 % of the step: the layers' shares are in doubt;"
    )
