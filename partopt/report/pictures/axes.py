"""What the axes of several pictures need: ticks of times and bytes, labels beside each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from partopt.report.actions import tick_label
from partopt.report.pictures.lettering import text_width
from partopt.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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
