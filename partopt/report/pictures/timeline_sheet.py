"""A timeline as a picture: a row a rank, a box an action, busy and peak beside the rows."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from partopt.documents.actions import KINDS, WORDS, A, Slots, U
from partopt.documents.plan import Plan
from partopt.documents.simulation import DrawnTimeline, SimulationDocument
from partopt.report.looks import COLOURS, ink, read_row, ticks
from partopt.report.phrases import basis_lines
from partopt.report.pictures.plan_sheet import heading
from partopt.report.pictures.sheet import (
    COLUMN,
    FAINT,
    FULL,
    GREY,
    MIDDLE,
    SIZE,
    SMALL,
    Heading,
    Picture,
    Sheet,
    draw_boxes,
)
from partopt.units import format_bytes, format_seconds

_LEFT, _RIGHT = 0.42, 0.86  # inches beside the rows
_ABOVE, _AXIS, _LINE = 0.17, 0.32, 0.125  # inches above the rows, below them, of a remark
_HIGHEST, _LOWEST, _ALL = 0.17, 0.065, 2.6  # inches of a row, and of all
_BUSY, _PEAK = 0.33, 0.78  # inches from the rows to the right ends of two columns
_GAP, _THIN = 0.08, 0.2  # of a row: above and below its boxes, and the height of an all-reduce
_DIGIT = 0.62  # width of a digit, of its size
_SMALLEST, _LARGEST, _MOST_NUMBERS = 4.5, 6.0, 3_000  # points of a microbatch's number


def picture(plan: Plan, simulation: SimulationDocument, drawn: DrawnTimeline) -> Picture:
    """The window of a timeline that is `drawn`, of the `simulation` of a plan.

    Beside every row are the share of the time at work and the most memory that the rank holds.
    """
    about = (
        f"Timeline of {len(simulation.ranks)} ranks and {simulation.microbatches} microbatches: a "
        "row for each rank, a box for each of its actions."
    )
    period = simulation.period_s, simulation.bubble
    return Picture(
        heading(plan, about, simulation.microbatches, *period), partial(_draw, simulation, drawn)
    )


def _draw(simulation: SimulationDocument, drawn: DrawnTimeline, heading: Heading) -> Sheet:
    rows, window = [read_row(rank) for rank in drawn.ranks], drawn.windows[0]
    actions = Slots._make(np.concatenate(column) for column in zip(*rows, strict=True))
    y = np.repeat(np.arange(len(rows)), [len(slots.kind) for slots in rows])
    halves = 2 if actions.pair.any() else 1
    row = max(_LOWEST, min(_HIGHEST * (1.5 if halves > 1 else 1), _ALL / len(rows)))
    for outer in (COLUMN, FULL):
        wide = outer - _LEFT - _RIGHT
        per_second = 72 * wide / (window.end_s - window.begin_s)
        size = _number_size(actions, per_second, 72 * row / halves)
        if size:
            break
    sheet = Sheet(heading, outer)
    sheet.down += _ABOVE
    _write_ends(sheet, simulation, drawn, _LEFT + wide, row)
    axes = sheet.axes(_LEFT, wide, row * len(rows))
    axes.set_xlim(window.begin_s, window.end_s)
    axes.set_ylim(len(rows), 0)
    handles = _draw_actions(axes, actions, y, per_second, size)
    for place, rank in enumerate(drawn.ranks):
        starts, ends = np.array([rank.allreduce_start_s, rank.allreduce_end_s])
        if len(starts):
            low = place + 1 - _GAP
            draw_boxes(axes, starts, ends, low - _THIN, low, facecolor=COLOURS["A"][0], lw=0)
            handles[A] = COLOURS["A"][0]
    _label_axes(axes, drawn, row, 8 if outer == FULL else 5)
    sheet.down += _AXIS
    remarks = [text for _, text in basis_lines(simulation.estimated)]
    if actions.chunk.any():
        remarks.insert(0, "every second stage of a rank is darker")
    if window.end_s < simulation.makespan_s and window.begin_s == 0:
        part = format_seconds(window.end_s), format_seconds(simulation.makespan_s)
        remarks.insert(0, f"the first {part[0]} of {part[1]}")
    for text in filter(None, [drawn.note, *remarks]):
        sheet.text(outer / 2, sheet.down, text, ha="center", size=SMALL)
        sheet.down += _LINE
    legend = {WORDS[KINDS[kind]]: Patch(facecolor=handles[kind]) for kind in sorted(handles)}
    sheet.legend(legend | {"idle": Patch(facecolor=FAINT)})
    return sheet


def _number_size(actions: Slots, per_second: float, height: float) -> float:
    """Points of the numbers that fit the boxes of most microbatches; 0 where they are too small.

    `per_second` are the points of a second, `height` those of a row or of half of it.
    """
    seconds = (actions.end - actions.start)[actions.kind != U]
    if not 0 < len(seconds) <= _MOST_NUMBERS:
        return 0.0
    digits = len(str(actions.microbatch.max()))
    room = float(np.quantile(seconds, 0.1)) * per_second - 0.8
    size = min(_LARGEST, room / (_DIGIT * digits), height * (1 - 2 * _GAP) * 0.85)
    return size if size >= _SMALLEST else 0.0


def _draw_actions(
    axes: Axes, actions: Slots, y: Any, per_second: float, size: float
) -> dict[int, str]:
    """Boxes on bands that show where a rank is idle, with numbers where they fit.

    `y` are the rows of the actions. Gives the colours of the kinds that are drawn.
    """
    begin, end = axes.get_xlim()
    bands = np.arange(axes.get_ylim()[0])
    draw_boxes(axes, begin, end, bands + _GAP, bands + 1 - _GAP, facecolor=FAINT, lw=0)
    left, right = actions.start.clip(begin, end), actions.end.clip(begin, end)
    top = y + np.where(actions.pair == 2, 0.5, _GAP)
    low = y + np.where(actions.pair == 1, 0.5, 1 - _GAP)
    line = 0.3 if np.median(actions.end - actions.start) * per_second > 1.7 else 0.0
    looks, colours = 2 * actions.kind + actions.chunk % 2, {}
    for look in np.unique(looks[right > left]).tolist():
        chosen = (right > left) & (looks == look)
        kind, dark = divmod(look, 2)
        colour = COLOURS[KINDS[kind]][dark]
        colours[kind] = COLOURS[KINDS[kind]][0]
        sides = left[chosen], right[chosen], top[chosen], low[chosen]
        draw_boxes(axes, *sides, facecolor=colour, edgecolor="white", lw=line)
        for *side, number in zip(*sides, actions.microbatch[chosen], strict=True):
            room = (side[1] - side[0]) * per_second
            if size and kind != U and room >= _DIGIT * size * len(str(number)):
                middle = (side[0] + side[1]) / 2, (side[2] + side[3]) / 2
                axes.text(*middle, str(number), color=ink(colour), size=size, **MIDDLE)
    return colours


def _label_axes(axes: Axes, drawn: DrawnTimeline, row: float, most: int) -> None:
    """Times below, the numbers of the ranks, or of every so many, beside the rows."""
    marks = ticks(*axes.get_xlim(), most)
    axes.set_xticks([time for time, _ in marks], [label for _, label in marks])
    axes.set_xlabel("time", labelpad=2)
    axes.tick_params(axis="x", pad=1.5, labelsize=SIZE)
    axes.set_ylabel("rank", labelpad=2)
    shown = range(0, len(drawn.ranks), _step(row))
    axes.set_yticks([y + 0.5 for y in shown], [str(drawn.ranks[y].rank) for y in shown])
    axes.tick_params(axis="y", length=0, pad=1.5, labelsize=SIZE if _step(row) == 1 else SMALL)
    axes.spines["left"].set_visible(False)


def _step(row: float) -> int:
    """Of how many rows of so many inches one is labelled, so that the labels have room."""
    return next(step for step in (1, 2, 4, 8) if row * step >= 0.11)


def _write_ends(
    sheet: Sheet, simulation: SimulationDocument, drawn: DrawnTimeline, right: float, row: float
) -> None:
    """At every row's end the share of the time at work, and the most bytes that the rank holds."""
    by_rank = {rank.rank: rank for rank in simulation.ranks}
    ranks = [by_rank[rank.rank] for rank in drawn.ranks]
    busy = [f"{rank.compute_s / simulation.window_s:.0%}" for rank in ranks]
    columns = [(_BUSY, "busy", busy)]
    if simulation.peak_memory_bytes:
        columns.append((_PEAK, "peak", [format_bytes(rank.peak_memory_bytes) for rank in ranks]))
    look: Any = {"size": SMALL, "ha": "right"}
    for beside, name, texts in columns:
        sheet.text(right + beside, sheet.down - 0.03, name, va="bottom", color=GREY, **look)
        for y in range(0, len(texts), _step(row)):
            down = sheet.down + (y + 0.5) * row
            sheet.text(right + beside, down, texts[y], va="center_baseline", **look)
