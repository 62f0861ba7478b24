"""The cells of a figure: boxes of each kind of action on the rows of their ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from partopt.report.actions import COLOURS, DARKENED
from partopt.report.page import DIGIT, GAP, Page, number_size
from partopt.schedules.order import KINDS, U
from partopt.simulator.slots import exchanges
from partopt.simulator.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# corners of rectangles as matplotlib takes them, float64 of shape (n, 4, 2):
# x in seconds and y in rows
Boxes = Any

VECTORS = 30_000  # more cells than that are drawn as pixels
HATCHES = {"W": "/////", "R": "....."}
IDLE = "#EFEFEF"
FAINT = (1.0, 1.0, 1.0, 0.4)


def draw_rows(axes: Axes, timeline: Timeline, page: Page) -> None:
    """Draw the cells of all ranks, a collection for each colour.

    They lie on bands of light grey, which show through where a rank is idle.
    """
    from matplotlib.collections import PolyCollection

    begin, end = np.array([page.begin]), np.array([page.end])
    bands = [_boxes(begin, end, y + GAP, y + 1 - GAP) for y in range(len(page.ranks))]
    axes.add_collection(PolyCollection(_join(bands), facecolors=IDLE, edgecolors="none"))
    for (kind, chunk), boxes in sorted(cells(page).items()):
        _draw_kind(axes, page, KINDS[kind], chunk, boxes)
    reduced = [
        _boxes(starts, ends, y + 1 - GAP - 0.2, y + 1 - GAP)
        for y, (starts, ends) in enumerate(exchanges(timeline, rank) for rank in page.ranks)
    ]
    axes.add_collection(
        PolyCollection(
            _join(reduced),
            facecolors=COLOURS["A"],
            edgecolors="none",
            rasterized=page.cells > VECTORS,
        )
    )
    _draw_numbers(axes, page)


def _draw_kind(axes: Axes, page: Page, letter: str, chunk: int, boxes: Boxes) -> None:
    """The boxes of one kind of action and one chunk, and their hatch."""
    from matplotlib.collections import PolyCollection

    line, raster = (0.3 if page.outlined else 0.0), page.cells > VECTORS
    axes.add_collection(
        PolyCollection(
            boxes,
            facecolors=shade(letter, chunk, page.chunks),
            edgecolors="white" if line else "none",
            linewidths=line,
            rasterized=raster,
        )
    )
    if line and letter in HATCHES:
        axes.add_collection(
            PolyCollection(
                boxes,
                facecolors="none",
                edgecolors=FAINT,
                linewidths=0,
                hatch=HATCHES[letter],
                rasterized=raster,
            )
        )


def cells(page: Page) -> dict[tuple[int, int], Boxes]:
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
    return {key: _join(boxes) for key, boxes in found.items()}


def _join(boxes: list[Boxes]) -> Boxes:
    return np.concatenate(boxes)


def _boxes(starts: NDArray[np.float64], ends: NDArray[np.float64], top: Any, bottom: Any) -> Boxes:
    top, bottom = np.broadcast_to(top, starts.shape), np.broadcast_to(bottom, starts.shape)
    corners = [(starts, top), (ends, top), (ends, bottom), (starts, bottom)]
    return np.stack([np.stack(corner, axis=-1) for corner in corners], axis=1)


def shade(letter: str, chunk: int, chunks: int) -> tuple[float, float, float]:
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
            red, green, blue = shade(KINDS[kind], chunk, page.chunks)
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
