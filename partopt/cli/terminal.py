"""All that the command line prints goes through here: what others named cannot steer a terminal."""

from __future__ import annotations

import contextlib
import math
import os
import re
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from typing import TextIO, TypeVar

import click

from partopt.errors import Interrupted
from partopt.printable import printable
from partopt.report.text import command_lines

T = TypeVar("T")
Tell = Callable[[str, int, int], None]  # what is done, how much of it, and how much there is

_NARROWEST, _USUAL, _WIDEST = 60, 80, 200  # columns
# What stays as it is: newlines, and the colours of the pages of `partopt.report`.
_AS_IS = re.compile("(\n|\x1b\\[(?:0|1|2|3[12]|[34]8;5;[0-9]{1,3})m)")


_LEAD = re.compile(r"(?:error|hint|warning|note|next): +")
_COMMAND = re.compile(r"(?:^|(?<=: ))(?:partopt|torchrun) .*$")
_WORD = re.compile(r"""(?:'[^']*'|"[^"]*"|\S)+""")  # of a command
# what stays on one line: the file that a message begins with, a short quotation, an option's value
_WHOLE = re.compile(r'^[^:]*/[^:]*(?=: )|"[^"]{,40}"|--[a-z][a-z-]* [^\s-]\S*')
_JOINT = "\0"  # in place of a blank at which no line ends; messages have no control characters
_PATIENCE_S = 1.0  # before a bar is shown
_OFTEN_S = 0.1  # between two reports of the same work that are shown
INTERRUPTED = 130  # the exit code after Ctrl-C


def columns(stream: TextIO | None = None) -> int:
    """Columns of a page on `stream`, by default on standard output.

    That is what COLUMNS says, or the terminal has, within 60 to 200; else 80.
    """
    stream, given = stream or sys.stdout, os.environ.get("COLUMNS", "")
    if given.isdecimal():
        found = int(given)
    elif stream.isatty():
        found = os.get_terminal_size(stream.fileno()).columns or _USUAL
    else:
        found = _USUAL
    return max(_NARROWEST, min(_WIDEST, found))


def is_dumb() -> bool:
    """Whether the environment says that the terminal prints characters and does nothing else."""
    return os.environ.get("TERM") == "dumb"


def ascii_only() -> bool:
    """Whether pages keep to ASCII: on dumb terminals, and where characters are not in UTF-8.

    That is what the encoding of standard output says, or a locale that is named C or POSIX, which
    Python takes for UTF-8 unless it is told the encoding.
    """
    if is_dumb() or not (sys.stdout.encoding or "ascii").lower().startswith("utf"):
        return True
    told = os.environ.get("PYTHONIOENCODING") or os.environ.get("PYTHONUTF8")
    return not told and (os.environ.get("LC_ALL") or os.environ.get("LANG")) in ("C", "POSIX")


def say(text: str, err: bool = False, nl: bool = True) -> None:
    """Print the text on standard output or, with `err`, on standard error.

    Control and format characters are printed as escapes; colours stay on standard output where that
    is a terminal. Messages on a terminal are wrapped to its width.
    """
    # the streams as they are now: a progress bar puts one there that prints above it
    if err:  # no message has colours
        lines = [printable(line) for line in text.split("\n")]
        if sys.stderr.isatty():
            wide = columns(sys.stderr)
            lines = [wrap(line, wide) for line in lines]
        click.echo("\n".join(lines), file=sys.stderr, nl=nl)
        return
    parts = _AS_IS.split(text)
    parts[::2] = map(printable, parts[::2])
    click.echo("".join(parts), file=sys.stdout, nl=nl)


def say_file(text: str) -> None:
    """Print the text of a file: as it is, but on a terminal as `say` does."""
    if sys.stdout.isatty():
        say(text, nl=False)
    else:
        click.echo(text, nl=False)


def wrap(message: str, wide: int) -> str:
    """A line of standard error in lines of `wide` columns, those after the first indented.

    A command that is longer goes on after a backslash. What has none of the leads of messages, as
    the line of a traceback, stays as it is.
    """
    lead = _LEAD.match(message)
    if lead is None or len(message) <= wide:
        return message
    begin, text, rest = lead[0], message[lead.end() :], " " * lead.end()
    command = None if begin.startswith("error") else _COMMAND.search(text)
    lines: list[str] = []
    if prose := text[: command.start()] if command else text:
        whole = _WHOLE.sub(lambda match: match[0].replace(" ", _JOINT), prose)
        filled = textwrap.fill(
            whole,
            wide,
            initial_indent=begin,
            subsequent_indent=rest,
            break_long_words=False,
            break_on_hyphens=False,
        )
        lines.append(filled.replace(_JOINT, " "))
        begin = rest
    if command:
        lines += command_lines(_WORD.findall(command[0]), begin, rest, wide)
    return "\n".join(lines)


@contextlib.contextmanager
def progress() -> Iterator[Tell]:
    """Yield a function to call with what is being done, how much is done, and how much there is."""
    if not sys.stderr.isatty():
        yield lambda what, done, total: None
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import Progress

    began, told_s, last = time.monotonic(), -math.inf, ""
    bar = Progress(console=Console(stderr=True), transient=True)
    task = bar.add_task("", total=None)

    def tell(what: str, done: int, total: int) -> None:
        nonlocal told_s, last
        now_s = time.monotonic()
        if what == last and now_s - told_s < _OFTEN_S:
            return
        told_s, last = now_s, what
        if now_s - began > _PATIENCE_S:
            bar.start()
        bar.update(task, description=escape(printable(what)), completed=done, total=total)

    try:
        yield tell
    finally:
        bar.stop()


def search(find: Callable[[Tell], T]) -> tuple[T, str]:
    """What `find` finds, with a progress bar; and where Ctrl-C interrupted it, nowhere: "".

    Ctrl-C ends it at its next report: what is compiled or called by a library in between may lose
    an exception. A second one ends it at once. Leaves with exit code 130 where it found nothing
    until then.
    """
    where, asked = "at its beginning", False

    def note(what: str, done: int, total: int) -> None:
        nonlocal where, asked
        where = f"at {done / total:.0%} of {what}"
        if asked:
            asked = False  # what was found is put together with further reports
            raise KeyboardInterrupt
        tell(what, done, total)

    def ask() -> None:
        nonlocal asked
        asked = True

    with progress() as tell, _at_interrupt(ask):
        try:
            found = find(note)
            return found, where if asked else ""
        except Interrupted as stopped:
            return stopped.found, where
        except KeyboardInterrupt:
            pass
    say(f"interrupted {where}, before a plan was found: nothing is written", err=True)
    raise click.exceptions.Exit(INTERRUPTED)


@contextlib.contextmanager
def _at_interrupt(ask: Callable[[], None]) -> Iterator[None]:
    """Have `ask` called at the first Ctrl-C, in a process that Ctrl-C would end."""
    usual = signal.getsignal(signal.SIGINT)
    main = threading.current_thread() is threading.main_thread()
    if not main or usual is not signal.default_int_handler:
        yield
        return

    def first(*_: object) -> None:
        signal.signal(signal.SIGINT, usual)
        ask()

    signal.signal(signal.SIGINT, first)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)


def leave_if_interrupted(where: str) -> None:
    """Say where a search was interrupted whose best is shown, and leave with exit code 130."""
    if where:
        say(f"interrupted {where}: this is the best until then", err=True)
        raise click.exceptions.Exit(INTERRUPTED)
