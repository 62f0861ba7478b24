"""Tests in forks of processes that have imported what takes seconds.

Each worker has a copy of the checkout, in which it forks to run pytest. It imports torch, numba and
pytest, but never partopt: a fork sees the sources as they stand when it begins.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import shutil
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

PRELOADED = [
    "hypothesis.extra.numpy",
    "matplotlib.pyplot",
    "numba",
    "pytest",
    "torch._dynamo",
    "torch.distributed.pipelining",
    "yaml",
]
GRACE_S = 60  # for imports and compilation, beside three times what tests take
RECORDING_S = 900  # for a test of which it is not known how long it takes
ENVIRONMENT = {
    "COLUMNS": "400",
    "HYPOTHESIS_PROFILE": "faults",
    "OMP_NUM_THREADS": "1",
}
FIRST = 50  # tests that run before the files of others are imported
KERNELS = ".kernels"  # of numba, in the copy
TESTS_FAILED, NOTHING_TO_RUN = 1, 5  # exit codes of pytest
FAILED, NO_END = "failed", "no end"  # errors
_REPORT = ".report"
_OPTIONS = [
    *("-p", "no:cacheprovider", "--tb=no"),
    *("-W", "ignore::pytest.PytestAssertRewriteWarning"),  # of what is imported before
]


class Outcome(NamedTuple):
    """How a test went, or the collection of a file. `error` is empty where it passed."""

    name: str
    seconds: float
    error: str

    @property
    def text(self) -> str:
        """Which one, and how it went wrong, unless it failed as tests do."""
        return self.name if self.error == FAILED else f"{self.name}: {self.error}"


def workers(checkout: Path, count: int) -> ProcessPoolExecutor:
    """A pool of so many workers. Their copies lie beside the checkout.

    They are spawned: a fork of this process would share what it has imported of partopt.
    """
    spawning = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(count, spawning, _prepare, (checkout, PRELOADED))


def _prepare(checkout: Path, preloaded: Sequence[str]) -> None:
    """Make this process a worker, whose current folder is its copy."""
    root = checkout.with_name(f"worker-{os.getpid()}")
    shutil.copytree(checkout, root)
    os.chdir(root)
    own = {"NUMBA_CACHE_DIR": str(root / KERNELS), "PYTHONPATH": str(root)}
    own["PYTHONDONTWRITEBYTECODE"] = ""  # that of tests saves seconds; the package's is checked
    os.environ.update(ENVIRONMENT | own)
    sys.dont_write_bytecode = False
    sys.path.insert(0, str(root))
    for name in preloaded:
        importlib.import_module(name)


def run_tests(
    files: Sequence[str],
    chosen: Mapping[str, float] | None = None,
    plugins: Sequence[object] = (),
) -> list[Outcome]:
    """Run files of tests in a fork of this worker, until one does not end.

    `chosen` are the only tests to run, in their order, until one fails. Each has so many seconds,
    and what those before it leave.
    """
    report = Path(_REPORT).absolute()
    report.write_text("")
    options = _OPTIONS if chosen is None else ["-x", *_OPTIONS]
    child = os.fork()
    if child == 0:
        _run_pytest([*options, *files], [_Watch(report, chosen), *plugins])
    try:
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
    return _outcomes(report.read_text(), code, ", ".join(files))


def first_error(usual_s: Mapping[str, float]) -> str | None:
    """The first of these tests that fails, None where all pass.

    Most faults fail one of the first few, so that the files of the others need not be imported. A
    test without an end may have waited for kernels to be compiled: it has a second try.
    """
    names = list(usual_s)
    for batch in filter(None, (names[:FIRST], names[FIRST:])):
        limits = _limits(batch, usual_s)
        wrong = _error_in(limits)
        if wrong is not None and wrong.error == NO_END:
            wrong = _error_in(limits)
        if wrong is not None:
            return wrong.text
    return None


def _error_in(chosen: Mapping[str, float]) -> Outcome | None:
    outcomes = run_tests(sorted(set(map(_file_of, chosen))), chosen)
    return next((outcome for outcome in outcomes if outcome.error), None)


def _limits(names: Sequence[str], usual_s: Mapping[str, float]) -> dict[str, float]:
    """Seconds that tests may take: three times the usual.

    The first of a file may compute what was computed in another then: it has the time of both.
    """
    longest_s: dict[str, float] = {}
    for name, seconds in usual_s.items():
        longest_s[_file_of(name)] = max(seconds, longest_s.get(_file_of(name), 0.0))
    return {name: 3 * (usual_s[name] + longest_s.pop(_file_of(name), 0.0)) for name in names}


def _file_of(test: str) -> str:
    return test.partition("::")[0]


def _run_pytest(arguments: list[str], plugins: list[object]) -> NoReturn:
    """Run pytest in this process, which leads a group of its own and says nothing, and end it."""
    code = 70
    try:
        os.setsid()
        for stream in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        code = int(importlib.import_module("pytest").main(arguments, plugins))
    finally:
        os._exit(code)


def _outcomes(report: str, code: int, files: str) -> list[Outcome]:
    """What was reported, and of a process that ended early the test that it was in."""
    begun, found = files, []
    for name, *ended in map(json.loads, report.splitlines()):
        begun = files if ended else name
        if ended:
            found.append(Outcome(name, *ended))
    if code not in (0, TESTS_FAILED, NOTHING_TO_RUN):
        error = NO_END if code == -signal.SIGALRM else f"exit code {code}"
        found.append(Outcome(begun, 0.0, error))
    return found


class _Watch:
    """A plugin that chooses tests, reports how they go, and has the process killed at its limit."""

    def __init__(self, report: Path, chosen: Mapping[str, float] | None) -> None:
        self.report, self.chosen = report, chosen
        self.deadline = time.monotonic()
        self.seconds, self.error = 0.0, ""

    def pytest_sessionstart(self) -> None:
        self._allow(GRACE_S)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self._say(report.nodeid, 0.0, "cannot be collected")

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        if self.chosen is not None:
            places = {name: place for place, name in enumerate(self.chosen)}
            items[:] = [item for item in items if item.nodeid in places]
            items.sort(key=lambda item: places[item.nodeid])

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._allow(RECORDING_S if self.chosen is None else self.chosen[nodeid])
        self.seconds, self.error = 0.0, ""
        self._say(nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.seconds += report.duration
        self.error = FAILED if report.failed else self.error

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._say(nodeid, self.seconds, self.error)

    def _allow(self, seconds: float) -> None:
        """Let the process live so much longer. SIGALRM ends what Python cannot interrupt, too."""
        self.deadline += seconds
        signal.alarm(max(1, ceil(self.deadline - time.monotonic())))

    def _say(self, *event: object) -> None:
        with self.report.open("a") as file:
            print(json.dumps(event), file=file)
