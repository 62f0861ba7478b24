"""What pages are made of: tables, labelled lines, paragraphs, bars and commands, as plain text.

Whoever prints pages says once how they look: `page_style`.
"""

from __future__ import annotations

import contextlib
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, Literal, NamedTuple

import click

from partopt.printable import shorten

DOES_NOT_FIT = "DOES NOT FIT"
_COLOURS = {"yes": "green", "no": "red", "does not fit": "red", DOES_NOT_FIT: "red"}
_DEFAULT = 80  # columns of a page
_NARROWEST = 8  # columns of text that has to make room
_LABEL = 9  # columns of a label, where none is wider
_EIGHTHS = " ▏▎▍▌▋▊▉█"


class PageStyle(NamedTuple):
    """Columns of a page, what it may contain, and how options in its texts are spelled."""

    width: int = _DEFAULT
    ascii_only: bool = False
    colour: bool = False
    spell: Callable[[str], str] = str


_STYLE = ContextVar("style", default=PageStyle())  # noqa: B039  (it is immutable)


def style() -> PageStyle:
    """That of the pages that are rendered in this context."""
    return _STYLE.get()


def width() -> int:
    """Columns of the pages that are rendered in this context."""
    return style().width


@contextlib.contextmanager
def page_style(**changes: Any) -> Iterator[None]:
    """Render pages in this context with another style in some of its fields."""
    token = _STYLE.set(style()._replace(**changes))
    try:
        yield
    finally:
        _STYLE.reset(token)


def stretch(room: int, share: float = 1.0, least: int = _NARROWEST) -> int:
    """Columns of a text that has `room` on a page of 80: more or less by its `share` of the rest.

    It never has less than `least`.
    """
    return max(least, room + round((width() - _DEFAULT) * share))


class Column(NamedTuple):
    """A column of a table: its heading, and the cell of a row; on a page of HTML also as a bar.

    The bar has the `parts` of a row, names with shares and colours; `colour` is that of a part that
    the column has as a number. Numbers are aligned to the right, the others to the left. Text is
    shortened where the page is too narrow; what is `whole` never is, and verdicts in it have
    colours. Where that is not enough the columns with a rank in `spare` are left out, the first
    rank first.
    """

    heading: str
    cell: Callable[[Any], str]
    kind: Literal["number", "text", "whole"] = "number"
    spare: int = 0
    parts: Callable[[Any], Iterable[tuple[str, float, str]]] | None = None
    colour: str = ""


def table_of(rows: Iterable[Any], columns: Sequence[Column], gap: int = 2) -> str:
    """Lines of a table, headings in bold, no wider than the page where texts can make room."""
    rows = list(rows)
    cells = [[column.heading, *map(column.cell, rows)] for column in columns]
    natural = [max(map(len, column)) for column in cells]
    widths, shown = list(natural), list(range(len(columns)))
    spare = sorted((n for n in shown if columns[n].spare), key=lambda n: columns[n].spare)
    while sum(widths[n] for n in shown) + gap * (len(shown) - 1) > width():
        texts = [n for n in shown if columns[n].kind == "text"]
        widest = max(texts, key=lambda n: widths[n], default=None)
        if widest is not None and widths[widest] > _NARROWEST:
            widths[widest] -= 1
        elif gap > 1:
            gap -= 1
        elif spare:
            shown.remove(spare.pop(0))
            widths = list(natural)
        else:
            break

    def pad(n: int, text: str) -> str:
        if columns[n].kind == "number":
            return text.rjust(widths[n])
        if columns[n].kind == "whole" and text in _COLOURS:
            return colour_verdict(text) + " " * (widths[n] - len(text))
        return shorten(text, widths[n]).ljust(widths[n])

    lines = [
        (" " * gap).join(pad(n, cells[n][line]) for n in shown).rstrip()
        for line in range(1 + len(rows))
    ]
    return "\n".join([click.style(lines[0], bold=True), *lines[1:]])


def colour_verdict(text: str) -> str:
    """`yes` in green, `no` and `does not fit` in red, on a terminal."""
    return click.style(text, fg=_COLOURS[text])


def bar(share: float, cells: int) -> str:
    """`share` of 1 as a bar of at most `cells` characters."""
    eighths = round(max(0.0, min(1.0, share)) * cells * 8)
    if style().ascii_only:
        return "#" * round(eighths / 8)
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()


def paragraph(text: str, begin: str = "", rest: str = "") -> str:
    """The text after `begin` in lines of the page's width, no word broken at a hyphen.

    All lines but the first begin with `rest`.
    """
    return textwrap.fill(
        text, width(), initial_indent=begin, subsequent_indent=rest, break_on_hyphens=False
    )


def with_label(label: str, lines: Iterable[str]) -> list[tuple[str, str]]:
    """The lines with their labels, of which the first alone has one."""
    return [("" if place else label, line) for place, line in enumerate(lines)]


def label_lines(lines: Iterable[tuple[str, str]]) -> str:
    """A label and a text a line.

    Texts are aligned with each other, and so are the lines of a text that is wider than the page.
    """
    rows = list(lines)
    wide = max([_LABEL, *(len(label) + 1 for label, _ in rows)])
    return "\n".join(
        paragraph(text, f"{label:{wide}}", " " * wide).replace(
            DOES_NOT_FIT, colour_verdict(DOES_NOT_FIT)
        )
        for label, text in rows
    )


def command_lines(words: Iterable[str], begin: str, rest: str, wide: int) -> Iterator[str]:
    """Lines of a command which a shell takes as they are copied, the first after `begin`.

    They have at most `wide` columns where no word is longer; values stay beside their options.
    Every line but the last ends in a backslash, every line but the first begins with `rest`.
    """
    parts: list[str] = []
    for word in words:  # with the option before it, where both have room
        option = parts[-1] if parts and parts[-1].startswith("-") and " " not in parts[-1] else ""
        if option and not word.startswith("-") and len(option) + len(word) < wide - len(rest) - 2:
            parts[-1] = f"{option} {word}"
        else:
            parts.append(word)
    line, empty = begin, True
    for part in parts:
        if not empty and len(line) + len(part) + 2 > wide:
            yield f"{line}\\"
            line = rest
        line, empty = f"{line}{part} ", False
    yield line.rstrip()
