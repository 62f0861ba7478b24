"""Numbers of devices as a picture: their speed, and what a run takes on them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from partopt.documents.tables import Scaling, ScalingRow
from partopt.report.layout_words import layout_name
from partopt.report.phrases import count_text, run_text, speed_text, speeds, tokens_per_sample
from partopt.report.pictures.sheet import (
    BLUE,
    GREY,
    LEFT,
    SIZE,
    SMALL,
    Heading,
    Picture,
    Sheet,
    axis_start,
    fit,
    stack_labels,
    ticks,
)
from partopt.units import format_count

# inches: of the axes, right of them, between them, of a line of shapes, of the widest shape
_WIDTH, _BESIDE, _GAP, _SHAPES, _WIDEST = 4.2, 0.35, 0.14, 0.12, 1.2
_SPEED, _RUN = 2.4, 1.2  # inches of heights: of the speed's axes, of the run's
_POINT: Any = {"marker": "o", "ms": 5, "mec": BLUE, "mew": 1.0, "linestyle": "none"}
_CHOSEN: Any = {"marker": "o", "ms": 9, "mfc": "none", "mec": "black", "mew": 0.8, "ls": "none"}


def picture(scaling: Scaling) -> Picture:
    """Speed against devices, beside the ideal, which in logarithms is a straight line.

    With tokens below it what the run costs, or its hours of devices; the chosen size has a ring.
    """
    rows = sorted(scaling.rows, key=lambda row: row.devices)
    told = [_describe(row) for row in scaling.rows]
    best = max((row for row in rows if row.fits), key=lambda row: row.samples_per_s, default=None)
    parts = ["scaling", _span(rows), "nothing fits"]
    if best is not None:
        speed = speed_text(best.samples_per_s, tokens_per_sample(best))
        parts[-1] = f"{speed} on {best.devices:,}"
        if lacking := [f"{row.devices:,}" for row in rows if not row.fits]:
            parts.append(f"does not fit on {' '.join(lacking)}")
    if scaling.tokens:
        parts.append(f"{format_count(scaling.tokens)} tokens")
    parts += [
        f"best {row.devices:,} devices: {run_text(row.run)}"
        for row in rows
        if row.devices == scaling.chosen and row.run
    ]
    about = f"Speed{' and a run' if scaling.tokens else ''} against devices. {'; '.join(told)}."
    heading = Heading.of(parts, about, scaling.estimated)
    return Picture(heading, partial(_draw, rows, scaling.chosen or None))


def _span(rows: Sequence[ScalingRow]) -> str:
    few, many = rows[0].devices, rows[-1].devices
    return f"{few:,} to {many:,} devices" if few < many else count_text(many, "device")


def _describe(row: ScalingRow) -> str:
    """A row in words."""
    parts = [
        speed_text(row.samples_per_s, tokens_per_sample(row)),
        _shape(row),
        f"efficiency {row.efficiency:.0%}",
        *([run_text(row.run)] if row.run else []),
        *([] if row.fits else ["does not fit"]),
    ]
    return f"{count_text(row.devices, 'device')}: {', '.join(parts)}"


def _shape(row: ScalingRow) -> str:
    """The layout of a transformer, or the replicas of the stages."""
    return layout_name(row.layout) if row.layout else row.shape


def _draw(rows: Sequence[ScalingRow], chosen: int | None, heading: Heading) -> Sheet:
    sheet = Sheet(heading, LEFT + _WIDTH + _BESIDE)
    sheet.down += 0.08
    unit, rates = speeds(rows)
    devices, heights = [row.devices for row in rows], [max(rate, 1e-9) for rate in rates]
    axes = sheet.panel(_SPEED, _WIDTH)
    ideal = heights[0] / devices[0]
    axes.plot(devices, [ideal * count for count in devices], color=GREY, lw=0.8, ls="--")
    _draw_rows(sheet, axes, rows, heights, chosen)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=12))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format_count(value)))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_ylabel(f"{unit}/s (log scale)", fontsize=SIZE)
    if all(row.run for row in rows):
        sheet.down += _GAP
        _draw_runs(sheet, rows, chosen)
    _name_rows(sheet, rows)
    mark: Any = {"color": BLUE, "marker": "o", "markersize": 4, "linewidth": 1.2}
    handles: dict[str, Any] = {"best plan": Line2D([], [], **mark)}
    if not all(row.fits for row in rows):
        handles["does not fit"] = Line2D([], [], **mark | {"markerfacecolor": "white"})
    handles["ideal, from the first"] = Line2D([], [], color=GREY, linewidth=0.8, linestyle="--")
    if chosen in devices:
        handles["best for the days or the budget"] = Line2D([], [], **_CHOSEN)
    sheet.legend(handles)
    return sheet


def _limits(rows: Sequence[ScalingRow]) -> tuple[float, float]:
    """Where the axis of devices begins and ends, as powers of two."""
    low, high = math.log2(rows[0].devices), math.log2(rows[-1].devices)
    beside = max(0.3, 0.12 * (high - low))
    return low - beside, high + beside


def _middles(rows: Sequence[ScalingRow]) -> list[float]:
    """Inches of the rows from the left of the axes."""
    low, high = _limits(rows)
    return [(math.log2(row.devices) - low) / (high - low) * _WIDTH for row in rows]


def _draw_rows(
    sheet: Sheet,
    axes: Axes,
    rows: Sequence[ScalingRow],
    heights: Sequence[float],
    chosen: int | None,
) -> None:
    """A line through points of these heights, hollow where nothing fits."""
    axes.plot([row.devices for row in rows], heights, color=BLUE, lw=1.2)
    for row, height in zip(rows, heights, strict=True):
        axes.plot(row.devices, height, mfc=BLUE if row.fits else "white", **_POINT)
        if row.devices == chosen:
            axes.plot(row.devices, height, **_CHOSEN)
        sheet.add_point_tooltip(axes, row.devices, height, _describe(row))
    low, high = _limits(rows)
    axes.set_xscale("log", base=2)
    axes.set_xlim(2**low, 2**high)
    axes.set_xticks([row.devices for row in rows], [""] * len(rows))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(which="minor", length=0)


def _draw_runs(sheet: Sheet, rows: Sequence[ScalingRow], chosen: int | None) -> None:
    """What the run costs, else its hours of devices; above the points the days that it takes."""
    runs = [row.run for row in rows if row.run]
    costs = [run.cost for run in runs if run.cost]
    priced = len(costs) == len(runs)
    heights = costs if priced else [run.device_hours for run in runs]
    begin = axis_start(min(heights), 1.05 * max(heights))
    end = max(heights) + 0.35 * (max(heights) - begin)
    top, axes = sheet.down, sheet.panel(_RUN, _WIDTH)
    _draw_rows(sheet, axes, rows, heights, chosen)
    axes.set_ylim(begin, end)
    ticks(axes.yaxis, f"{'cost' if priced else 'GPU-hours'}, and days", 4, format_count)
    days = [f"{format_count(run.days)} d" for run in runs]
    places = list(zip(_middles(rows), days, strict=True))
    lines = stack_labels(places, SMALL)
    look: Any = {"size": SMALL, "ha": "center", "va": "bottom"}
    look["bbox"] = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}  # over lines
    for (middle, text), height, line in zip(places, heights, lines, strict=True):
        if line == 0:
            down = top + _RUN * (end - height) / (end - begin) - 0.09
            sheet.text(LEFT + middle, down, text, **look)


def _name_rows(sheet: Sheet, rows: Sequence[ScalingRow]) -> None:
    """Numbers of devices that have room, and below them, on several lines, the shapes."""
    middles = _middles(rows)
    numbers = [(at, str(row.devices)) for at, row in zip(middles, rows, strict=True)]
    shown = [line == 0 for line in stack_labels(numbers, SMALL)]
    for (middle, number), has_room in zip(numbers, shown, strict=True):
        if has_room:
            sheet.text(LEFT + middle, sheet.down + 0.06, number, size=SMALL, ha="center")
    forms = [
        _shape(row) if number else f"{row.devices}: {_shape(row)}"
        for row, number in zip(rows, shown, strict=True)
    ]
    shapes = [(at, fit(form, _WIDEST, SMALL)) for at, form in zip(middles, forms, strict=True)]
    lines = stack_labels(shapes, SMALL)
    look: Any = {"size": SMALL, "ha": "center", "color": GREY}
    for (middle, shape), line in zip(shapes, lines, strict=True):
        if line is not None:
            sheet.text(LEFT + middle, sheet.down + 0.18 + _SHAPES * line, shape, **look)
    sheet.down += 0.2 + _SHAPES * (1 + max((line for line in lines if line), default=0))
    name = f"devices (log scale), and {'layouts' if rows[0].layout else 'replicas of the stages'}"
    sheet.text(LEFT + _WIDTH / 2, sheet.down, name, ha="center")
    sheet.down += 0.25
