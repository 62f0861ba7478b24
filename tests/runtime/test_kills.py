"""Fifty random faults in real runs: each names what failed, ends soon, and leaves nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest

from tests.helpers import ROOT

COUNT = 50


@pytest.fixture(scope="module")
def outcomes() -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "benchmarks/kills.py", "--count", str(COUNT), "--json"],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def test_they_are_of_every_kind(outcomes: list[dict[str, Any]]):
    kinds = Counter(each["fault"]["kind"] for each in outcomes)
    assert len(kinds) == 11 and min(kinds.values()) >= COUNT // 11
    assert {(each["fault"]["engine"], each["fault"]["saves"]) for each in outcomes} == {
        (engine, saves) for engine in ("torch", "partopt") for saves in (True, False)
    }
    assert sum(each["steps"] > 0 for each in outcomes) > COUNT // 4  # have a checkpoint to break


def test_what_failed_is_named_and_the_exit_code_is_its(outcomes: list[dict[str, Any]]):
    assert [each for each in outcomes if not each["named"]] == []


def test_nobody_waits_long_and_nothing_is_left(outcomes: list[dict[str, Any]]):
    assert [each for each in outcomes if each["seconds"] > 30 or each["left"]] == []


def test_the_last_checkpoint_is_whole(outcomes: list[dict[str, Any]]):
    assert [each for each in outcomes if each["broken"]] == []
