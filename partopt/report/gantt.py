"""A timeline in a terminal, a line a rank.

A line shows the rank's actions as letters and microbatches, or what a moment is mostly spent on.
Windows of a long timeline stand side by side, all at one scale.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import click
import numpy as np
from numpy.typing import NDArray

from partopt.documents.actions import KINDS, WORDS, A, B, F, I, Slots
from partopt.documents.simulation import DrawnTimeline, DrawnWindow, RankTimeline
from partopt.printable import shorten
from partopt.report.looks import read_row, span_text, ticks
from partopt.report.text import style, width
from partopt.units import format_seconds

# A cell is one character. What it shows is its look: the kind of the action, with ODD added in the
# rank's second chunk, fourth, ..
ODD = len(KINDS)
IDLE = -1
_LEAST = 8  # columns of a window, however narrow the page
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

Floats = NDArray[np.float64]
Looks = NDArray[np.int64]  # shape (columns,)


class _View(NamedTuple):
    """From `begin` on, `cell` seconds a column; `names`: actions are wide enough to be named."""

    begin: float
    cell: float
    columns: int
    names: bool


def render(timeline: DrawnTimeline) -> str:
    """The timeline, a line a rank, or one for all ranks that do the same.

    Where actions are wide enough they bear their letters and microbatches, `F0 B0`; otherwise a
    character stands for what its rank does in that time, kinds in proportion. A rank's second chunk
    has small letters. The last column is the share of the time at work, where one window shows it.
    Several windows have headings with their times, and a cut mark between them.
    """
    windows = timeline.windows
    if not timeline.ranks or any(window.end_s <= window.begin_s for window in windows):
        return "nothing happens"
    alike: dict[Hashable, list[RankTimeline]] = {}
    for rank in timeline.ranks:
        times = (rank.start_s, rank.end_s, rank.allreduce_start_s, rank.allreduce_end_s)
        alike.setdefault((rank.actions, *map(tuple, times)), []).append(rank)
    names = [_name_ranks(ranks) for ranks in alike.values()]
    rows = [read_row(ranks[0]) for ranks in alike.values()]
    label = max(4, *map(len, names))
    beside = label + (7 if len(windows) == 1 else 1 + len(windows))
    views = _views(windows, rows, max(_LEAST, (width() - beside) // len(windows)))
    ascii_only = style().ascii_only
    cut, idle = (":", ".") if ascii_only else ("┊", "·")
    fill = " " if style().colour else "-" if ascii_only else "─"
    lines, looks = [], set()
    for name, ranks, slots in zip(names, alike.values(), rows, strict=True):
        parts = []
        for view in views:
            shares = _shares(slots, ranks[0], view)
            if view.names:
                shown, texts = _name_actions(slots, shares, view, idle, fill)
            else:
                shown, texts = _diffuse(shares, idle)
            looks |= {*shown.tolist()}
            parts.append(_paint(shown, texts))
        working = (shares.sum() - shares[A].sum()) / views[0].columns
        busy = f" {working:>4.0%}" if len(views) == 1 else ""
        lines.append(f"{name:>{label}}  {cut.join(parts)}{busy}")
    head = [f"{'RANK':>{label}}  {_axis(views[0], windows[0].end_s)} BUSY"]
    if len(windows) > 1:
        titles = ("", [window.what for window in windows]), ("RANK", map(span_text, windows))
        head = [
            f"{name:>{label}}  {cut.join(_fit(text, views[0].columns) for text in texts)}".rstrip()
            for name, texts in titles
        ]
    legend = _legend(looks, views[0], idle)
    if any(slots.pair.any() for slots in rows):
        legend.append("two at once: side by side")
    note = [timeline.note] if timeline.note else []
    bold = [click.style(line, bold=True) for line in head]
    return "\n".join([*bold, *lines, *_pack(legend, width()), *note])


def _name_ranks(ranks: Sequence[RankTimeline]) -> str:
    """`0-31 x32`, and `0.. x4` where they are not consecutive."""
    first, last, count = ranks[0].rank, ranks[-1].rank, len(ranks)
    if count == 1:
        return str(first)
    return f"{first}-{last} x{count}" if last - first == count - 1 else f"{first}.. x{count}"


def _fit(text: str, columns: int) -> str:
    return shorten(text, columns).ljust(columns)


def _views(windows: Sequence[DrawnWindow], rows: list[Slots], columns: int) -> list[_View]:
    """The views of the windows, in at most `columns` columns each and all at one scale.

    The shortest kind of action takes whole columns where that costs little of the width, so that
    equal actions look equal.
    """
    span = max(window.end_s - window.begin_s for window in windows)
    short = span
    for slots in rows:  # a forward, or a backward where that is shorter; joined ones are halved
        seconds = (slots.end - slots.start) / np.where(slots.pair > 0, 2, 1)
        medians = [
            np.median(seconds[slots.kind == k]) for k in (F, B, I) if (slots.kind == k).any()
        ]
        short = min([short, *(float(median) for median in medians if median > 0)])
    action_columns = short * columns / span
    whole, cell = int(action_columns + 1e-9), span / columns
    if whole >= 2 or (whole == 1 and action_columns < 1.25):
        cell = short / whole
        columns = min(columns, int(np.ceil(span / cell - 1e-6)))
    return [_View(window.begin_s, cell, columns, whole >= 1) for window in windows]


def _shares(slots: Slots, rank: RankTimeline, view: _View) -> Floats:
    """Share of every column that a look takes, shape (2 kinds, columns).

    Two joined actions are halves of their time; all-reduces take only what is idle otherwise.
    """
    edges = view.begin + view.cell * np.arange(view.columns + 1, dtype=np.float64)
    shares = np.zeros((2 * len(KINDS), view.columns))
    starts, ends = _side_by_side(slots)
    looks = slots.kind + ODD * (slots.chunk % 2)
    for look in np.unique(looks):
        chosen = looks == look
        shares[look] = _cover(starts[chosen], ends[chosen], edges) / view.cell
    starts, ends = np.array(rank.allreduce_start_s), np.array(rank.allreduce_end_s)
    if len(starts):
        idle = np.maximum(0.0, 1 - shares.sum(axis=0))
        shares[A] += np.minimum(idle, _cover(starts, ends, edges) / view.cell)
    return shares


def _side_by_side(slots: Slots) -> tuple[Floats, Floats]:
    """Starts and ends, those of two joined actions as halves of their time."""
    middle = (slots.start + slots.end) / 2
    starts = np.where(slots.pair == 2, middle, slots.start)
    return starts, np.where(slots.pair == 1, middle, slots.end)


def _cover(starts: Floats, ends: Floats, edges: Floats) -> Floats:
    """Seconds between neighbouring `edges` that the intervals cover, shape (edges - 1,).

    The intervals are in order and do not overlap.
    """
    times = np.stack([starts, ends], axis=1).ravel()
    total = np.cumsum(ends - starts)
    sums = np.stack([total - (ends - starts), total], axis=1).ravel()
    return np.diff(np.interp(edges, times, sums))


def _diffuse(shares: Floats, idle: str) -> tuple[Looks, list[str]]:
    """A look for every column, in the long run in proportion to the shares.

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
    looks = np.where(looks == len(shares), IDLE, looks)
    return looks, [idle if look == IDLE else _letter(look) for look in looks.tolist()]


def _name_actions(
    slots: Slots, shares: Floats, view: _View, idle: str, fill: str
) -> tuple[Looks, list[str]]:
    """Actions in the columns that they take, with letters and, where there is room, numbers."""
    looks = np.where(shares[A] > 0.5, A, IDLE).astype(np.int64)
    texts = [idle if look == IDLE else KINDS[A] for look in looks.tolist()]
    edges = np.rint((np.stack(_side_by_side(slots)) - view.begin) / view.cell).astype(np.int64)
    columns = slots.kind, slots.microbatch, slots.chunk, *edges.clip(0, view.columns)
    for kind, microbatch, chunk, first, last in zip(*map(np.ndarray.tolist, columns), strict=True):
        look, room = kind + ODD * (chunk % 2), last - first
        looks[first:last] = look
        letter = _letter(look)
        text = letter if KINDS[kind] in "AU" else f"{letter}{microbatch}"
        text = text if len(text) <= room else letter
        texts[first:last] = text.ljust(room, fill)[:room]
    return looks, texts


def _letter(look: int) -> str:
    return KINDS[look % ODD].lower() if look >= ODD else KINDS[look]


def _paint(looks: Looks, texts: Sequence[str]) -> str:
    """The characters of a line, in colours runs of one look on theirs."""
    if not style().colour:
        return "".join(texts)
    ends = [0, *(np.flatnonzero(np.diff(looks)) + 1).tolist(), len(looks)]
    return "".join(_colour("".join(texts[a:b]), int(looks[a])) for a, b in itertools.pairwise(ends))


def _colour(text: str, look: int) -> str:
    if look == IDLE:
        return click.style(text, dim=True)
    return click.style(text, fg=16, bg=_BACKGROUNDS[KINDS[look % ODD]][look // ODD])


def _axis(view: _View, end: float) -> str:
    """A stroke at every tick, and after it the time."""
    text = [" "] * view.columns
    end = min(end, view.begin + view.cell * view.columns)
    for time, label in ticks(view.begin, end, max(2, view.columns // 12)):
        column = round((time - view.begin) / view.cell)
        if column + len(label) + 1 <= view.columns:
            text[column : column + len(label) + 1] = f"|{label}"
    return "".join(text)


def _legend(looks: set[int], view: _View, idle: str) -> list[str]:
    """What the letters mean, of those that occur, and how long a character is."""
    kinds = sorted({look % ODD for look in looks if look != IDLE})
    marks = [(KINDS[kind], kind, WORDS[KINDS[kind]]) for kind in kinds]
    if IDLE in looks:
        marks.append((idle, IDLE, "idle"))
    paint = _colour if style().colour else lambda mark, look: mark
    parts = [f"{paint(mark, look)} {word}" for mark, look, word in marks]
    parts.append(f"a character is {format_seconds(view.cell)}")
    if not view.names:
        parts.append("letters in proportion to time")
    if any(look >= ODD for look in looks):
        parts.append("small letters: a rank's second chunk")
    return parts


def _pack(parts: list[str], width: int) -> list[str]:
    """The parts, as many on a line as there is room for."""
    lines = [parts[0]]
    for part in parts[1:]:
        together = f"{lines[-1]}  {part}"
        if len(click.unstyle(together)) <= width:
            lines[-1] = together
        else:
            lines.append(part)
    return lines
