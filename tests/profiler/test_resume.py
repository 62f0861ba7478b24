"""Going on with a profile: what it holds is kept, and nothing is mixed that does not belong
together.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor, nn

from partopt.documents import Note
from partopt.documents.profile import Measurement, Profile
from partopt.errors import PartoptError
from partopt.profiler import ProfilingStopped, measure
from tests.profiler.helpers import linear


def model(width: int = 4) -> nn.Module:
    return nn.Sequential(linear(4, width), nn.Tanh(), linear(width, 4))


def run(built: nn.Module | None = None, sizes: tuple[int, ...] = (1,), **options: Any) -> Profile:
    given = {"device": "cpu", "steps": 1, "microbatch_sizes": sizes, **options}
    return measure(built or model(), lambda size: torch.ones(size, 4), **given)


def sizes_of(profile: Profile) -> list[int]:
    return [each.microbatch_size for each in profile.measurements]


def test_only_what_is_missing_is_measured() -> None:
    asked: list[int] = []

    def inputs(size: int) -> Tensor:
        asked.append(size)
        return torch.ones(size, 4)

    first = run(sizes=(1, 4))
    profile = measure(
        model(), inputs, microbatch_sizes=[1, 2, 4, 8], device="cpu", steps=1, resume=first
    )
    assert asked == [2, 8]
    assert sizes_of(profile) == [1, 2, 4, 8]
    assert [profile.measurements[0], profile.measurements[2]] == first.measurements
    assert list(profile.faults()) == []


def test_a_profile_that_has_all_sizes_is_returned() -> None:
    first = run(sizes=(1, 2))
    assert run(sizes=(1, 2), resume=first) == first
    assert run(sizes=(2,), resume=first) == first


def test_sizes_beyond_one_that_did_not_fit_are_not_run_and_smaller_ones_are() -> None:
    first = run()
    full = Measurement(microbatch_size=4, out_of_memory=True)
    first = replace(first, measurements=[*first.measurements, full])
    profile = run(sizes=(2, 8), resume=first)
    assert [(each.microbatch_size, each.out_of_memory) for each in profile.measurements] == [
        (1, False),
        (2, False),
        (4, True),
        (8, True),
    ]


def test_notes_are_kept_each_once() -> None:
    note = Note(code="no-backward", text="of old")
    first = replace(run(), notes=[note, note])
    assert [each for each in run(sizes=(2,), resume=first).notes if each == note] == [note]


def test_the_name_is_kept_unless_another_is_given() -> None:
    first = run(name="mine")
    assert run(sizes=(2,), resume=first).model.name == "mine"
    assert run(sizes=(2,), resume=first, name="other").model.name == "other"


OTHERS = {
    "dtype": ({"dtype": "bfloat16"}, {}),
    "autocast": ({"autocast": "bfloat16"}, {}),
    "compiled": ({}, {"compiled": True}),
    "environment.torch": ({}, {"environment": {"torch": "0.1"}}),
    "environment.cuda": ({}, {"environment": {"cuda": "11.0"}}),
    "device.name": ({}, {"device": {"name": "abacus"}}),
    "model.arguments": ({}, {"model": {"arguments": {"layers": 3}}}),
}


@pytest.mark.parametrize("field", OTHERS)
def test_a_profile_of_something_else_is_refused_by_the_field_that_differs(field: str) -> None:
    options, altered = OTHERS[field]
    first = run()
    for name, value in altered.items():
        inner = replace(getattr(first, name), **value) if isinstance(value, dict) else value
        first = replace(first, **{name: inner})
    with pytest.raises(PartoptError) as caught:
        run(sizes=(2,), resume=first, **options)
    assert caught.value.message.startswith(f"`resume`: a profile of something else: {field} is ")
    assert caught.value.fields["mismatched"] == [field]
    assert (caught.value.code, caught.value.exit_code) == ("resume-mismatch", 2)


LAYERS = {
    "layers": ({"units": ["0"]}, nn.Sequential(nn.Sequential(linear(), linear()))),
    "layers[0].parameter_bytes": ({}, model(width=8)),
    "layers[1].type": ({}, nn.Sequential(linear(), nn.ReLU(), linear())),
}


@pytest.mark.parametrize("field", LAYERS)
def test_other_layers_are_refused_by_the_field_that_differs(field: str) -> None:
    options, other = LAYERS[field]
    first = run()
    with pytest.raises(PartoptError) as caught:
        run(other, (2,), resume=first, **options)
    assert caught.value.fields["mismatched"] == [field]


def test_an_interrupt_before_anything_is_added_keeps_nothing() -> None:
    def interrupted(size: int, done: int, steps: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(ProfilingStopped) as caught:
        run(sizes=(2,), resume=run(), progress=interrupted)
    assert caught.value.profile is None


def test_what_is_no_profile_is_refused() -> None:
    with pytest.raises(PartoptError, match=r"`resume=net\.json`: of type str, not a Profile"):
        run(resume="net.json")
