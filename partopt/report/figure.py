"""A timeline as a figure for a paper: SVG, PDF or PNG, in the width of one column or of two."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from partopt.documents.simulation import DrawnTimeline, DrawnWindow
from partopt.errors import PartoptError
from partopt.report.actions import COLOURS, WORDS, read_row, shade, ticks
from partopt.report.basis import basis_lines
from partopt.report.pictures.heading import heading_of_timeline
from partopt.report.pictures.look import (
    COLUMN,
    FAINT,
    FULL,
    GREY,
    SIZE,
    SMALL,
    Heading,
    Picture,
    Sheet,
    legend_height,
)
from partopt.schedules.order import KINDS, A, U
from partopt.simulator.document import drawn_timeline, drawn_windows
from partopt.simulator.execution import Execution
from partopt.simulator.timeline import Slots
from partopt.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# inches beside the rows for ranks and for what they take, above and below them, between windows
_LEFT, _RIGHT, _ABOVE, _AXIS, _CUT = 0.42, 0.86, 0.17, 0.32, 0.14
_LINE = 0.125  # inches of a remark
_POINTS = 72  # of an inch
_GAP, _THIN = 0.08, 0.2  # of a row: above and below its boxes, and the height of an all-reduce
_BUSY, _PEAK = 24, 56  # points from the rows to the right ends of two columns
_DIGIT = 0.62  # width of a digit, of its size
_SMALLEST, _LARGEST, _MOST_NUMBERS = 4.5, 6.0, 3_000  # points of a microbatch's number
_EDGE = 0.07  # of the width of a window beside a cut, in which no time is written
_ROWS, _COLUMNS = 64, 140  # a character of the terminal is three points here
_MOST_DRAWN = 50_000


def render(execution: Execution, form: str, window: tuple[float, float] | None = None) -> bytes:
    """The timeline of an execution, or the seconds of it in `window`, in one of `look.FORMS`.

    The same timeline gives the same bytes. Beside each row are the share of the time at work and
    the most memory that the rank holds; of a long timeline its `drawn_windows` stand side by side.
    The legend says what times rest on that were not measured. Raises PartoptError for other forms,
    without matplotlib, and where there is nothing or too much to draw.
    """
    windows = drawn_windows(execution, _COLUMNS)
    if window:
        windows = [DrawnWindow(what="middle", begin_s=window[0], end_s=window[1])]
    drawn = drawn_timeline(execution.timeline, windows, _ROWS, _MOST_DRAWN)
    if drawn is None:
        raise PartoptError(
            f"a figure of more than {_MOST_DRAWN:,} actions is more than anyone can see",
            "choose a shorter window",
            code="too-many-actions",
            limit=_MOST_DRAWN,
        )
    if not any(each.start_s and each.start_s[0] < windows[-1].end_s for each in drawn.ranks):
        raise PartoptError(
            "there is nothing to draw",
            "choose a window in which something happens",
            code="nothing-to-draw",
        )
    heading = heading_of_timeline(execution)
    return Picture(heading, partial(_sheet, execution, drawn)).render(form)


def _sheet(execution: Execution, drawn: DrawnTimeline, heading: Heading) -> Sheet:
    from matplotlib.patches import Patch

    rows, count = [read_row(each) for each in drawn.ranks], len(drawn.windows)
    paired = any(own.pair.any() for own in rows)
    row = max(0.065, min(0.26 if paired else 0.17, 2.6 / len(rows)))
    chunks = max(len(each.stages) for each in drawn.ranks)
    span = max(each.end_s - each.begin_s for each in drawn.windows)
    for outer in (COLUMN, FULL):
        wide = (outer - _LEFT - _RIGHT - _CUT * (count - 1)) / count
        size = _number_size(rows, wide * _POINTS / span, row * _POINTS / (2 if paired else 1))
        if size and count == 1:
            break
    kinds = {int(kind) for own in rows for kind in np.unique(own.kind[own.end > own.start])}
    kinds |= {A} if any(each.allreduce_start_s for each in drawn.ranks) else set()
    handles = {
        WORDS[KINDS[kind]]: Patch(facecolor=COLOURS[KINDS[kind]]) for kind in sorted(kinds)
    } | {"idle": Patch(facecolor=FAINT)}
    dark = "stages of a rank from light to dark" if chunks > 1 else ""
    basis = [text for _, text in basis_lines(execution.plan.profile.estimated)]
    remarks = [*filter(None, [drawn.note, dark]), *basis]
    bottom = legend_height(handles, outer)
    below = bottom + _LINE * len(remarks) + _AXIS
    sheet = Sheet(outer, _ABOVE + row * len(rows) + below, heading)
    for place, window in enumerate(drawn.windows):
        axes = sheet.axes(_LEFT + place * (wide + _CUT), below, wide, row * len(rows))
        axes.set_xlim(window.begin_s, window.end_s)
        axes.set_ylim(len(rows), 0)
        axes.set_yticks([])
        axes.spines["left"].set_visible(False)
        _draw_rows(axes, drawn, rows, chunks, size)
        _label_time(axes, drawn.windows, place)
        if count > 1:
            _write(axes, 0, 2.5, window.what, ha="left", va="bottom", color=GREY)
        if place == 0:
            _label_ranks(axes, drawn, row)
    _write_ends(axes, execution, drawn, row)
    for number, text in enumerate(reversed(remarks)):
        sheet.text(outer / 2, bottom + _LINE * (number + 1), text, ha="center", size=SMALL)
    sheet.legend(handles)
    return sheet


def _number_size(rows: list[Slots], points_per_second: float, height: float) -> float:
    """Points of the numbers that fit the boxes of most microbatches; 0 where they are too small."""
    numbered = [own.kind != U for own in rows]
    seconds = np.concatenate(
        [(own.end - own.start)[which] for own, which in zip(rows, numbered, strict=True)]
    )
    if not 0 < len(seconds) <= _MOST_NUMBERS:
        return 0.0
    digits = len(str(max(int(own.microbatch.max(initial=0)) for own in rows)))
    room = float(np.quantile(seconds, 0.1)) * points_per_second - 0.8
    size = min(_LARGEST, room / (_DIGIT * digits), height * (1 - 2 * _GAP) * 0.85)
    return size if size >= _SMALLEST else 0.0


def _draw_rows(
    axes: Axes, drawn: DrawnTimeline, rows: list[Slots], chunks: int, size: float
) -> None:
    """The boxes of all ranks, on bands that show where a rank is idle; numbers where they fit."""
    (begin, end), points = axes.get_xlim(), axes.get_window_extent().width / axes.figure.dpi
    per_second = points * _POINTS / (end - begin)
    typical_s = np.median(np.concatenate([own.end - own.start for own in rows]))
    line = 0.3 if typical_s * per_second > 1.7 else 0.0
    inside = np.array([[begin, end]])
    for y, (rank, own) in enumerate(zip(drawn.ranks, rows, strict=True)):
        _bars(axes, inside, y + _GAP, y + 1 - _GAP, FAINT)
        starts, ends = np.maximum(own.start, begin), np.minimum(own.end, end)
        seen = ends > starts
        times = np.stack([starts, ends], axis=1)
        heights = ((_GAP, 1 - _GAP), (_GAP, 0.5), (0.5, 1 - _GAP))  # by `pair`
        looks = np.stack([own.kind, own.chunk, own.pair], axis=1)
        for kind, chunk, pair in np.unique(looks[seen], axis=0).tolist():
            chosen = seen & (looks == (kind, chunk, pair)).all(axis=1)
            colour, (top, low) = shade(KINDS[kind], chunk, chunks), heights[pair]
            _bars(axes, times[chosen], y + top, y + low, colour, line)
            ink = "black" if np.dot(colour, (0.3, 0.59, 0.11)) > 0.5 else "white"
            for (left, right), number in zip(times[chosen], own.microbatch[chosen], strict=True):
                room = (right - left) * per_second
                if size and kind != U and room >= _DIGIT * size * len(str(number)):
                    middle = (left + right) / 2, y + (top + low) / 2
                    look: Any = {"size": size, "ha": "center", "va": "center_baseline"}
                    axes.text(*middle, str(number), color=ink, **look)
        exchanges = np.stack([rank.allreduce_start_s, rank.allreduce_end_s], axis=1)
        if len(exchanges := exchanges.clip(begin, end)):
            _bars(axes, exchanges, y + 1 - _GAP - _THIN, y + 1 - _GAP, COLOURS["A"])


def _bars(axes: Axes, times: Any, top: float, low: float, colour: Any, line: float = 0) -> None:
    """Boxes from and to `times`, shape (n, 2), with a white `line` of so many points around."""
    spans = np.stack([times[:, 0], times[:, 1] - times[:, 0]], axis=1)
    edge = "white" if line else "none"
    axes.broken_barh(
        spans.tolist(), (top, low - top), facecolors=colour, edgecolors=edge, linewidths=line
    )


def _label_time(axes: Axes, windows: list[DrawnWindow], place: int) -> None:
    """The time axis of a window; the middle one of several has the unit."""
    from matplotlib.ticker import FixedLocator, FuncFormatter

    unit, per_second = next(
        (
            pair
            for pair in (("s", 1.0), ("ms", 1e3), ("µs", 1e6))
            if windows[-1].end_s * pair[1] >= 2
        ),
        ("ns", 1e9),
    )
    begin, end = axes.get_xlim()
    edge = _EDGE * (end - begin) if len(windows) > 1 else 0.0
    most = 8 if len(windows) == 1 else 5
    axes.xaxis.set_major_locator(
        FixedLocator([time for time, _ in ticks(begin + edge, end - edge, most)])
    )
    axes.xaxis.set_major_formatter(
        FuncFormatter(lambda seconds, _: f"{round(seconds * per_second, 6):.8g}")
    )
    if place == len(windows) // 2:
        axes.set_xlabel(f"time ({unit})", labelpad=2)
    axes.tick_params(axis="x", pad=1.5, labelsize=SIZE)


def _step(row: float) -> int:
    """Of how many rows of so many inches one is labelled, so that the labels have room."""
    return next(step for step in (1, 2, 4, 8) if row * step >= 0.11)


def _label_ranks(axes: Axes, drawn: DrawnTimeline, row: float) -> None:
    axes.set_ylabel("rank", labelpad=2)
    shown = range(0, len(drawn.ranks), _step(row))
    axes.set_yticks([y + 0.5 for y in shown], [str(drawn.ranks[y].rank) for y in shown])
    axes.tick_params(axis="y", length=0, pad=1.5, labelsize=SIZE if _step(row) == 1 else SMALL)


def _write_ends(axes: Axes, execution: Execution, drawn: DrawnTimeline, row: float) -> None:
    """At each row's end the share of the time at work, and the most bytes that the rank holds."""
    seconds, peaks = execution.end_s - execution.start_s, execution.peak_memory_bytes
    shares = execution.shares.compute_s / seconds
    columns = [(_BUSY, "busy", [f"{shares[each.rank]:.0%}" for each in drawn.ranks])]
    if peaks.any():
        texts = [format_bytes(int(peaks[each.rank])) for each in drawn.ranks]
        columns.append((_PEAK, "peak", texts))
    for right, heading, texts in columns:
        _write(axes, right, 2.5, heading, at=1, ha="right", va="bottom", color=GREY)
        for y in range(0, len(drawn.ranks), _step(row)):
            middle = {"at": 1, "up": 1 - (y + 0.5) / len(drawn.ranks)}
            _write(axes, right, 0, texts[y], **middle, ha="right", va="center_baseline")


def _write(
    axes: Axes, x: float, y: float, text: str, at: float = 0, up: float = 1, **look: Any
) -> None:
    """A text so many points from a place of the axes, in shares of their width and height."""
    place: Any = {"xycoords": "axes fraction", "textcoords": "offset points", "size": SMALL}
    axes.annotate(text, (at, up), xytext=(x, y), **place, **look)
