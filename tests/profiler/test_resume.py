"""Going on with a profile: what it holds is kept, and nothing is mixed that does not belong
together.
"""

import pytest
import torch
from msgspec.structs import replace
from torch import nn

from partopt.documents import Note
from partopt.documents.profile import Measurement
from partopt.errors import PartoptError
from partopt.profiler import ProfilingStopped, measure, measure_source
from tests.profiler.helpers import linear


def model(width=4):
    return nn.Sequential(linear(4, width), nn.Tanh(), linear(width, 4))


def run(built=None, sizes=(1,), **options):
    given = {"device": "cpu", "steps": 1, "microbatch_sizes": sizes, **options}
    return measure(built or model(), lambda size: torch.ones(size, 4), **given)


@pytest.mark.slow
def test_only_what_is_missing_is_measured():
    asked = []

    def inputs(size):
        asked.append(size)
        return torch.ones(size, 4)

    first = run(sizes=(1, 4), name="mine")
    options = {"microbatch_sizes": [1, 2, 4, 8], "device": "cpu", "steps": 1}
    profile = measure(model(), inputs, resume=first, **options)
    assert asked == [2, 8]
    assert [each.microbatch_size for each in profile.measurements] == [1, 2, 4, 8]
    assert [profile.measurements[0], profile.measurements[2]] == first.measurements
    assert list(profile.faults()) == []
    assert run(sizes=(1, 4), resume=first) == run(sizes=(4,), resume=first) == first
    assert profile.model.name == "mine"
    assert run(sizes=(2,), resume=first, name="other").model.name == "other"


@pytest.mark.slow
def test_sizes_beyond_one_that_did_not_fit_are_not_run_and_smaller_ones_are():
    first = run()
    full = Measurement(microbatch_size=4, out_of_memory=True)
    first = replace(first, measurements=[*first.measurements, full])
    found = run(sizes=(2, 8), resume=first).measurements
    fits = {each.microbatch_size: not each.out_of_memory for each in found}
    assert fits == {1: True, 2: True, 4: False, 8: False}


@pytest.mark.slow
def test_notes_are_kept_each_once():
    note = Note(code="no-backward", text="of old")
    first = replace(run(), notes=[note, note])
    assert [each for each in run(sizes=(2,), resume=first).notes if each == note] == [note]


OTHERS = {
    "dtype": ({"dtype": "bfloat16"}, {}),
    "autocast": ({"autocast": "bfloat16"}, {}),
    "compiled": ({}, {"compiled": True}),
    "environment.torch": ({}, {"environment": {"torch": "0.1"}}),
    "environment.cuda": ({}, {"environment": {"cuda": "11.0"}}),
    "device.name": ({}, {"device": {"name": "abacus"}}),
    "model.arguments": ({}, {"model": {"arguments": {"layers": 3}}}),
    "layers": ({"built": nn.Sequential(nn.Sequential(linear(), linear())), "units": ["0"]}, {}),
    "layers[0].parameter_bytes": ({"built": model(width=8)}, {}),
    "layers[1].type": ({"built": nn.Sequential(linear(), nn.ReLU(), linear())}, {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("field", OTHERS)
def test_a_profile_of_something_else_is_refused_by_the_field_that_differs(field):
    options, altered = OTHERS[field]
    first = run()
    for name, value in altered.items():
        inner = replace(getattr(first, name), **value) if isinstance(value, dict) else value
        first = replace(first, **{name: inner})
    with pytest.raises(PartoptError) as caught:
        run(sizes=(2,), resume=first, **options)
    assert caught.value.message.startswith("`resume`: a profile of something else: ")
    assert caught.value.fields["mismatched"] == [field]
    assert (caught.value.code, caught.value.exit_code) == ("resume-mismatch", 2)


SOURCE = """
import torch
def build():
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
def example_inputs(size):
    return torch.ones(size, 4)
"""


def test_the_file_of_the_model_may_lie_elsewhere_and_may_not_be_another(tmp_path):
    given = {"device": "cpu", "steps": 1, "name": "net"}
    paths = [tmp_path / name for name in ("net.py", "there/net.py", "other.py")]
    for path in paths:
        path.parent.mkdir(exist_ok=True)
        path.write_text(SOURCE)
    first, moved, other = map(str, paths)
    begun = measure_source(first, microbatch_sizes=[1], **given)
    there = measure_source(moved, microbatch_sizes=[1, 2], resume=begun, **given)
    assert [own.microbatch_size for own in there.measurements] == [1, 2]
    with pytest.raises(PartoptError) as caught:
        measure_source(other, microbatch_sizes=[2], resume=begun, **given)
    assert caught.value.fields["mismatched"] == ["model.entry"]


def test_an_interrupt_before_anything_is_added_keeps_nothing():
    def interrupted(size, done, steps):
        raise KeyboardInterrupt

    with pytest.raises(ProfilingStopped) as caught:
        run(sizes=(2,), resume=run(), progress=interrupted)
    assert caught.value.profile is None


def test_what_is_no_profile_is_refused():
    with pytest.raises(PartoptError, match=r"`resume=net\.json`: of type str, not a Profile"):
        run(resume="net.json")
