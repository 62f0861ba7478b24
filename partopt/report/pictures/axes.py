"""What the axes of several pictures need: ticks of times and bytes, bars, rows of labels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from partopt.report.actions import tick_label
from partopt.report.pictures.lettering import text_width
from partopt.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Floats = NDArray[Any]
_ROWS = 3  # lines of labels above each other
_APART = 0.04  # inches between labels


class Place(NamedTuple):
    """A label, and where its middle is to be, in inches."""

    middle: float
    text: str


def seconds_axis(axes: Axes, label: str, most: int = 4) -> None:
    """At most `most` intervals in seconds on the vertical axis, without signs."""
    _ticks(axes, label, most, lambda value: tick_label(abs(value)))


def bytes_axis(axes: Axes, label: str, most: int = 4) -> None:
    """At most `most` intervals in bytes on the vertical axis, without signs."""
    _ticks(axes, label, most, lambda value: format_bytes(abs(value)))


def _ticks(axes: Axes, label: str, most: int, form: Callable[[float], str]) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.yaxis.set_major_locator(MaxNLocator(most))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: form(value)))
    axes.set_ylabel(label)


def draw_bars(
    axes: Axes, places: Floats, heights: Floats, width: Any, bottom: Any = 0.0, **look: Any
) -> None:
    """Bars whose middles are at `places`; as one shape, for one by one hundreds are a megabyte."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    left, right, low = places - width / 2, places + width / 2, np.broadcast_to(bottom, places.shape)
    corners = [(left, low), (right, low), (right, low + heights), (left, low + heights)]
    boxes: Any = np.stack([np.stack(corner, axis=-1) for corner in corners], axis=1)
    closed = np.concatenate([boxes, boxes[:, :1]], axis=1)
    axes.add_patch(PathPatch(Path.make_compound_path_from_polys(closed), **look))
    axes.autoscale_view()


def draw_levels(axes: Axes, places: Floats, heights: Floats, width: float, **look: Any) -> None:
    """A line across each of `places`, as one line with gaps."""
    gap = np.full(places.shape, np.nan)
    across = np.stack([places - width / 2, places + width / 2, gap], axis=-1).ravel()
    axes.plot(across, np.repeat(heights, 3), **look)


def stack_labels(places: Sequence[Place], size: float) -> list[int | None]:
    """The line of each label, from 0, such that none overlaps; None where it has no room."""
    ends = [float("-inf")] * _ROWS
    rows: list[int | None] = []
    for place in places:
        half = text_width(place.text, size) / 2
        free = [row for row, end in enumerate(ends) if end + _APART <= place.middle - half]
        rows.append(free[0] if free else None)
        if free:
            ends[free[0]] = place.middle + half
    return rows
