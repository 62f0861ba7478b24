"""A timeline as a figure for a paper: SVG, PDF or PNG, in the width of one column or of two."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from partopt.report.actions import ticks
from partopt.report.cells import VECTORS, draw_rows
from partopt.report.legend import add_legend, legend_of
from partopt.report.page import LEFT, RIGHT, Page, page_of
from partopt.report.pictures.look import COLUMN, SIZE, Heading, Picture, Sheet
from partopt.simulator.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LINE = 0.125  # inches of a line of the legend


def render(
    timeline: Timeline,
    heading: Heading,
    form: str,
    window: tuple[float, float] | None = None,
    transfers: bool = False,
    estimated: str | None = None,
) -> bytes:
    """The timeline, or the seconds of it in `window`, in one of the FORMS of `look`.

    The same timeline gives the same bytes. With `transfers` a line leads from rank to rank for each
    message. `estimated` is the device that the times were estimated for, if they were; the legend
    says so. Raises PartoptError for other forms, without matplotlib, and where there is nothing or
    too much to draw.
    """

    def draw(heading: Heading) -> Sheet:
        return _sheet(timeline, heading, page_of(timeline, window), transfers, estimated)

    return Picture(heading, draw).render(form)


def _sheet(
    timeline: Timeline, heading: Heading, page: Page, transfers: bool, estimated: str | None
) -> Sheet:
    legend = legend_of(timeline, page, estimated)
    below = 0.32 + _LINE * legend.rows
    sheet = Sheet(LEFT + page.width + RIGHT, 0.05 + page.height + below, heading)
    axes = sheet.axes(LEFT, below, page.width, page.height)
    draw_rows(axes, timeline, page)
    if transfers:
        _draw_transfers(axes, timeline, page)
    _label_axes(axes, page)
    add_legend(sheet.figure, page, legend)
    return sheet


def _draw_transfers(axes: Axes, timeline: Timeline, page: Page) -> None:
    """Draw a line for each message, from its sender's row to its receiver's.

    It leads from the middle of the former at its start to the middle of the latter at its end.
    """
    from matplotlib.collections import LineCollection

    rows = np.full(timeline.order.ranks, -1)
    rows[page.ranks] = np.arange(len(page.ranks))
    sent = timeline.transfers
    seen = (
        (rows[sent.source] >= 0)
        & (rows[sent.destination] >= 0)
        & (sent.end > page.begin)
        & (sent.start < page.end)
    )
    ends = [
        (sent.start[seen], rows[sent.source[seen]] + 0.5),
        (sent.end[seen], rows[sent.destination[seen]] + 0.5),
    ]
    lines: Any = np.stack([np.stack(end, axis=-1) for end in ends], axis=1)
    axes.add_collection(
        LineCollection(
            lines, colors="black", linewidths=0.35, alpha=0.6, rasterized=len(lines) > VECTORS
        )
    )


def _label_axes(axes: Axes, page: Page) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter

    unit, per_second = next(
        (pair for pair in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)) if page.end * pair[1] >= 2),
        ("ns", 1e9),
    )
    axes.set_xlim(page.begin, page.end)
    axes.set_ylim(len(page.ranks), 0)
    axes.set_xlabel(f"time ({unit})", labelpad=2)
    axes.set_ylabel("rank", labelpad=2)
    axes.xaxis.set_major_locator(
        FixedLocator(
            [time for time, _ in ticks(page.begin, page.end, 12 if page.width > COLUMN else 8)]
        )
    )
    axes.xaxis.set_major_formatter(
        FuncFormatter(lambda seconds, _: f"{round(seconds * per_second, 6):g}")
    )
    step = next(
        step for step in (1, 2, 4, 8, 16, 32) if page.height / len(page.ranks) * step >= 0.11
    )
    axes.set_yticks(
        [y + 0.5 for y in range(0, len(page.ranks), step)],
        [str(rank) for rank in page.ranks[::step]],
    )
    axes.tick_params(pad=1.5, labelsize=SIZE)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
