"""The command that takes the profiles that ship: what it writes, and what it leaves alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from benchmarks import capture_profiles
from partopt.documents.profile import Device, Profile
from tests.helpers import ROOT
from tests.profiler.helpers import linear, structure


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
