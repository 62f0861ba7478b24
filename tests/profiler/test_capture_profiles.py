"""The command that takes the profiles that ship: what it writes, and what it leaves alone."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from benchmarks import capture_profiles, gate
from partopt.documents.profile import Device, Measurement, Profile
from partopt.profiler import measure_source
from tests.helpers import ROOT
from tests.profiler.helpers import linear, needs_transformers, structure


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    bare = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [
        sys.executable,
        str(ROOT / "benchmarks/capture_profiles.py"),
        "--device",
        "cpu",
        *arguments,
    ]
    return subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT.parent, env=bare, check=False
    )


def with_sizes(sizes: list[int]) -> Profile:
    measured = structure(linear())
    measurements = [
        msgspec.structs.replace(measured.measurements[0], microbatch_size=size) for size in sizes
    ]
    return msgspec.structs.replace(measured, measurements=measurements)


def test_an_unknown_name_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    result = run("--only", "gtp", "--output", str(tmp_path))
    assert result.returncode == 2
    assert "--only gtp: not taken on cpu; known: gpt, vgg16" in result.stderr


def test_nothing_taken_is_a_failure(tmp_path: Path) -> None:
    result = run("--only", "gpt", "--budget", "0", "--output", str(tmp_path))
    assert result.returncode == 1
    assert result.stderr.splitlines() == [
        "left out, the budget of 0 s is spent: gpt",
        "nothing was taken",
    ]


@pytest.mark.parametrize(
    ("before", "now", "kept"),
    [([1, 2], [1], [1, 2]), ([1, 2], [2, 4], [2, 4]), ([1], [1, 2], [1, 2])],
)
def test_a_profile_gives_way_only_to_one_with_as_many_sizes(
    tmp_path: Path, before: list[int], now: list[int], kept: list[int]
) -> None:
    path = tmp_path / "gpt.json"
    assert capture_profiles.keep(with_sizes(before), path)
    assert capture_profiles.keep(with_sizes(now), path) == (kept == now)
    assert [each.microbatch_size for each in Profile.load(str(path)).measurements] == kept


def test_what_is_no_profile_gives_way(tmp_path: Path) -> None:
    (tmp_path / "gpt.json").write_text("{}")
    assert capture_profiles.keep(with_sizes([1]), tmp_path / "gpt.json")


def test_a_run_that_finishes_no_size_took_nothing() -> None:
    assert capture_profiles.take(capture_profiles.ON_CPU[0], "cpu", deadline=0.0) is None


def measured(
    size: int, coverage: float = 1.0, overhead: float = 1.0, spread: float = 0.0
) -> Measurement:
    """A long layer with this spread, and one too short to count whose spread is all of it."""
    profile = with_sizes([size])
    one = msgspec.structs.replace(
        profile.measurements[0].layers[0],
        forward_s=3.0,
        backward_s=7.0,
        forward_stdev_s=6 * spread,
        backward_stdev_s=8 * spread,
    )
    short = msgspec.structs.replace(one, forward_s=0.01, backward_s=0.01, forward_stdev_s=0.02)
    return msgspec.structs.replace(
        profile.measurements[0], coverage=coverage, overhead=overhead, layers=[one, short]
    )


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
def test_a_size_ships_only_if_it_was_measured_well(fields: dict[str, float], fault: str) -> None:
    assert ", ".join(gate.faults(measured(4, **fields))) == fault


def in_turn(monkeypatch: pytest.MonkeyPatch, *taken: Profile | None) -> list[str]:
    """Have `take` give these profiles one after the other; the sizes that it was asked for."""
    asked: list[str] = []

    def take(capture: capture_profiles.Capture, device: str, deadline: float) -> Profile | None:
        asked.append(capture.microbatches)
        return taken[len(asked) - 1]

    monkeypatch.setattr(capture_profiles, "take", take)
    return asked


def of(*measurements: Measurement) -> Profile:
    return msgspec.structs.replace(with_sizes([1]), measurements=list(measurements))


def test_what_fails_is_taken_once_more_and_else_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of three sizes 1 is good, 2 the second time, 4 never."""
    first = of(measured(1), measured(2, coverage=0.5), measured(4, overhead=2.0))
    again = of(measured(2, coverage=1.01), measured(4, overhead=1.5))
    asked = in_turn(monkeypatch, first, again)
    capture = capture_profiles.Capture("gpt", "gpt", "1,2,4")
    taken = capture_profiles.take_good(capture, "cpu", time.monotonic() + 1e6)
    assert asked == ["1,2,4", "2,4"]
    assert taken is not None
    assert [(each.microbatch_size, each.coverage) for each in taken.measurements] == [
        (1, 1.0),
        (2, 1.01),
    ]
    assert capsys.readouterr().err.splitlines() == [
        "gpt, microbatch 2: coverage 0.50, not 0.95 to 1.05: taken once more",
        "gpt, microbatch 4: overhead 2.00, over 1.10: taken once more",
        "gpt, microbatch 4: overhead 1.50, over 1.10: left out",
    ]


def test_nothing_good_is_nothing_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    bad = of(measured(1, coverage=0.5), Measurement(microbatch_size=2, out_of_memory=True))
    capture = capture_profiles.Capture("gpt", "gpt", "1,2")
    asked = in_turn(monkeypatch, bad, None)
    assert capture_profiles.take_good(capture, "cpu", time.monotonic() + 1e6) is None
    assert asked == ["1,2", "1"]
    asked = in_turn(monkeypatch, bad)
    assert capture_profiles.take_good(capture, "cpu", time.monotonic()) is None
    assert asked == ["1,2"]


@pytest.mark.parametrize(
    "capture",
    [*capture_profiles.ON_CUDA, *capture_profiles.ON_CPU],
    ids=lambda capture: f"{capture.name}-{capture.dtype}",
)
def test_a_capture_asks_of_an_example_what_it_has(capture: capture_profiles.Capture) -> None:
    path = ROOT / f"examples/{capture.example}.py"
    if not path.exists():
        pytest.skip(f"{path.name} is not among the examples")
    [build] = [
        node
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name == "build"
    ]
    assert capture.settings.keys() <= {argument.arg for argument in build.args.args}


@needs_transformers
# transformers and torchvision warn of their own affairs while they are imported
@pytest.mark.filterwarnings("ignore")
def test_every_block_of_a_t5_decoder_reads_what_the_encoder_made() -> None:
    profile = measure_source(
        ROOT / "examples/t5.py",
        arguments={"layers": 2, "width": 8, "heads": 2, "ffn": 8, "context": 4, "vocabulary": 64},
        microbatch_sizes=[1],
        steps=1,
        device="cpu",
    )
    blocks = [index for index, each in enumerate(profile.layers) if each.type == "T5Block"]
    assert len(blocks) == 4
    encoded = [
        tensor
        for tensor in profile.measurements[0].tensors
        if tensor.producer < blocks[2] and {blocks[2], blocks[3]} <= {*tensor.consumers}
    ]
    assert [tensor.bytes for tensor in encoded if tensor.bytes == 4 * 8 * 4]


def test_files_are_named_after_the_device_that_was_measured() -> None:
    capture = capture_profiles.Capture("mlp", "mlp", "1")
    assert (
        capture_profiles.file_name(capture, Device(name="Some Processor", type="cpu"))
        == "mlp.cpu.float32.json"
    )
    assert (
        capture_profiles.file_name(capture, Device(name="Tesla V100-SXM2-16GB", type="cuda"))
        == "mlp.v100-sxm2-16gb.float32.json"
    )
