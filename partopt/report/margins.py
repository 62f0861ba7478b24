"""What stands beside the rows of a timeline and above them: shares, peaks, fill and drain."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from partopt.documents.plan import Plan
from partopt.report.actions import tick_label
from partopt.report.page import POINTS, Page
from partopt.report.phases import Phases
from partopt.report.pictures.look import GREY, SMALL
from partopt.schedules.order import A
from partopt.simulator.memory import peak_memory_bytes
from partopt.simulator.slots import slots
from partopt.simulator.timeline import Timeline
from partopt.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ABOVE = 0.17  # inches above the rows
_BUSY, _PEAK = 24, 56  # points from the rows to the right ends of two columns
_LIFT, _TICK = 2.5, 2.0  # points of a bracket above the rows, and of its ends


def draw_ends(
    axes: Axes, page: Page, timeline: Timeline, plan: Plan, window: tuple[float, float]
) -> None:
    """At each row's end the share of `window` at work, and the most bytes that the rank holds."""
    peaks = peak_memory_bytes(timeline.order, plan)
    columns = [(_BUSY, "busy", [f"{_busy(timeline, r, window):.0%}" for r in page.ranks])]
    if peaks.any():
        columns.append((_PEAK, "peak", [format_bytes(peaks[r]) for r in page.ranks]))
    for right, heading, texts in columns:
        _write(axes, right, len(page.ranks), heading, above=_LIFT)
        for y in range(0, len(page.ranks), page.step):
            _write(axes, right, len(page.ranks) - y - 0.5, texts[y])


def _busy(timeline: Timeline, rank: int, window: tuple[float, float]) -> float:
    """The share of the window for which a rank acts; of two actions at once one counts."""
    own, (begin, end) = slots(timeline, rank), window
    acts = (own.kind != A) & (own.pair != 2)
    inside = np.minimum(own.end[acts], end) - np.maximum(own.start[acts], begin)
    return float(np.maximum(inside, 0).sum()) / (end - begin)


def _write(axes: Axes, right: float, row: float, text: str, above: float | None = None) -> None:
    """A text that ends `right` points beside the rows, `row` rows from below."""
    rows = axes.get_ylim()[0]
    axes.annotate(
        text,
        (1, row / rows),
        xycoords="axes fraction",
        xytext=(right, above or 0),
        textcoords="offset points",
        ha="right",
        va="center_baseline" if above is None else "bottom",
        size=SMALL,
        color="black" if above is None else GREY,
    )


def draw_phases(axes: Axes, page: Page, phases: Phases) -> None:
    """A bracket with its seconds above the time in which the pipeline fills, and drains."""
    for name, begin, end, side in _brackets(page, phases):
        height = page.height * POINTS
        low, high = 1 + _LIFT / height, 1 + (_LIFT + _TICK) / height
        axes.plot(
            [begin, begin, end, end],
            [low, high, high, low],
            transform=axes.get_xaxis_transform(),
            color=GREY,
            linewidth=0.5,
            clip_on=False,
        )
        axes.annotate(
            name,
            (begin if side == "left" else end, high),
            xycoords=axes.get_xaxis_transform(),
            xytext=(0, 1),
            textcoords="offset points",
            ha=side,
            va="bottom",
            size=SMALL,
            color=GREY,
        )


def _brackets(page: Page, phases: Phases) -> Iterator[tuple[str, float, float, str]]:
    """The name, begin, end and side of the text of each bracket on the page."""
    fill, drain = phases.fill_end, phases.end - phases.drain_begin
    spans = [
        (f"fill {tick_label(fill)}", 0.0, phases.fill_end, "left"),
        (f"drain {tick_label(drain)}", phases.drain_begin, phases.end, "right"),
    ]
    for name, begin, end, side in spans if phases.fill_end <= phases.drain_begin else spans[:1]:
        left, right = max(begin, page.begin), min(end, page.end)
        if (right - left) * page.points_per_second > 1:
            yield name, left, right, side


def write_beside(axes: Axes, lines: Sequence[tuple[str, str]]) -> None:
    """Lines of text with their colours, on the right of axes, from their top down."""
    for number, (text, colour) in enumerate(lines):
        axes.annotate(
            text,
            (1, 1),
            xycoords="axes fraction",
            xytext=(5, -1 - 1.25 * SMALL * number),
            textcoords="offset points",
            va="top",
            size=SMALL,
            color=colour,
        )
