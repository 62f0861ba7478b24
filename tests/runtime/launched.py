"""A launch of processes whose outcome several test processes read."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from tests.forked import run_forked
from tests.helpers import ROOT


def outcome_of(module: str, factory: pytest.TempPathFactory) -> Any:
    """What `python -m MODULE FILE` pickles to FILE, run once for all workers of the test run."""
    folder = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:  # the folder of a worker lies in that of the run
        folder = folder.parent
    path = folder / f"{module}.pickle"
    with FileLock(f"{path}.lock"):
        if not path.exists():
            partial = path.with_suffix(".partial")
            run_forked(module, [str(partial)], ROOT).check_returncode()
            partial.rename(path)
    return pickle.loads(path.read_bytes())


def start_python(*command: object, cwd: Path = ROOT, **variables: str) -> subprocess.Popen[str]:
    """`python COMMAND`, a thread each, with the environment of this process and `variables`."""
    own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{cwd}", **variables}
    return subprocess.Popen(
        [sys.executable, *map(str, command)],
        cwd=cwd,
        env=os.environ | own,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_python(*command: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """The same, at its end."""
    process = start_python(*command, **options)
    try:
        out, err = process.communicate(timeout=300)
    finally:
        process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)
