"""All that the command line prints goes through here: what others named cannot steer a terminal."""

from __future__ import annotations

import os
import re
import sys
from functools import partial
from typing import TextIO

import click

from partopt.cli.wrapping import wrap
from partopt.printable import printable

_NARROWEST, _USUAL, _WIDEST = 60, 80, 200  # columns
EXPLAIN = "partopt.explain"  # whether this command line asks for the meanings of terms
# What stays as it is: newlines, and the colours of the pages of `partopt.report`.
_OWN = re.compile("(\n|\x1b\\[(?:0|1|2|3[12]|[34]8;5;[0-9]{1,3})m)")


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
    # the streams as they are now: a progress bar puts its own there, which prints above it
    if err:  # no message has colours of its own
        lines = map(printable, text.split("\n"))
        if sys.stderr.isatty():
            lines = map(partial(wrap, wide=columns(sys.stderr)), lines)
        click.echo("\n".join(lines), file=sys.stderr, nl=nl)
        return
    parts = _OWN.split(text)
    parts[::2] = map(printable, parts[::2])
    click.echo("".join(parts), file=sys.stdout, nl=nl)


def say_page(page: str) -> None:
    """Print a page on standard output and, with --explain, what its terms mean."""
    say(page)
    if click.get_current_context().meta.get(EXPLAIN):
        from partopt.report.glossary import explain

        say(f"\n{explain(page)}")


def say_file(text: str) -> None:
    """Print the text of a file: as it is, but on a terminal as `say` does."""
    if sys.stdout.isatty():
        say(text, nl=False)
    else:
        click.echo(text, nl=False)
