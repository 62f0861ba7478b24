"""A timeline as a figure for a paper: SVG, PDF or PNG, in the width of one column or of two."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from partopt import documents
from partopt.errors import PartoptError
from partopt.report.actions import ticks
from partopt.report.cells import VECTORS, draw_rows
from partopt.report.legend import add_legend, legend_of
from partopt.report.page import COLUMN, LEFT, RIGHT, Page, page_of
from partopt.simulator.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMS = ("svg", "pdf", "png")
_LINE = 0.125  # inches of a line of the legend
_STYLE: Any = {
    "font.family": "sans-serif",
    "font.size": 7.0,
    "axes.linewidth": 0.5,
    "hatch.linewidth": 0.35,
    "svg.hashsalt": "partopt",
    "svg.fonttype": "none",
    "pdf.fonttype": 42,
}
_UNDATED: dict[str, dict[str, str | None]] = {
    "svg": {"Date": None, "Creator": "partopt"},
    "pdf": {"CreationDate": None, "Creator": "partopt", "Producer": None},
    "png": {"Software": None},
}


def save(
    timeline: Timeline,
    path: str,
    force: bool = False,
    window: tuple[float, float] | None = None,
    transfers: bool = False,
    estimated: str | None = None,
) -> None:
    """Draw the timeline, or the seconds of it in `window`, and write it whole or not at all.

    The extension of `path` chooses the format. With `transfers` a line leads from rank to rank for
    each message. `estimated` is the device that the times were estimated for, if they were; the
    legend says so. Raises PartoptError for other extensions, without matplotlib, over an existing
    file unless `force`, and where there is nothing or too much to draw.
    """
    documents.write_bytes(
        path,
        render(timeline, Path(path).suffix.removeprefix(".").lower(), window, transfers, estimated),
        force,
    )


def render(
    timeline: Timeline,
    form: str,
    window: tuple[float, float] | None = None,
    transfers: bool = False,
    estimated: str | None = None,
) -> bytes:
    """The figure in one of FORMS; the same timeline gives the same bytes."""
    if form not in FORMS:
        raise PartoptError(
            f"unsupported format '.{form}' of a figure",
            f"choose {', '.join('.' + each for each in FORMS)}",
            code="unsupported-format",
            form=form,
        )
    try:
        import matplotlib
    except ImportError:
        raise PartoptError(
            "a figure needs matplotlib",
            'pip install "partopt[figures]"',
            code="missing-package",
            package="matplotlib",
        ) from None
    page = page_of(timeline, window)
    with matplotlib.rc_context(_STYLE):
        content = io.BytesIO()
        _figure(timeline, page, transfers, estimated).savefig(
            content, format=form, dpi=300, metadata=_UNDATED[form]
        )
    return content.getvalue()


def _figure(timeline: Timeline, page: Page, transfers: bool, estimated: str | None) -> Figure:
    from matplotlib.figure import Figure

    legend = legend_of(timeline, page, estimated)
    below = 0.32 + _LINE * legend.rows
    width, height = LEFT + page.width + RIGHT, 0.05 + page.height + below
    figure = Figure(figsize=(width, height))
    axes = figure.add_axes((LEFT / width, below / height, page.width / width, page.height / height))
    draw_rows(axes, timeline, page)
    if transfers:
        _draw_transfers(axes, timeline, page)
    _label_axes(axes, page)
    add_legend(figure, page, legend)
    return figure


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
    axes.tick_params(length=2, width=0.5, pad=1.5)
    axes.tick_params(axis="y", length=0)
    for side in ("left", "right", "top"):
        axes.spines[side].set_visible(False)
