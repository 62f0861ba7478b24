"""A scaling as a picture: speed against devices, beside the ideal."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from partopt.documents.scaling import Scaling, ScalingRow
from partopt.report.basis import basis_text
from partopt.report.figures import speed_text, speeds, tokens_per_sample
from partopt.report.pictures.axes import Place, stack_labels
from partopt.report.pictures.lettering import fit
from partopt.report.pictures.look import GREY, SIZE, SMALL, Heading, Sheet, legend_height
from partopt.units import format_count

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LEFT, _RIGHT, _WIDTH, _HEIGHT, _LINE = 0.65, 0.35, 4.2, 2.4, 0.12  # inches
_COLOUR, _WIDEST = "#0072B2", 1.2  # inches of a shape
_IDEAL = "ideal, from the first"


def heading(scaling: Scaling) -> Heading:
    """From how many devices to how many, and the fastest that fits."""
    rows = scaling.rows
    fewest, most = min(row.devices for row in rows), max(row.devices for row in rows)
    fitting = [row for row in rows if row.fits]
    best = max(fitting, key=lambda row: row.samples_per_s, default=None)
    fastest = "nothing fits"
    if best is not None:
        fastest = f"{speed_text(best.samples_per_s, tokens_per_sample(best))} on {best.devices}"
    span = f"{fewest} to {most} devices" if fewest < most else f"{most} devices"
    parts = ("scaling", span, fastest)
    told = "; ".join(map(_describe, rows))
    basis = "" if scaling.estimated is None else f" {basis_text(scaling.estimated)}."
    return Heading(parts, f"Speed against devices. {told}.{basis}")


def draw(scaling: Scaling, heading: Heading) -> Sheet:
    """Both axes in logarithms: the ideal is a straight line."""
    rows = sorted(scaling.rows, key=lambda row: row.devices)
    handles = _handles(rows)
    whole = _LEFT + _WIDTH + _RIGHT
    numbers, shapes, on = _labels(rows)
    lines = 1 + max((line for line in on if line is not None), default=0)
    below = legend_height(handles, whole) + 0.45 + _LINE * lines
    sheet = Sheet(whole, below + _HEIGHT + 0.08, heading)
    axes = sheet.axes(_LEFT, below, _WIDTH, _HEIGHT)
    _draw_rows(axes, rows)
    _label_axes(axes, rows)
    for row, number, shape, line in zip(rows, numbers, shapes, on, strict=True):
        middle = _LEFT + _place(rows, row.devices)
        if number:
            sheet.text(middle, below - 0.06, number, size=SMALL, ha="center")
        if line is not None:
            top = below - 0.18 - _LINE * line
            sheet.text(middle, top, shape, size=SMALL, ha="center", color=GREY)
    for row, rate in zip(rows, speeds(rows)[1], strict=True):
        sheet.tell_point(axes, row.devices, max(rate, 1e-9), _describe(row))
    name = below - 0.2 - _LINE * lines
    sheet.text(_LEFT + _WIDTH / 2, name, "devices, and replicas of the stages", ha="center")
    sheet.legend(handles)
    return sheet


def _describe(row: ScalingRow) -> str:
    """A row in words."""
    devices = "1 device" if row.devices == 1 else f"{row.devices} devices"
    speed = speed_text(row.samples_per_s, tokens_per_sample(row))
    fits = "" if row.fits else ", does not fit"
    return f"{devices}: {speed}, {row.shape}, efficiency {row.efficiency:.0%}{fits}"


def _span(rows: list[ScalingRow]) -> tuple[float, float]:
    """The logarithms at the ends of the axis of devices."""
    low, high = (math.log2(row.devices) for row in (rows[0], rows[-1]))
    beside = max(0.3, 0.12 * (high - low))
    return low - beside, high + beside


def _place(rows: list[ScalingRow], devices: int) -> float:
    """Inches from the left end of the axis of devices."""
    low, high = _span(rows)
    return (math.log2(devices) - low) / (high - low) * _WIDTH


def _labels(rows: list[ScalingRow]) -> tuple[list[str], list[str], list[int | None]]:
    """The numbers of devices that have room, the shapes, and on which line each of these is."""
    middles = [_place(rows, row.devices) for row in rows]
    wanted = [Place(at, str(row.devices)) for at, row in zip(middles, rows, strict=True)]
    lines = stack_labels(wanted, SMALL)
    numbers = [place.text if line == 0 else "" for place, line in zip(wanted, lines, strict=True)]
    shapes = [
        fit(row.shape if number else f"{row.devices}: {row.shape}", _WIDEST, SMALL)
        for row, number in zip(rows, numbers, strict=True)
    ]
    places = [Place(at, shape) for at, shape in zip(middles, shapes, strict=True)]
    return numbers, shapes, stack_labels(places, SMALL)


def _draw_rows(axes: Axes, rows: list[ScalingRow]) -> None:
    devices = [row.devices for row in rows]
    heights = [max(rate, 1e-9) for rate in speeds(rows)[1]]
    ideal = heights[0] / devices[0]
    axes.plot(devices, [ideal * each for each in devices], color=GREY, lw=0.8, ls="--")
    axes.plot(devices, heights, color=_COLOUR, lw=1.2)
    for row, speed in zip(rows, heights, strict=True):
        full = _COLOUR if row.fits else "white"
        axes.plot(row.devices, speed, "o", ms=5, mfc=full, mec=_COLOUR, mew=1.0)


def _label_axes(axes: Axes, rows: list[ScalingRow]) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter

    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlim(*(2**end for end in _span(rows)))
    axes.xaxis.set_major_locator(FixedLocator([row.devices for row in rows]))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_formatter(NullFormatter())
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=12))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format_count(value)))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(which="minor", length=0)
    axes.set_ylabel(f"{speeds(rows)[0]}/s", fontsize=SIZE)


def _handles(rows: list[ScalingRow]) -> dict[str, Any]:
    from matplotlib.lines import Line2D

    look: Any = {"color": _COLOUR, "marker": "o", "markersize": 4, "linewidth": 1.2}
    handles: dict[str, Any] = {"best plan": Line2D([], [], **look)}
    if not all(row.fits for row in rows):
        handles["does not fit"] = Line2D([], [], **look | {"markerfacecolor": "white"})
    handles[_IDEAL] = Line2D([], [], color=GREY, linewidth=0.8, linestyle="--")
    return handles
