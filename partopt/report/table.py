"""Tables and bars for the terminal: 80 columns, never cut when piped, colour only where it is wanted."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import IO

from rich.console import Console
from rich.table import Table
from rich.text import Text

WIDTH = 80
_EIGHTHS = " ▏▎▍▌▋▊▉█"


def console(stream: IO[str] | None = None) -> Console:
    """A console on `stream` (default standard output) that never cuts or wraps what it is given."""
    file = stream or sys.stdout
    return Console(file=file, highlight=False, markup=False, emoji=False, soft_wrap=True, width=None if file.isatty() else 10_000)


def table(headings: Sequence[str], rows: Sequence[Sequence[str | Text]], left: Sequence[int] = (0,)) -> Table:
    """A table without lines; the columns named in `left` are aligned to the left, the others, numbers, to the right."""
    grid = Table(box=None, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for position, heading in enumerate(headings):
        grid.add_column(heading, justify="left" if position in left else "right", no_wrap=True, overflow="ignore")
    for row in rows:
        grid.add_row(*row)
    return grid


def bar(share: float, cells: int, ascii_only: bool = False) -> str:
    """`share` of 1 as a bar of at most `cells` characters."""
    eighths = round(max(0.0, min(1.0, share)) * cells * 8)
    if ascii_only:
        return ("#" * round(eighths / 8)).ljust(cells)
    return ("█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()).ljust(cells)


def shorten(text: str, width: int) -> str:
    """`text`, its middle left out where it is wider than `width`."""
    if len(text) <= width:
        return text
    head = (width - 2) // 2
    return f"{text[:head]}..{text[len(text) - (width - 2 - head) :]}"


def encodes_bars(stream: IO[str] | None = None) -> bool:
    """Whether the stream can show block characters."""
    encoding = getattr(stream or sys.stdout, "encoding", None) or "ascii"
    return encoding.lower().replace("-", "").startswith("utf")
