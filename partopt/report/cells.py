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
_BOXES = 500  # of a path
IDLE = "#EFEFEF"
FAINT = (1.0, 1.0, 1.0, 0.4)


def draw_rows(axes: Axes, timeline: Timeline, page: Page) -> None:
    """Draw the cells of all ranks, a collection for each colour.

    They lie on bands of light grey, which show through where a rank is idle.
    """
    begin, end = np.array([page.begin]), np.array([page.end])
    bands = [_boxes(begin, end, y + GAP, y + 1 - GAP) for y in range(len(page.ranks))]
    _draw_boxes(axes, _join(bands), facecolors=IDLE, edgecolors="none")
    for (kind, chunk), boxes in sorted(cells(page).items()):
        _draw_kind(axes, page, KINDS[kind], chunk, boxes)
    reduced = []
    for y, rank in enumerate(page.ranks):
        starts, ends = exchanges(timeline, rank)
        seen = (ends > page.begin) & (starts < page.end)
        reduced.append(_boxes(starts[seen], ends[seen], y + 1 - GAP - 0.2, y + 1 - GAP))
    raster = page.cells > VECTORS
    _draw_boxes(axes, _join(reduced), facecolors=COLOURS["A"], edgecolors="none", rasterized=raster)
    _draw_numbers(axes, page)


def _draw_kind(axes: Axes, page: Page, letter: str, chunk: int, boxes: Boxes) -> None:
    """The boxes of one kind of action and one chunk, and their hatch."""
    line, raster = (0.3 if page.outlined else 0.0), page.cells > VECTORS
    _draw_boxes(
        axes,
        boxes,
        facecolors=shade(letter, chunk, page.chunks),
        edgecolors="white" if line else "none",
        linewidths=line,
        rasterized=raster,
    )
    if line and letter in HATCHES:
        _draw_boxes(
            axes,
            boxes,
            facecolors="none",
            edgecolors=FAINT,
            linewidths=0,
            hatch=HATCHES[letter],
            rasterized=raster,
        )


def _draw_boxes(axes: Axes, boxes: Boxes, **settings: Any) -> None:
    """Boxes of one look, many to a path: an SVG then has a fifth of the bytes."""
    from matplotlib.collections import PathCollection
    from matplotlib.path import Path

    codes = np.array([Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY])
    closed = np.concatenate([boxes, boxes[:, :1]], axis=1)
    paths = [
        Path(part.reshape(-1, 2), np.tile(codes, len(part)))
        for part in np.split(closed, range(_BOXES, len(closed), _BOXES))
        if len(part)
    ]
    axes.add_collection(PathCollection(paths, **settings), autolim=False)


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
    """The microbatch of each cell, in the middle of what is seen of it."""
    size = number_size(page)
    if not size:
        return
    for y, own in enumerate(page.rows.values()):
        starts, ends = np.maximum(own.start, page.begin), np.minimum(own.end, page.end)
        for kind, chunk, number, pair, start, end in zip(
            *(
                column.tolist()
                for column in (own.kind, own.chunk, own.microbatch, own.pair, starts, ends)
            ),
            strict=True,
        ):
            room = (end - start) * page.points_per_second
            if kind == U or room < DIGIT * size * len(str(number)):
                continue
            red, green, blue = shade(KINDS[kind], chunk, page.chunks)
            ink = "black" if 0.3 * red + 0.59 * green + 0.11 * blue > 0.5 else "white"
            place = ((start + end) / 2, y + (0.5, 0.25 + GAP / 2, 0.75 - GAP / 2)[pair])
            axes.text(*place, str(number), size=size, color=ink, ha="center", va="center_baseline")
