"""A run on torch's pipeline runtime that fails says why, and not torch's schedule."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from tests.helpers import ROOT

SHAPE = (
    "rank 0 failed at 0F3: stage 0 made a tensor of [2] torch.float32, its cut has [1] "
    "torch.float32"
)
MESSAGES = {
    "raised": "rank 1 failed at 1F3: ValueError: boom",
    "killed": "rank 1 failed at 1F3: the process was killed by signal 9 (SIGKILL)",
    "another shape": SHAPE,
    "another shape of the own engine": SHAPE,
}


def test_the_rank_that_failed_first_is_named():
    done = subprocess.run(
        [sys.executable, "-m", "tests.runtime.torch_failures"],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert {run["name"]: run["message"].splitlines()[0] for run in found} == MESSAGES
    assert [run["left"] for run in found] == [[0, found[0]["left"][1]], [0, 0], [0, 0], [0, 0]]
    assert "Schedule" not in done.stderr
