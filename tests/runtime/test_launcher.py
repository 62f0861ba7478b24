"""A run whose rank fails or dies ends soon, says which, and leaves nothing; a slow one lives."""

from __future__ import annotations

from typing import Any

import pytest

from tests.runtime.failures import SLOW_S
from tests.runtime.launched import outcome_of


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    found = outcome_of("tests.runtime.failures", tmp_path_factory)
    return {run["name"]: run for run in found}


@pytest.mark.parametrize(
    ("name", "first_line"),
    [
        ("raised", "rank 1 failed at 1F3: ValueError: boom"),
        ("killed", "rank 1 failed at 1F3: the process was killed by signal 9 (SIGKILL)"),
        ("left", "rank 1 failed at 1F3: the process ended with exit code 3"),
        ("memory", "rank 1 failed at 1F3: MemoryError:"),
        ("outside", "rank 0 failed: no such model"),
        ("spawned", "rank 1 failed at 1F3: ValueError: boom"),
    ],
)
def test_the_rank_that_failed_first_is_named(
    name: str, first_line: str, runs: dict[str, dict[str, Any]]
):
    assert runs[name]["message"].splitlines()[0] == first_line
    assert runs[name]["code"] == "run-failed"


@pytest.mark.parametrize(("name", "rank"), [("stopped", 2), ("hung", 0), ("hung later", 1)])
def test_a_rank_that_others_waited_for_is_named(
    name: str, rank: int, runs: dict[str, dict[str, Any]]
):
    reason = "it is alive, but others waited for it in vain"
    assert runs[name]["message"].splitlines()[0] == f"rank {rank} failed at {rank}F3: {reason}"


def test_a_slow_rank_is_waited_for(runs: dict[str, dict[str, Any]]):
    assert runs["slow"]["results"] == ["done"] * 3
    assert runs["slow"]["seconds"] > SLOW_S > 10


def test_the_last_action_of_every_rank_is_named(runs: dict[str, dict[str, Any]]):
    lines = runs["hung"]["message"].splitlines()
    assert lines[1:] == [
        "  rank 0: 0F3 of step 0, computing",
        "  rank 1: 1F3 of step 0, waiting to receive",
        "  rank 2: 2F3 of step 0, waiting to receive",
    ]
    assert runs["raised"]["fields"]["last_actions"][1] == "1F3"


def test_hints_say_what_may_help(runs: dict[str, dict[str, Any]]):
    assert "memory" in runs["killed"]["hint"]
    assert "memory" in runs["memory"]["hint"]
    assert runs["outside"]["hint"] == "name another"
    assert runs["raised"]["hint"] == ""


def test_a_run_that_goes_well_gives_its_results(runs: dict[str, dict[str, Any]]):
    assert runs["well"]["results"] == ["done"] * 3


@pytest.mark.parametrize("name", ["raised", "killed", "left", "memory", "outside"])
def test_a_rank_that_fails_or_dies_ends_the_run_at_once(name: str, runs: dict[str, dict[str, Any]]):
    assert runs[name]["seconds"] < 10


def test_nothing_is_left_and_nobody_waits_long(runs: dict[str, dict[str, Any]]):
    for run in runs.values():
        tracker = 1 if run["name"] == "spawned" else 0  # a pipe to multiprocessing's own process
        assert run["left"] in ([0, 0], [0, tracker]), run["name"]
        assert run["seconds"] < 30, run["name"]
