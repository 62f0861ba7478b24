"""A launch of processes whose outcome several test processes read."""

from __future__ import annotations

import os
import pickle
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
