"""The command that takes the profiles that ship: what it writes, and what it leaves alone."""

import ast
import os
import subprocess
import sys
import time

import pytest
from msgspec.structs import replace

from benchmarks import capture_profiles, gate
from partopt.documents.profile import Device, Measurement, Profile
from tests.helpers import ROOT
from tests.profiler.helpers import linear, structure


def run(*arguments):
    bare = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, str(ROOT / "benchmarks/capture_profiles.py"), "--device", "cpu"]
    options = {"capture_output": True, "text": True, "check": False}
    return subprocess.run([*command, *arguments], cwd=ROOT.parent, env=bare, **options)


def of(*measurements):
    return replace(structure(linear()), measurements=list(measurements))


@pytest.mark.slow
def test_an_unknown_name_is_refused_and_nothing_taken_is_a_failure(tmp_path):
    result = run("--only", "gtp", "--output", str(tmp_path))
    assert result.returncode == 2
    assert "--only gtp: not taken on cpu; known: gpt, vgg16" in result.stderr
    result = run("--only", "gpt", "--budget", "0", "--output", str(tmp_path))
    assert result.returncode == 1
    assert result.stderr == "left out, the budget of 0 s is spent: gpt\nnothing was taken\n"
    # nor is a run that finishes no size
    assert capture_profiles.take(capture_profiles.ON_CPU[0], "cpu", deadline=0.0) is None


@pytest.mark.slow
def test_a_profile_gives_way_only_to_one_with_as_many_sizes(tmp_path):
    path = tmp_path / "gpt.json"
    [plain] = structure(linear()).measurements
    path.write_text("{}")  # what is no profile gives way
    for sizes, kept in (([1, 2], [1, 2]), ([1], [1, 2]), ([2, 4], [2, 4]), ([1, 2, 4], [1, 2, 4])):
        assert capture_profiles.keep(
            of(*(replace(plain, microbatch_size=n) for n in sizes)), path
        ) == (kept == sizes)
        assert [each.microbatch_size for each in Profile.load(str(path)).measurements] == kept


def measured(size, coverage=1.0, overhead=1.0, spread=0.0):
    """A long layer with this spread, and one too short to count whose spread is all of it."""
    [plain] = structure(linear()).measurements
    stdev = {"forward_stdev_s": 6 * spread, "backward_stdev_s": 8 * spread}
    one = replace(plain.layers[0], forward_s=3.0, backward_s=7.0, **stdev)
    short = replace(one, forward_s=0.01, backward_s=0.01, forward_stdev_s=0.02)
    fields = {"microbatch_size": size, "coverage": coverage, "overhead": overhead}
    return replace(plain, layers=[one, short], **fields)


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({}, ""),
        ({"coverage": 0.95, "overhead": 1.1, "spread": 0.05}, ""),
        ({"coverage": 0.949}, "coverage 0.95, not 0.95 to 1.05"),
        ({"coverage": 1.06}, "coverage 1.06, not 0.95 to 1.05"),
        ({"overhead": 1.11}, "overhead 1.11, over 1.10"),
        ({"spread": 0.06}, "spread 6.0%, over 5%"),
    ],
)
def test_a_size_ships_only_if_it_was_measured_well(fields, fault):
    assert ", ".join(gate.faults(measured(4, **fields))) == fault


def in_turn(monkeypatch, *taken):
    """Have `take` give these profiles one after the other; the sizes that it was asked for."""
    asked = []

    def take(capture, device, deadline):
        asked.append(capture.microbatches)
        return taken[len(asked) - 1]

    monkeypatch.setattr(capture_profiles, "take", take)
    return asked


@pytest.mark.slow
def test_what_fails_is_taken_once_more_and_else_left_out(monkeypatch, capsys):
    """Of three sizes 1 is good, 2 the second time, 4 never."""
    first = of(measured(1), measured(2, coverage=0.5), measured(4, overhead=2.0))
    again = of(measured(2, coverage=1.01), measured(4, overhead=1.5))
    asked = in_turn(monkeypatch, first, again)
    capture = capture_profiles.Capture("gpt", "gpt", "1,2,4")
    taken = capture_profiles.take_good(capture, "cpu", time.monotonic() + 1e6)
    assert asked == ["1,2,4", "2,4"]
    found = {each.microbatch_size: each.coverage for each in taken.measurements}
    assert found == {1: 1.0, 2: 1.01}
    assert capsys.readouterr().err.splitlines() == [
        "gpt, microbatch 2: coverage 0.50, not 0.95 to 1.05: taken once more",
        "gpt, microbatch 4: overhead 2.00, over 1.10: taken once more",
        "gpt, microbatch 4: overhead 1.50, over 1.10: left out",
    ]


def test_nothing_good_is_nothing_taken(monkeypatch):
    bad = of(measured(1, coverage=0.5), Measurement(microbatch_size=2, out_of_memory=True))
    capture = capture_profiles.Capture("gpt", "gpt", "1,2")
    asked = in_turn(monkeypatch, bad, None)
    assert capture_profiles.take_good(capture, "cpu", time.monotonic() + 1e6) is None
    assert asked == ["1,2", "1"]
    asked = in_turn(monkeypatch, bad)
    assert capture_profiles.take_good(capture, "cpu", time.monotonic()) is None
    assert asked == ["1,2"]


@pytest.mark.parametrize(
    "capture", [*capture_profiles.ON_CUDA, *capture_profiles.ON_CPU], ids=lambda each: each.name
)
def test_a_capture_asks_of_an_example_what_it_has(capture):
    path = ROOT / f"examples/{capture.example}.py"
    if not path.exists():
        pytest.skip(f"{path.name} is not among the examples")
    functions = [each for each in ast.parse(path.read_text()).body if hasattr(each, "args")]
    [build] = [each for each in functions if each.name == "build"]
    assert capture.settings.keys() <= {argument.arg for argument in build.args.args}


def test_files_are_named_after_the_device_that_was_measured():
    capture = capture_profiles.Capture("mlp", "mlp", "1")
    cpu, cuda = Device(name="Some", type="cpu"), Device(name="Tesla V100-SXM2-16GB", type="cuda")
    assert capture_profiles.file_name(capture, cpu) == "mlp.cpu.float32.json"
    assert capture_profiles.file_name(capture, cuda) == "mlp.v100-sxm2-16gb.float32.json"
