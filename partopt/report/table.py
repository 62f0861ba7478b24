"""Tables and bars as plain text: as wide as the page, never cut, no trailing blanks."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

import click

from partopt.printable import shorten
from partopt.report.width import columns

DOES_NOT_FIT = "DOES NOT FIT"
_COLOURS = {"yes": "green", "no": "red", "does not fit": "red", DOES_NOT_FIT: "red"}
_LABEL = 9  # columns of a label, where none is wider
_NARROW = 8  # columns of text are not shortened below this

_EIGHTHS = " ▏▎▍▌▋▊▉█"


def table(
    headings: Sequence[str],
    rows: Iterable[Sequence[str]],
    left: Sequence[int] = (0,),
    gap: int = 2,
    *,
    verdicts: Sequence[int] = (),
    spare: Sequence[int] = (),
) -> str:
    """Lines of a table, headings in bold.

    The columns named in `left` are aligned to the left, the others, numbers, to the right. Where
    the table is wider than the page, its widest texts are shortened, then columns stand closer,
    then those named in `spare` are left out, the first first; numbers and the `verdicts`, of which
    some have colours, are never shortened.
    """
    cells = [list(headings), *map(list, rows)]
    texts = [column for column in left if column not in verdicts]
    widths = [max(len(row[column]) for row in cells) for column in range(len(headings))]
    shown = list(range(len(headings)))
    gap = _fit(widths, texts, gap, shown, list(spare))
    lines = [
        (" " * gap).join(
            _cell(row[column], widths[column], column in left, column in verdicts)
            for column in shown
        )
        for row in cells
    ]
    return "\n".join(
        [click.style(click.unstyle(lines[0]).rstrip(), bold=True), *map(str.rstrip, lines[1:])]
    )


def _fit(
    widths: list[int], texts: Sequence[int], gap: int, shown: list[int], spare: list[int]
) -> int:
    """Narrow the `widths` of texts, and leave columns out, until the page holds them; the gap."""
    natural = list(widths)
    while sum(widths[column] for column in shown) + gap * (len(shown) - 1) > columns():
        widest = max((c for c in texts if c in shown), key=lambda c: widths[c], default=None)
        if widest is not None and widths[widest] > _NARROW:
            widths[widest] -= 1
        elif gap > 1:
            gap -= 1
        elif spare:
            shown.remove(spare.pop(0))
            widths[:] = natural
        else:
            break
    return gap


def _cell(text: str, width: int, left: bool, verdict: bool) -> str:
    padded = shorten(text, width).ljust(width) if left else text.rjust(width)
    return padded.replace(text, colour_verdict(text)) if verdict and text in _COLOURS else padded


def colour_verdict(text: str) -> str:
    """`yes` in green, `no` and `does not fit` in red, on a terminal."""
    return click.style(text, fg=_COLOURS[text])


def bar(share: float, cells: int, ascii_only: bool = False) -> str:
    """`share` of 1 as a bar of at most `cells` characters."""
    eighths = round(max(0.0, min(1.0, share)) * cells * 8)
    if ascii_only:
        return "#" * round(eighths / 8)
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()


def paragraph(text: str) -> str:
    """The text in lines of the page's width, no word broken at a hyphen."""
    return textwrap.fill(text, columns(), break_on_hyphens=False)


def label_lines(lines: Iterable[tuple[str, str]]) -> str:
    """A label and a text a line.

    Texts are aligned with each other, and so are the lines of a text that is wider than the page.
    """
    rows = list(lines)
    width = max([_LABEL, *(len(label) + 1 for label, _ in rows)])
    return "\n".join(
        textwrap.fill(
            text,
            columns(),
            initial_indent=f"{label:{width}}",
            subsequent_indent=" " * width,
            break_on_hyphens=False,
        ).replace(DOES_NOT_FIT, colour_verdict(DOES_NOT_FIT))
        for label, text in rows
    )
