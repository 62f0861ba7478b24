"""A timeline in a terminal, a line a rank.

A line shows the rank's actions as letters and microbatches, or what each moment is mostly spent on.
Windows of a long timeline stand side by side, all at one scale.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import click
import numpy as np
from numpy.typing import NDArray

from partopt.documents.simulation import DrawnTimeline, DrawnWindow, RankTimeline
from partopt.printable import shorten
from partopt.report.looks import WORDS, read_row, span_text, ticks
from partopt.schedules.order import KINDS, A, B, F, I
from partopt.simulator.timeline import Slots
from partopt.units import format_seconds

# A cell is one character. What it shows is its look: the kind of the action,
# with ODD added in the rank's second chunk, fourth, ..
ODD = len(KINDS)
IDLE = -1
_LEAST = 8  # columns of a window, however narrow the page
_CUT, _ASCII_CUT = "┊", ":"  # between two windows
_PRESENT = 0.05  # share of a column below which something is not shown in it

# of the 256 colours of terminals, those nearest to the figures'; the text on them is black
_BACKGROUNDS = {
    "F": (117, 75),
    "B": (209, 173),
    "I": (214, 178),
    "W": (79, 36),
    "R": (218, 175),
    "A": (250, 250),
    "U": (228, 228),
}

Seconds = NDArray[np.float64]
Looks = NDArray[np.int64]  # shape (columns,)


class _View(NamedTuple):
    """From `begin` on, `cell` seconds a column.

    `names`: there is room to name actions one by one.
    """

    begin: float
    cell: float
    columns: int
    names: bool


class _Line(NamedTuple):
    name: str
    looks: Looks
    texts: list[str]  # of each column its character
    pairs: bool  # two actions at once are in it
    busy: float


def render(
    timeline: DrawnTimeline, width: int = 80, ascii_only: bool = False, colour: bool = False
) -> str:
    """The timeline in `width` columns, a line a rank, or one for all ranks that do the same.

    Where actions are wide enough they bear their letters and microbatches, `F0 B0`; otherwise each
    character stands for what its rank does in that time, kinds in proportion. A rank's second chunk
    has small letters. The last column is the share of the time at work, where one window shows it.
    Several windows have headings with their times, and a cut mark between them.
    """
    windows = timeline.windows
    if not timeline.ranks or any(each.end_s <= each.begin_s for each in windows):
        return "nothing happens"
    folds = _fold_alike(timeline.ranks)
    rows = [read_row(ranks[0]) for ranks in folds]
    label = max(4, *(len(_name_ranks(ranks)) for ranks in folds))
    beside = label + (7 if len(windows) == 1 else 1 + len(windows))
    views = _views(windows, rows, max(_LEAST, (width - beside) // len(windows)))
    lines = [
        [_line(ranks, own, view, ascii_only, colour) for view in views]
        for ranks, own in zip(folds, rows, strict=True)
    ]
    cut = _ASCII_CUT if ascii_only else _CUT
    head = [f"{'RANK':>{label}}  {_axis(views[0], windows[0].end_s)} BUSY"]
    if len(windows) > 1:
        names, times = [each.what for each in windows], [span_text(each) for each in windows]
        head = [
            f"{name:>{label}}  {cut.join(_fit(text, views[0].columns) for text in texts)}".rstrip()
            for name, texts in (("", names), ("RANK", times))
        ]
    flat = [part for line in lines for part in line]
    return "\n".join(
        [
            *(click.style(line, bold=True) for line in head),
            *(_painted_line(line, label, cut, colour) for line in lines),
            *_legend(flat, views[0], ascii_only, colour, width),
            *filter(None, [timeline.note]),
        ]
    )


def _fit(text: str, columns: int) -> str:
    return shorten(text, columns).ljust(columns)


def _painted_line(parts: list[_Line], label: int, cut: str, colour: bool) -> str:
    line = f"{parts[0].name:>{label}}  {cut.join(_paint_line(each, colour) for each in parts)}"
    return line if len(parts) > 1 else f"{line} {parts[0].busy:>4.0%}"


def _views(windows: Sequence[DrawnWindow], rows: list[Slots], columns: int) -> list[_View]:
    """The views of the windows, in at most `columns` columns each and all at one scale.

    The shortest kind of action takes whole columns where that costs little of the width, so that
    equal actions look equal.
    """
    span = max(each.end_s - each.begin_s for each in windows)
    short = min(span, *(_typical_s(own) for own in rows))
    each = short * columns / span
    whole, cell = int(each + 1e-9), span / columns
    if whole >= 2 or (whole == 1 and each < 1.25):
        cell = short / whole
        columns = min(columns, int(np.ceil(span / cell - 1e-6)))
    return [_View(window.begin_s, cell, columns, whole >= 1) for window in windows]


def _typical_s(own: Slots) -> float:
    """Seconds of a forward, or of a backward where that is shorter: medians, joined ones halved."""
    seconds = (own.end - own.start) / np.where(own.pair > 0, 2, 1)
    medians = [
        float(np.median(seconds[own.kind == kind]))
        for kind in (F, B, I)
        if (own.kind == kind).any()
    ]
    return min((median for median in medians if median > 0), default=float("inf"))


def _fold_alike(ranks: Sequence[RankTimeline]) -> list[list[RankTimeline]]:
    """The ranks, those together that do the same at the same times."""
    folds: dict[tuple[Hashable, ...], list[RankTimeline]] = {}
    for rank in ranks:
        times = (rank.start_s, rank.end_s, rank.allreduce_start_s, rank.allreduce_end_s)
        folds.setdefault((rank.actions, *map(tuple, times)), []).append(rank)
    return list(folds.values())


def _name_ranks(ranks: Sequence[RankTimeline]) -> str:
    """`0-31 x32`, and `0.. x4` where they are not consecutive."""
    first, last, count = ranks[0].rank, ranks[-1].rank, len(ranks)
    if count == 1:
        return str(first)
    return f"{first}-{last} x{count}" if last - first == count - 1 else f"{first}.. x{count}"


def _line(
    ranks: list[RankTimeline], row: Slots, view: _View, ascii_only: bool, colour: bool
) -> _Line:
    own = _side_by_side(row)
    rank = ranks[0]
    starts, ends = np.array(rank.allreduce_start_s), np.array(rank.allreduce_end_s)
    shares = _shares(own, starts, ends, view)
    working = float(shares.sum() - shares[A].sum())
    if view.names:
        looks, texts = _name(own, shares, view, "-" if ascii_only else "─", colour)
    else:
        looks = _diffuse(shares)
        texts = [_letter(look) for look in looks]
    idle = "." if ascii_only else "·"
    shown = [idle if look == IDLE else text for look, text in zip(looks, texts, strict=True)]
    return _Line(_name_ranks(ranks), looks, shown, bool(own.pair.any()), working / view.columns)


def _side_by_side(own: Slots) -> Slots:
    """Two joined actions as halves of their time: the first, then the second."""
    middle = (own.start + own.end) / 2
    return own._replace(
        start=np.where(own.pair == 2, middle, own.start),
        end=np.where(own.pair == 1, middle, own.end),
    )


def _shares(own: Slots, starts: Seconds, ends: Seconds, view: _View) -> Seconds:
    """Share of each column that each look takes, shape (2 kinds, columns).

    All-reduces take only what is idle otherwise.
    """
    edges = view.begin + view.cell * np.arange(view.columns + 1, dtype=np.float64)
    looks = own.kind + ODD * (own.chunk % 2)
    shares = np.zeros((2 * len(KINDS), view.columns))
    for look in np.unique(looks):
        chosen = looks == look
        shares[look] = _cover(own.start[chosen], own.end[chosen], edges) / view.cell
    if len(starts):
        idle = np.maximum(0.0, 1 - shares.sum(axis=0))
        shares[A] += np.minimum(idle, _cover(starts, ends, edges) / view.cell)
    return shares


def _cover(starts: Seconds, ends: Seconds, edges: Seconds) -> Seconds:
    """Seconds between each two `edges` that the intervals cover, shape (edges - 1,).

    The intervals are in order and do not overlap.
    """
    times = np.stack([starts, ends], axis=1).ravel()
    total = np.cumsum(ends - starts)
    sums = np.stack([total - (ends - starts), total], axis=1).ravel()
    return np.diff(np.interp(edges, times, sums))


def _diffuse(shares: NDArray[np.float64]) -> Looks:
    """A look for each column, in the long run in proportion to the shares.

    Of the looks in a column, it takes the one that is owed most; never one that is not there.
    """
    whole = np.vstack([shares, np.maximum(0.0, 1 - shares.sum(axis=0))])
    owed = np.zeros(len(whole))
    looks = np.empty(whole.shape[1], dtype=np.int64)
    for column, share in enumerate(whole.T):
        present = share > _PRESENT
        owed = np.where(present, owed + share, 0.0)
        looks[column] = np.where(present, owed, -np.inf).argmax()
        owed[looks[column]] -= 1
    return np.where(looks == len(shares), IDLE, looks)


def _name(
    own: Slots, shares: NDArray[np.float64], view: _View, fill: str, colour: bool
) -> tuple[Looks, list[str]]:
    """Each action in the columns that it takes, with its letter and its microbatch."""
    looks = np.where(shares[A] > 0.5, A, IDLE).astype(np.int64)
    texts = [KINDS[A]] * view.columns
    columns = (
        np.rint((np.stack([own.start, own.end]) - view.begin) / view.cell)
        .astype(np.int64)
        .clip(0, view.columns)
    )
    for kind, microbatch, chunk, first, last in zip(
        own.kind, own.microbatch, own.chunk, *columns, strict=True
    ):
        look = int(kind) + ODD * int(chunk % 2)
        looks[first:last] = look
        texts[first:last] = _label(
            _letter(look),
            "" if KINDS[kind] in "AU" else str(microbatch),
            last - first,
            " " if colour else fill,
        )
    return looks, texts


def _label(letter: str, number: str, room: int, fill: str) -> str:
    """The letter and the number, or as much of them as there is room for."""
    return (letter + number if len(letter + number) <= room else letter).ljust(room, fill)[:room]


def _letter(look: int) -> str:
    return "" if look == IDLE else KINDS[look % ODD].lower() if look >= ODD else KINDS[look]


def _paint_line(line: _Line, colour: bool) -> str:
    """The characters of a line, runs of one look on its colour."""
    if not colour:
        return "".join(line.texts)
    ends = [0, *(np.flatnonzero(np.diff(line.looks)) + 1).tolist(), len(line.looks)]
    return "".join(
        _paint("".join(line.texts[a:b]), int(line.looks[a]), colour)
        for a, b in itertools.pairwise(ends)
    )


def _paint(text: str, look: int, colour: bool) -> str:
    if not colour:
        return text
    if look == IDLE:
        return click.style(text, dim=True)
    return click.style(text, fg=16, bg=_BACKGROUNDS[KINDS[look % ODD]][look // ODD])


def _axis(view: _View, end: float) -> str:
    """A stroke at each tick, and after it the time."""
    text = [" "] * view.columns
    end = min(end, view.begin + view.cell * view.columns)
    for time, label in ticks(view.begin, end, max(2, view.columns // 12)):
        column = round((time - view.begin) / view.cell)
        if column + len(label) + 1 <= view.columns:
            text[column : column + len(label) + 1] = f"|{label}"
    return "".join(text)


def _legend(
    lines: list[_Line], view: _View, ascii_only: bool, colour: bool, width: int
) -> list[str]:
    """What the letters mean, of those that occur, and how long a character is."""
    looks = {int(look) for line in lines for look in np.unique(line.looks)}
    kinds = sorted({look % ODD for look in looks if look != IDLE})
    parts = [f"{_paint(KINDS[kind], kind, colour)} {WORDS[KINDS[kind]]}" for kind in kinds]
    if IDLE in looks:
        parts.append(f"{_paint('.' if ascii_only else '·', IDLE, colour)} idle")
    parts.append(f"a character is {format_seconds(view.cell)}")
    if not view.names:
        parts.append("letters in proportion to time")
    if any(look >= ODD for look in looks):
        parts.append("small letters: a rank's second chunk")
    if any(line.pairs for line in lines):
        parts.append("two at once: side by side")
    return _flow_lines(parts, width)


def _flow_lines(parts: list[str], width: int) -> list[str]:
    """The parts, as many on a line as there is room for."""
    flowed = [parts[0]]
    for part in parts[1:]:
        together = f"{flowed[-1]}  {part}"
        if len(click.unstyle(together)) <= width:
            flowed[-1] = together
        else:
            flowed.append(part)
    return flowed
