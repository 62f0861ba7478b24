"""A timeline as a figure for a paper: SVG, PDF or PNG, in the width of one column or of two."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from partopt import documents
from partopt.errors import PartoptError
from partopt.report.actions import COLOURS, DARKENED, WORDS, ticks
from partopt.report.page import COLUMN, DIGIT, GAP, LEFT, RIGHT, Page, number_size, page_of
from partopt.schedules.order import KINDS, A, U
from partopt.simulator.slots import exchanges
from partopt.simulator.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# corners of rectangles, float64 of shape (n, 4, 2): as matplotlib takes them, x in seconds and y in
# rows
Boxes = Any

FORMS = ("svg", "pdf", "png")
_VECTORS = 30_000  # more cells than that are drawn as pixels
_HATCHES = {"W": "/////", "R": "....."}
_IDLE = "#EFEFEF"
_FAINT = (1.0, 1.0, 1.0, 0.4)
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
) -> None:
    """Draw the timeline, or the seconds of it in `window`, and write it whole or not at all; the
    extension chooses the form.

    With `transfers` a line leads from rank to rank for each message. Raises PartoptError for other
    extensions, without matplotlib, over an existing file unless `force`, and where there is nothing
    or too much to draw.
    """
    documents.write_bytes(
        path,
        render(timeline, Path(path).suffix.removeprefix(".").lower(), window, transfers),
        force,
    )


def render(
    timeline: Timeline,
    form: str,
    window: tuple[float, float] | None = None,
    transfers: bool = False,
) -> bytes:
    """The figure in one of FORMS; the same timeline gives the same bytes."""
    if form not in FORMS:
        raise PartoptError(
            f"'.{form}' is no form of a figure", f"choose {', '.join('.' + each for each in FORMS)}"
        )
    try:
        import matplotlib
    except ImportError:
        raise PartoptError("a figure needs matplotlib", 'pip install "partopt[figures]"') from None
    page = page_of(timeline, window)
    with matplotlib.rc_context(_STYLE):
        content = io.BytesIO()
        _figure(timeline, page, transfers).savefig(
            content, format=form, dpi=300, metadata=_UNDATED[form]
        )
    return content.getvalue()


def _figure(timeline: Timeline, page: Page, transfers: bool) -> Figure:
    from matplotlib.figure import Figure

    legend = _legend(timeline, page)
    below = 0.32 + _LINE * (legend.rows + bool(legend.title))
    width, height = LEFT + page.width + RIGHT, 0.05 + page.height + below
    figure = Figure(figsize=(width, height))
    axes = figure.add_axes((LEFT / width, below / height, page.width / width, page.height / height))
    _draw_rows(axes, timeline, page)
    if transfers:
        _draw_transfers(axes, timeline, page)
    _label_axes(axes, page)
    _add_legend(figure, page, legend)
    return figure


def _draw_rows(axes: Axes, timeline: Timeline, page: Page) -> None:
    """The cells of all ranks, a collection for each colour, on bands of light grey, which is what
    is seen of idle time.
    """
    from matplotlib.collections import PolyCollection

    line = 0.3 if page.outlined else 0.0
    raster = page.cells > _VECTORS
    bands: list[Any] = [
        _boxes(np.array([page.begin]), np.array([page.end]), y + GAP, y + 1 - GAP)
        for y in range(len(page.ranks))
    ]
    axes.add_collection(PolyCollection(_joined(bands), facecolors=_IDLE, edgecolors="none"))
    for (kind, chunk), boxes in sorted(_cells(page).items()):
        colour, edge = _shade(KINDS[kind], chunk, page.chunks), "white" if line else "none"
        axes.add_collection(
            PolyCollection(
                boxes, facecolors=colour, edgecolors=edge, linewidths=line, rasterized=raster
            )
        )
        if line and KINDS[kind] in _HATCHES:
            hatch = _HATCHES[KINDS[kind]]
            axes.add_collection(
                PolyCollection(
                    boxes,
                    facecolors="none",
                    edgecolors=_FAINT,
                    linewidths=0,
                    hatch=hatch,
                    rasterized=raster,
                )
            )
    reduced = [
        _boxes(starts, ends, y + 1 - GAP - 0.2, y + 1 - GAP)
        for y, (starts, ends) in enumerate(exchanges(timeline, rank) for rank in page.ranks)
    ]
    axes.add_collection(
        PolyCollection(
            _joined(reduced), facecolors=COLOURS["A"], edgecolors="none", rasterized=raster
        )
    )
    _draw_numbers(axes, page)


def _cells(page: Page) -> dict[tuple[int, int], Boxes]:
    """By kind and chunk the cells, shape (n, 4, 2): x in seconds, y in rows.

    Of two joined actions each has half of the height.
    """
    found: dict[tuple[int, int], list[Boxes]] = {}
    for y, own in enumerate(page.rows.values()):
        top = y + np.where(own.pair == 2, 0.5, GAP)
        bottom = y + np.where(own.pair == 1, 0.5, 1 - GAP)
        for kind, chunk in np.unique(np.stack([own.kind, own.chunk]), axis=1).T.tolist():
            chosen = (own.kind == kind) & (own.chunk == chunk)
            found.setdefault((kind, chunk), []).append(
                _boxes(own.start[chosen], own.end[chosen], top[chosen], bottom[chosen])
            )
    return {key: _joined(boxes) for key, boxes in found.items()}


def _boxes(starts: NDArray[np.float64], ends: NDArray[np.float64], top: Any, bottom: Any) -> Boxes:
    top, bottom = np.broadcast_to(top, starts.shape), np.broadcast_to(bottom, starts.shape)
    corners = [(starts, top), (ends, top), (ends, bottom), (starts, bottom)]
    return np.stack([np.stack(corner, axis=-1) for corner in corners], axis=1)


def _joined(boxes: list[Boxes]) -> Boxes:
    return np.concatenate(boxes)


def _shade(letter: str, chunk: int, chunks: int) -> tuple[float, float, float]:
    """The colour of a kind of action: the later its chunk among those of the rank, the darker."""
    part = chunk / (chunks - 1) if chunks > 1 else 0.0
    light, dark = (
        np.array([int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)])
        for colour in (COLOURS[letter], DARKENED[letter])
    )
    red, green, blue = (light + part * (dark - light)).tolist()
    return red, green, blue


def _draw_numbers(axes: Axes, page: Page) -> None:
    size = number_size(page)
    if not size:
        return
    for y, own in enumerate(page.rows.values()):
        for kind, chunk, number, pair, start, end in zip(
            *(
                column.tolist()
                for column in (own.kind, own.chunk, own.microbatch, own.pair, own.start, own.end)
            ),
            strict=True,
        ):
            room = (end - start) * page.points_per_second
            if kind == U or room < DIGIT * size * len(str(number)):
                continue
            red, green, blue = _shade(KINDS[kind], chunk, page.chunks)
            ink = "black" if 0.3 * red + 0.59 * green + 0.11 * blue > 0.5 else "white"
            place = ((start + end) / 2, y + (0.5, 0.25 + GAP / 2, 0.75 - GAP / 2)[pair])
            axes.text(
                *place,
                str(number),
                size=size,
                color=ink,
                ha="center",
                va="center_baseline",
                clip_on=True,
            )


def _draw_transfers(axes: Axes, timeline: Timeline, page: Page) -> None:
    """A line for each message, from the middle of its sender's row at its start to that of its
    receiver's at its end.
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
            lines, colors="black", linewidths=0.35, alpha=0.6, rasterized=len(lines) > _VECTORS
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


class _Legend(NamedTuple):
    kinds: list[int]
    labels: list[str]
    title: str
    columns: int

    @property
    def rows(self) -> int:
        return -(-len(self.labels) // self.columns)


def _legend(timeline: Timeline, page: Page) -> _Legend:
    """What the colours mean, of those that can be seen, in as many columns as there is room for."""
    kinds = {kind for kind, _ in _cells(page)}
    for starts, ends in (exchanges(timeline, rank) for rank in page.ranks):
        seen = (
            (starts < page.end)
            & (ends > page.begin)
            & ((ends - starts) * page.points_per_second > 0.2)
        )
        kinds |= {A} if seen.any() else set()
    labels = [*(WORDS[KINDS[kind]] for kind in sorted(kinds)), "idle"]
    remarks = [page.note, "a rank's stages from light to dark" if page.chunks > 1 else ""]
    columns = min(len(labels), max(1, int(page.width / (0.4 + 0.052 * max(map(len, labels))))))
    if sum(0.4 + 0.052 * len(label) for label in labels) < page.width:
        columns = len(labels)
    return _Legend(sorted(kinds), labels, "; ".join(filter(None, remarks)), columns)


def _add_legend(figure: Figure, page: Page, legend: _Legend) -> None:
    """The legend, below the axis."""
    from matplotlib.legend_handler import HandlerTuple
    from matplotlib.patches import Patch

    swatches: list[Any] = [
        tuple(
            Patch(
                facecolor=_shade(KINDS[kind], chunk, page.chunks),
                edgecolor=_FAINT,
                linewidth=0,
                hatch=_HATCHES.get(KINDS[kind]),
            )
            for chunk in range(1 if kind in (A, U) else page.chunks)
        )
        for kind in legend.kinds
    ]
    figure.legend(
        [*swatches, (Patch(facecolor=_IDLE),)],
        legend.labels,
        title=legend.title or None,
        title_fontsize=6.5,
        handler_map={tuple: HandlerTuple(ndivide=None, pad=0.0)},
        loc="lower center",
        ncols=legend.columns,
        frameon=False,
        fontsize=6.5,
        handlelength=1.3,
        handletextpad=0.4,
        columnspacing=1.0,
        labelspacing=0.3,
        borderpad=0.0,
        borderaxespad=0.2,
    )
