"""Several plans of one problem as a picture: speed against memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from partopt.documents.comparison import Comparison, ComparisonRow
from partopt.documents.group_comparison import GroupComparison, GroupRow
from partopt.documents.plan import Plan
from partopt.report.basis import basis_lines, basis_of_several
from partopt.report.figures import speeds
from partopt.report.pictures.lettering import fit
from partopt.report.pictures.look import GREY, SMALL, Heading, Sheet, legend_height
from partopt.units import format_bytes, format_count, format_rate

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LEFT, WIDTH, NAMES, RIGHT = 0.65, 3.9, 2.45, 0.1  # inches: beside axes, of axes, of names
_LINE, _LOWEST, _ABOVE, _BELOW = 0.13, 1.9, 0.14, 0.33  # inches of a name, of axes, around axes
_COLOUR, _FAR = "#0072B2", 8  # times the most memory: a limit above that is not drawn


class Point(NamedTuple):
    """A plan as a point; `speed` is in `unit`, samples or tokens, a second."""

    name: str
    speed: float
    unit: str
    memory_bytes: int
    fits: bool


def points_of(comparison: Comparison | GroupComparison) -> list[Point]:
    """The rows of a comparison, of planners or of profiles."""
    rows: Sequence[ComparisonRow | GroupRow] = comparison.rows
    unit, rates = speeds(rows)
    return [
        Point(
            f"{row.planner if isinstance(row, ComparisonRow) else row.profile} {row.shape}",
            rate,
            unit,
            row.peak_memory_bytes,
            row.fits,
        )
        for row, rate in zip(rows, rates, strict=True)
    ]


def points_of_plans(plans: Sequence[Plan]) -> list[Point]:
    """The plans, by their schedules where these differ, else by their planners."""
    unit, rates = speeds([plan.predicted for plan in plans])
    by_schedule = len({plan.schedule for plan in plans}) > 1
    return [
        Point(
            f"{plan.schedule if by_schedule else plan.planner} {plan.shape}",
            rate,
            unit,
            plan.peak_memory_bytes,
            plan.fits,
        )
        for plan, rate in zip(plans, rates, strict=True)
    ]


def heading(comparison: Comparison | GroupComparison) -> Heading:
    """The model, the schedule, the devices, the microbatch, and the fastest plan that fits."""
    points = points_of(comparison)
    parts = [comparison.model]
    if isinstance(comparison, Comparison):
        parts += [comparison.schedule, f"microbatch {comparison.microbatch_size}"]
        basis = basis_lines(comparison.estimated)
    else:
        basis = basis_of_several([(row.profile, row.estimated) for row in comparison.rows])
    parts.append(f"{comparison.topology.cluster.devices} devices")
    fitting = [point for point in points if point.fits]
    best = max(fitting, key=lambda point: point.speed, default=None)
    fastest = "nothing fits"
    if best is not None:
        fastest = f"fastest {best.name} at {format_rate(best.speed, best.unit)}"
    told = "; ".join(map(_describe, points))
    rests = "; ".join(text for _, text in basis)
    about = f"Speed against memory of plans. {told}{f'; {rests}' if rests else ''}."
    return Heading((*parts, fastest), about)


def _describe(point: Point) -> str:
    """A point in words."""
    fits = "" if point.fits else ", does not fit"
    speed = format_rate(point.speed, point.unit)
    return f"{point.name}: {speed}, {format_bytes(point.memory_bytes)}{fits}"


def draw(comparison: Comparison | GroupComparison, heading: Heading) -> Sheet:
    """Speed against bytes on the fullest device, with the limit of a device as a line."""
    points, whole = points_of(comparison), LEFT + WIDTH + NAMES + RIGHT
    handles = handles_of(points)
    legend = legend_height(handles, whole)
    sheet = Sheet(whole, legend + height_of(points), heading)
    draw_points(sheet, legend, points, comparison.topology.device.memory_bytes)
    sheet.legend(handles)
    return sheet


def height_of(points: Sequence[Point]) -> float:
    """Inches of the panel of the points."""
    return _BELOW + max(_LOWEST, _LINE * len(points)) + _ABOVE


def draw_points(sheet: Sheet, bottom: float, points: Sequence[Point], limit: int | None) -> None:
    """The panel of `height_of` inches at `bottom` inches of the sheet."""
    height = height_of(points) - _BELOW - _ABOVE
    axes = sheet.axes(LEFT, bottom + _BELOW, WIDTH, height)
    most = max(point.memory_bytes for point in points)
    near = limit is not None and limit <= _FAR * max(most, 1)
    right = max(most, limit if limit is not None and near else 1) * 1.06
    top = max(max(point.speed for point in points), 1e-9) * 1.08
    axes.set_xlim(0, right)
    axes.set_ylim(0, top)
    axes.patch.set_visible(False)  # lines to the names lie below
    front = pareto(points)
    if front:
        _draw_front(axes, front, limit if limit is not None and near else right)
    for point in points:
        full = _COLOUR if point.fits else "white"
        place = point.memory_bytes, point.speed
        axes.plot(*place, "o", ms=5, mfc=full, mec=_COLOUR, mew=1.0, clip_on=False, zorder=4)
    if limit is not None:
        _draw_limit(axes, height, limit, near, right)
    _label_axes(axes, points[0].unit)
    for point in points:
        sheet.tell_point(axes, point.memory_bytes, point.speed, _describe(point))
    _draw_names(sheet, bottom + _BELOW, height, [(p, p.speed / top) for p in points], right)


def _draw_front(axes: Axes, front: Sequence[Point], end: float) -> None:
    """A step at each point of the front, on to the end."""
    memory = [float(point.memory_bytes) for point in front]
    heights = [point.speed for point in front]
    axes.step([*memory, end], [*heights, *heights[-1:]], where="post", color=GREY, lw=0.8)


def pareto(points: Sequence[Point]) -> list[Point]:
    """The points that fit and of which none is as fast with less memory, by memory."""
    front: list[Point] = []
    for point in sorted(points, key=lambda point: (point.memory_bytes, -point.speed)):
        if point.fits and (not front or point.speed > front[-1].speed):
            front.append(point)
    return front


def _draw_limit(axes: Axes, height: float, limit: int, near: bool, right: float) -> None:
    text = f"limit {format_bytes(limit)}" + ("" if near else ", far to the right")
    if near:
        axes.axvline(limit, color="black", lw=0.8, ls="--")
    place = min(limit, right)
    side = "right" if place > right / 2 else "left"
    above = 1 + 0.02 / height
    axes.text(
        place, above, text, size=SMALL, ha=side, va="bottom", transform=axes.get_xaxis_transform()
    )


def _label_axes(axes: Axes, unit: str) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_bytes(value)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format_count(value)))
    axes.set_xlabel("memory of the fullest device", labelpad=2)
    axes.set_ylabel(f"{unit}/s")
    axes.yaxis.set_label_coords(-0.5 / WIDTH, 0.5)


def _draw_names(
    sheet: Sheet, bottom: float, height: float, points: list[tuple[Point, float]], right: float
) -> None:
    """The names beside the axes, from the fastest down, each with a line to its point."""
    from matplotlib.lines import Line2D

    ordered = sorted(points, key=lambda each: -each[1])
    tops = _spread([bottom + height * share for _, share in ordered], bottom, bottom + height)
    left = LEFT + WIDTH + 0.3
    for (point, share), middle in zip(ordered, tops, strict=True):
        name = fit(point.name, NAMES - 0.3, SMALL)
        sheet.text(left, middle, name, size=SMALL, va="center_baseline")
        ends = [LEFT + WIDTH * point.memory_bytes / right, LEFT + WIDTH + 0.08, left - 0.03]
        heights = [bottom + height * share] * 2 + [middle]
        xs, ys = np.array(ends) / sheet.width, np.array(heights) / sheet.height
        sheet.figure.add_artist(Line2D(xs, ys, color=GREY, linewidth=0.3, zorder=0))


def _spread(wanted: list[float], low: float, high: float) -> list[float]:
    """Places from high to low near the `wanted` ones, a line apart, between `low` and `high`."""
    places: list[float] = []
    for at, want in enumerate(wanted):
        ceiling = places[-1] - _LINE if places else high
        floor = low + _LINE * (len(wanted) - 1 - at)
        places.append(min(ceiling, max(floor, want)))
    return places


def handles_of(points: Sequence[Point]) -> dict[str, Any]:
    """What the marks mean."""
    from matplotlib.lines import Line2D

    look: Any = {"marker": "o", "markersize": 4, "linewidth": 0, "markeredgecolor": _COLOUR}
    handles: dict[str, Any] = {}
    if any(point.fits for point in points):
        handles["plan that fits"] = Line2D([], [], color=_COLOUR, **look)
        handles["no other is as fast with less"] = Line2D([], [], color=GREY, linewidth=0.8)
    if not all(point.fits for point in points):
        handles["does not fit"] = Line2D([], [], color="white", **look)
    return handles
