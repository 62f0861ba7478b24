"""A timeline as a figure for a paper: SVG, PDF or PNG, in the width of one column or of two."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from partopt.documents.plan import Plan
from partopt.report import memory_panel
from partopt.report.actions import ticks
from partopt.report.cells import VECTORS, draw_rows
from partopt.report.legend import add_legend, legend_of
from partopt.report.margins import ABOVE, draw_ends, draw_phases, write_beside
from partopt.report.memory_panel import MemoryTrace, draw_memory, label_memory, name_memory
from partopt.report.page import BREAK, LEFT, RIGHT, Page, pages_of
from partopt.report.phases import phases_of
from partopt.report.pictures.look import COLUMN, SIZE, SMALL, Heading, Picture, Sheet
from partopt.simulator.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LINE = 0.125  # inches of a line of the legend
_AXIS, _GAP = 0.32, 0.08  # inches of the time axis with its label, and above the memory
_EDGE = 0.07  # of the width of a part of a long timeline, in which no time is written


def render(
    plan: Plan,
    timeline: Timeline,
    heading: Heading,
    form: str,
    window: tuple[float, float] | None = None,
    transfers: bool = False,
) -> bytes:
    """The timeline of a plan, or the seconds of it in `window`, in one of the FORMS of `look`.

    The same timeline gives the same bytes. Beside each row are the share of the time at work and
    the most memory that the rank holds, below the rows is the memory of the fullest rank over time.
    A long timeline is shown in three parts. With `transfers` a line leads from rank to rank for
    each message. The legend says what times rest on that were not measured. Raises PartoptError for
    other forms, without matplotlib, and where there is nothing or too much to draw.
    """

    def draw(heading: Heading) -> Sheet:
        return _sheet(plan, timeline, heading, pages_of(timeline, window), transfers)

    return Picture(heading, draw).render(form)


def _sheet(
    plan: Plan, timeline: Timeline, heading: Heading, pages: list[Page], transfers: bool
) -> Sheet:
    trace = memory_panel.trace_of(timeline, plan, pages[0].ranks)
    parts = trace.parts if trace else []
    legend = legend_of(timeline, pages, parts, plan.profile.estimated)
    under = memory_panel.HEIGHT + _GAP if trace else 0.0
    below = _AXIS + _LINE * legend.rows
    width = sum(page.width for page in pages) + BREAK * (len(pages) - 1)
    height = pages[0].height
    sheet = Sheet(LEFT + width + RIGHT, ABOVE + height + under + below, heading)
    left = LEFT
    for page in pages:
        rows = sheet.axes(left, below + under, page.width, height)
        _draw_page(rows, timeline, page, transfers)
        lowest = rows
        if trace:
            lowest = sheet.axes(left, below, page.width, memory_panel.HEIGHT)
            _draw_trace(lowest, page, trace, page is pages[0])
            rows.tick_params(axis="x", bottom=False, labelbottom=False)
            rows.spines["bottom"].set_visible(False)
        _label_time(lowest, page, pages)
        if page is pages[0]:
            _label_ranks(rows, page)
        left += page.width + BREAK
    draw_ends(rows, page, timeline, plan, (pages[0].begin, pages[-1].end))
    if trace:
        write_beside(lowest, name_memory(trace))
    add_legend(sheet.figure, pages[0], legend)
    return sheet


def _draw_page(axes: Axes, timeline: Timeline, page: Page, transfers: bool) -> None:
    """The rows of a page, without labels."""
    axes.set_xlim(page.begin, page.end)
    axes.set_ylim(len(page.ranks), 0)
    draw_rows(axes, timeline, page)
    if transfers:
        _draw_transfers(axes, timeline, page)
    draw_phases(axes, page, phases_of(timeline))
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)


def _draw_trace(axes: Axes, page: Page, trace: MemoryTrace, first: bool) -> None:
    """The memory of a page; the first one has the scale."""
    axes.set_xlim(page.begin, page.end)
    draw_memory(axes, page, trace)
    axes.set_yticks([])
    axes.spines["left"].set_visible(first)
    if first:
        label_memory(axes, trace)


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


def _label_time(axes: Axes, page: Page, pages: list[Page]) -> None:
    """The time axis of a page; the middle one of several has the unit."""
    from matplotlib.ticker import FixedLocator, FuncFormatter

    unit, per_second = next(
        (pair for pair in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)) if pages[-1].end * pair[1] >= 2),
        ("ns", 1e9),
    )
    most = (12 if page.width > COLUMN else 8) if len(pages) == 1 else 5
    edge = _EDGE * (page.end - page.begin) if len(pages) > 1 else 0.0
    axes.xaxis.set_major_locator(
        FixedLocator([time for time, _ in ticks(page.begin + edge, page.end - edge, most)])
    )
    axes.xaxis.set_major_formatter(
        FuncFormatter(lambda seconds, _: f"{round(seconds * per_second, 6):g}")
    )
    if page is pages[len(pages) // 2]:
        axes.set_xlabel(f"time ({unit})", labelpad=2)
    axes.tick_params(axis="x", pad=1.5, labelsize=SIZE)


def _label_ranks(axes: Axes, page: Page) -> None:
    """The numbers of the ranks, as many as there is room for."""
    axes.set_ylabel("rank", labelpad=2)
    axes.set_yticks(
        [y + 0.5 for y in range(0, len(page.ranks), page.step)],
        [str(rank) for rank in page.ranks[:: page.step]],
    )
    axes.tick_params(axis="y", length=0, pad=1.5, labelsize=SIZE if page.step == 1 else SMALL)
