"""Tables and bars as plain text: 80 columns, never cut, no trailing blanks."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

import click

from partopt.printable import shorten

WIDTH = 80  # columns
_LABEL = 9  # columns of a label, where none is wider
_NARROW = 8  # columns of text are not shortened below this

_EIGHTHS = " ▏▎▍▌▋▊▉█"


def table(
    headings: Sequence[str], rows: Iterable[Sequence[str]], left: Sequence[int] = (0,), gap: int = 2
) -> str:
    """Lines of a table, headings in bold.

    The columns named in `left` are aligned to the left, the others, numbers, to the right. Where
    the table is wider than the page, its widest texts are shortened; numbers never are.
    """
    cells = [list(headings), *map(list, rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(headings))]
    while sum(widths) + gap * (len(widths) - 1) > WIDTH and any(
        widths[column] > _NARROW for column in left
    ):
        widths[max(left, key=lambda column: widths[column])] -= 1
    lines = [
        (" " * gap).join(
            shorten(text, width).ljust(width) if column in left else text.rjust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in cells
    ]
    return "\n".join(
        [click.style(lines[0].rstrip(), bold=True), *(line.rstrip() for line in lines[1:])]
    )


def bar(share: float, cells: int, ascii_only: bool = False) -> str:
    """`share` of 1 as a bar of at most `cells` characters."""
    eighths = round(max(0.0, min(1.0, share)) * cells * 8)
    if ascii_only:
        return "#" * round(eighths / 8)
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()


def label_lines(lines: Iterable[tuple[str, str]]) -> str:
    """A label and a text a line.

    Texts are aligned with each other, and so are the lines of a text that is wider than the page.
    """
    rows = list(lines)
    width = max([_LABEL, *(len(label) + 1 for label, _ in rows)])
    return "\n".join(
        textwrap.fill(
            text,
            WIDTH,
            initial_indent=f"{label:{width}}",
            subsequent_indent=" " * width,
            break_on_hyphens=False,
        )
        for label, text in rows
    )
