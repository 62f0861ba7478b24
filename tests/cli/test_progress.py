"""What is said of how far measuring is, on a clock that only the test moves."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import subprocess
import sys

import pytest

from partopt.cli import terminal
from partopt.cli.profile import SizeWatch
from tests.helpers import ROOT


class Told:
    """A watch over sizes 1, 2 and 4 that is told of steps as `measure` tells of them."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.watch = SizeWatch([4, 1, 2, 1, "x"], lambda: self.now_s)

    def after(self, seconds: float, size: int, done: int, steps: int) -> str:
        self.now_s += seconds
        return self.watch.describe(size, done, steps)


def test_it_says_where_it_is_and_what_is_left() -> None:
    told = Told()
    assert told.after(0, 1, 0, 0) == "microbatch 1 (1 of 3), preparing"
    assert told.after(10, 1, 0, 5) == "microbatch 1 (1 of 3), step 1 of 5"
    # 2 s a step: 8 s of this size, and 20 s a sample of 6 samples more
    assert told.after(2, 1, 1, 5) == "microbatch 1 (1 of 3), step 2 of 5, about 2 min left"
    assert told.after(8, 1, 5, 5) == "microbatch 1 (1 of 3), 5 steps in 20 s, about 2 min left"


def test_the_last_size_has_only_its_own_steps_left() -> None:
    told = Told()
    told.after(0, 4, 0, 0)
    told.after(3, 4, 0, 10)
    assert told.after(50, 4, 5, 10) == "microbatch 4 (3 of 3), step 6 of 10, about 50 s left"
    assert told.after(50, 4, 10, 10) == "microbatch 4 (3 of 3), 10 steps in 103 s"


@pytest.mark.parametrize("seconds", [0.0, 1e-9])
def test_it_never_says_that_no_time_is_left(seconds: float) -> None:
    told = Told()
    told.after(0, 4, 0, 0)
    told.after(0, 4, 0, 2)
    assert told.after(seconds, 4, 1, 2).endswith("about 1 s left")


@pytest.mark.parametrize("patience_s, shown", [(0.0, ["start"]), (60.0, [])])
def test_a_bar_is_shown_of_long_work_alone_and_ends_with_it(monkeypatch, patience_s, shown) -> None:
    done: list[str] = []

    class Bar:
        def __init__(self, **options: object) -> None:
            assert options["transient"]

        def add_task(self, what: str, total: int | None) -> int:
            return 7

        def start(self) -> None:
            done.append("start")

        def update(self, task: int, description: str, completed: int, total: int) -> None:
            done.append(f"{task} {description} {completed} of {total}")

        def stop(self) -> None:
            done.append("stop")

    monkeypatch.setattr("rich.progress.Progress", Bar)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(terminal, "_PATIENCE_S", patience_s)
    with contextlib.suppress(KeyboardInterrupt), terminal.progress() as tell:
        tell("solving", 2, 10)
        raise KeyboardInterrupt
    assert done == [*shown, "7 solving 2 of 10", "stop"]


SCRIPT = """
import time
from partopt.cli import terminal
from partopt.cli.terminal import progress, say
terminal._PATIENCE_S = 0.0
with progress() as tell:
    tell("solving [red]a\\x1b]0;title", 1, 10)
    time.sleep(0.3)
    say("warning: one", err=True)
    tell("solving", 2, 10)
    time.sleep(0.3)
say("warning: two", err=True)
"""
_BEGINS = re.compile(
    rb"(?:\r?\n|\r\x1b\[2K|\x1b\[2K)(?:\x1b\[[0-9;?]*[a-zA-Z])*warning: (one|two)\r\n"
)


@pytest.mark.slow
def test_a_warning_has_a_line_of_its_own_beside_the_bar() -> None:
    """In a pseudoterminal: what stands before a warning ends the bar's line or wipes it."""
    shown, child = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "PYTHONPATH": str(ROOT), "COLUMNS": "80"}
    with subprocess.Popen([sys.executable, "-c", SCRIPT], stderr=child, env=environment) as process:
        os.close(child)
        seen = b""
        with contextlib.suppress(OSError):  # Linux says that the other end is closed
            while part := os.read(shown, 4096):
                seen += part
        os.close(shown)
    assert process.returncode == 0
    assert b"solving [red]a\\x1b]0;title" in seen
    assert _BEGINS.findall(seen) == [b"one", b"two"]
