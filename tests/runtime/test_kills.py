"""Random faults in real runs, two of each kind: each is named, ends soon, and leaves nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest

from tests.helpers import ROOT

COUNT = 24


@pytest.mark.usefixtures("heeded_signals")
def test_random_faults():
    done = subprocess.run(
        [sys.executable, "benchmarks/kills.py", "--count", str(COUNT), "--seed", "2", "--json"],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    outcomes: list[dict[str, Any]] = json.loads(done.stdout)
    assert [each for each in outcomes if not each["named"]] == []  # and the exit code is its
    assert [each for each in outcomes if each["seconds"] > 30] == []
    assert [each for each in outcomes if each["left"]] == []
    assert [each for each in outcomes if each["broken"]] == []  # the last checkpoint
    kinds = Counter(each["fault"]["kind"] for each in outcomes)
    assert len(kinds) == 12 and set(kinds.values()) == {COUNT // 12}
    assert {(each["fault"]["engine"], each["fault"]["saves"]) for each in outcomes} == {
        (engine, saves) for engine in ("torch", "partopt") for saves in (True, False)
    }
    assert sum(each["steps"] > 0 for each in outcomes) > COUNT // 4  # had a checkpoint to break
