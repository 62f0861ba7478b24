"""Running the command line in the test's own process, on files that the test describes."""

from __future__ import annotations

import gc
import io
import json
import os
import re
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import click
import pytest

from partopt import cli, documents
from partopt.documents.plan import Plan
from partopt.documents.profile import Profile
from partopt.documents.topology import Topology
from partopt.job import Job
from partopt.search import effort, judging, levers, solve
from partopt.search.effort import SearchParams
from partopt.transformer.layouts import Found
from tests.examples import load_profile
from tests.helpers import flat, uniform_profile

pytest.register_assert_rewrite("tests.golden.records")
BY_EFFORT = effort.BY_EFFORT
TESTS = Path(__file__).parent
# of 10 s and more, for most of which their processes wait; the longest first
LONGEST = (
    *("gpu/test_first_minutes.py", "docs/test_readme.py", "cli/test_doctor.py"),
    *("runtime/test_engines.py", "runtime/test_kills.py", "gpu/test_processes.py"),
    *("gpu/test_profile.py", "gpu/test_run.py", "runtime/test_launcher.py"),
    *("runtime/test_check.py", "runtime/test_links.py", "docs/test_site.py"),
    *("runtime/test_run.py", "runtime/test_shares.py", "runtime/test_checkpoint.py"),
)

load_profile()
# every worker would have as many threads as there are cores, and they would wait for each other
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update", action="store_true", help="write tests/golden anew")


def pytest_configure() -> None:
    """Let runs fork their ranks, as they do in a program of one thread.

    A worker of pytest-xdist has a second one, which only reads what to test next; a rank that is
    spawned imports torch for seconds. Python warns of such forks from 3.12 on.
    """
    if "PYTEST_XDIST_WORKER" in os.environ and sys.version_info < (3, 12):
        threading.active_count = lambda: 1 if _forks_train() else 2


def _forks_train() -> bool:
    """Whether a fork of this process can go backward: torch refuses it where its engine's threads
    of devices ran before.
    """
    import torch

    child = os.fork()
    if child == 0:
        try:
            torch.ones(1, requires_grad=True).sum().backward()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0


def pytest_collection() -> None:
    """Nothing that is collected is garbage: to look for some takes a tenth of the time."""
    gc.disable()


def pytest_collection_finish() -> None:
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files are dealt out, and come first: no worker begins one when all else is done.

    `--dist worksteal` gives each worker as many items in a row, and takes from the ends of rows.
    """
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    files: dict[str, list[pytest.Item]] = {name: [] for name in LONGEST}
    others: list[pytest.Item] = []
    for item in items:
        files.get(item.path.relative_to(TESTS).as_posix(), others).append(item)
    remaining, size = iter(others), len(items) // workers
    items[:] = []
    for worker in range(workers):
        dealt = [*chain(*list(files.values())[worker::workers])]
        items += [*dealt, *islice(remaining, max(0, size - len(dealt)))]
    items += remaining


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Search no longer than `--effort quick`, but where what is found by default is recorded, and
    look for switches that help a transformer where they are tested: it takes most of a plan's time.

    Where any effort will do it is a tenth of that.
    """
    recorded = item.path.parent.name in ("docs", "golden")
    helps = recorded or item.get_closest_marker("levers") is not None
    solve.with_levers = judging.with_levers = levers.with_levers if helps else plan_alone
    full = recorded or item.get_closest_marker("full_effort") is not None
    part = 0.1 if item.get_closest_marker("any_effort") is not None else 1.0
    quick = spending(BY_EFFORT["quick"], None, BY_EFFORT["quick"], part)
    normal = spending(BY_EFFORT["normal"], quick, BY_EFFORT["normal"] if full else quick)
    thorough = replace(BY_EFFORT["thorough"], before=normal)
    effort.BY_EFFORT = {"quick": quick, "normal": normal, "thorough": thorough}


def plan_alone(
    job: Job, plan: Plan, found: Found, progress: object = None, before: Job | None = None
) -> Plan:
    """The plan without what else would be faster."""
    return plan


def spending(
    params: SearchParams, before: SearchParams | None, other: SearchParams, part: float = 1.0
) -> SearchParams:
    """The effort with the budgets of another one, or a part of them."""
    plans, grids = (
        replace(own, budget=like.budget * part)
        for own, like in ((params.plans, other.plans), (params.grids, other.grids))
    )
    return replace(params, before=before, plans=plans, grids=grids)


class Outcome(NamedTuple):
    """What a run of the command line left behind."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """Standard output, which must be one JSON document and nothing else."""
        return json.loads(self.out)

    @property
    def errors(self) -> list[str]:
        return [
            line.removeprefix("error: ")
            for line in self.err.splitlines()
            if line.startswith("error: ")
        ]

    @property
    def hints(self) -> list[str]:
        return [
            line.removeprefix("hint:  ")
            for line in self.err.splitlines()
            if line.startswith("hint:  ")
        ]


@pytest.fixture(scope="module", autouse=True)
def _old_objects_are_not_searched_for_garbage() -> None:
    """What is there before a module's tests is left out of `gc.collect`, which the profiler calls
    often: with all tests and torch in one process it would take most of its tests' time.
    """
    gc.collect()
    gc.freeze()
    gc.get_freeze_count = lambda: 1  # of Python it walks all of that, and every profile asks


@pytest.fixture
def heeded_signals() -> Iterator[None]:
    """The test and what it starts heed signals, which a background job or `nohup` ignores."""
    handlers = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGTERM: signal.SIG_DFL,
        signal.SIGHUP: signal.SIG_DFL,
    }
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def partopt(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Outcome]:
    """`partopt("plan", ...)` runs the command line; `stdin=` is what it reads there."""

    for name in ("COLUMNS", "LANG", "LC_ALL", "TERM"):
        monkeypatch.delenv(name, raising=False)

    def run(*arguments: object, stdin: bytes = b"") -> Outcome:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        with pytest.raises(SystemExit) as left:
            cli.main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        for command in commands_in(captured.err):
            check_command(command)
        return Outcome(left.value.code, captured.out, captured.err)

    return run


def commands_in(err: str) -> list[str]:
    """The commands that hints and next steps give, but for the word `partopt`."""
    lines = [line[7:] for line in err.splitlines() if line.startswith(("hint:  ", "next:   "))]
    found = [re.findall(r"(?:^|: |; )\s*partopt ([a-z]+ [^;]+)", line) for line in lines]
    return [command for each in found for command in each]


def check_command(text: str) -> None:
    """That the command line takes a command as it was said; words in capitals stand for others.

    Names of control characters are said as escapes, and such commands are for reading.
    """
    try:
        words = shlex.split(text)
    except ValueError:
        assert "\\" in text, text
        return
    command: click.Command = cli.partopt
    context = click.Context(command, info_name="partopt")
    while isinstance(command, click.Group):
        name, found, words = command.resolve_command(context, words)
        assert found is not None, text
        command, context = found, click.Context(found, parent=context, info_name=name)
    words = ["1" if word in ("N", "G") else word for word in words]
    try:
        command.make_context(context.info_name, words, parent=context.parent)
    except click.ClickException as error:
        raise AssertionError(f"`partopt {text}`: {error.format_message()}") from None


@pytest.fixture
def profile_file(tmp_path: Path) -> Callable[..., str]:
    """Writes a profile, by default six equal layers, and gives its path."""

    def write(content: Profile | None = None, name: str = "p.json") -> str:
        (content or uniform_profile(6)).save(str(tmp_path / name), force=True)
        return str(tmp_path / name)

    return write


@pytest.fixture
def topology_file(tmp_path: Path) -> Callable[..., str]:
    """Writes a topology, by default four devices of 16 GB on 10 GB/s, and gives its path."""

    def write(content: Topology | None = None, name: str = "c.yaml") -> str:
        text = (content or flat(4, 10e9, memory_bytes=16 * 10**9)).dump()
        documents.write_bytes(str(tmp_path / name), text.encode(), force=True)
        return str(tmp_path / name)

    return write
