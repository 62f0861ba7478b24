"""Tables as pictures: speed against memory, predicted beside measured."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from partopt.documents.plan import Plan
from partopt.documents.tables import Comparison, ComparisonRow
from partopt.documents.training_run import Run
from partopt.documents.transformer import LayoutBeside
from partopt.report.layout_words import layout_name
from partopt.report.looks import COLOURS
from partopt.report.phrases import (
    basis_lines,
    speeds,
)
from partopt.report.pictures.sheet import (
    BLUE,
    GREY,
    LEFT,
    PANEL,
    RIGHT,
    SMALL,
    Heading,
    Picture,
    Sheet,
    axis_start,
    bytes_axis,
    draw_bars,
    fit,
    near_limit,
    seconds_axis,
    ticks,
)
from partopt.report.run_text import error
from partopt.report.transformer_text import layout_table
from partopt.units import format_bytes, format_count, format_rate, format_seconds

# inches: of axes, of the names beside them, of a name; the lowest axes of points
_WIDTH, _NAMES, _LINE, _LOWEST = 3.9, 2.45, 0.13, 1.9
_PART, _GAP, _BAR, _WHOLE = 0.55, 0.1, 0.16, 1.5  # inches of a run: panels, bars, names
# of a rank: what it is called, and its colour
_PARTS = {
    "forward_s": ("forward", COLOURS["F"][0]),
    "backward_s": ("backward", COLOURS["B"][0]),
    "transfer_s": ("transfer", BLUE),
    "allreduce_s": ("all-reduce", COLOURS["A"][0]),
    "idle_s": ("idle", "#BBBBBB"),
    "peak_memory_bytes": ("memory", "#A8E6CF"),
}


class PlanPoint(NamedTuple):
    """A plan as a point; `speed` is in `unit`, samples or tokens, a second."""

    name: str
    speed: float
    unit: str
    memory_bytes: int
    fits: bool

    def __str__(self) -> str:
        """The point in words."""
        speed, memory = format_rate(self.speed, self.unit), format_bytes(self.memory_bytes)
        return f"{self.name}: {speed}, {memory}{'' if self.fits else ', does not fit'}"


def points_of(rows: Sequence[Plan | ComparisonRow]) -> list[PlanPoint]:
    """Plans by their schedules where these differ, else by their planners."""
    unit, rates = speeds([row.predicted if isinstance(row, Plan) else row for row in rows])
    by_schedule = len({row.schedule for row in rows if isinstance(row, Plan)}) > 1
    points = []
    for row, rate in zip(rows, rates, strict=True):
        name = row.schedule if isinstance(row, Plan) and by_schedule else row.planner
        points.append(PlanPoint(f"{name} {row.shape}", rate, unit, row.peak_memory_bytes, row.fits))
    return points


def points_of_layouts(plan: Plan) -> list[PlanPoint]:
    """A transformer's plan and the layouts beside it, as points; an empty list for other plans."""
    rows, _, _ = layout_table(plan)
    unit, [rate] = speeds([plan.predicted])
    best = min((row for row in rows if row.fits), key=lambda row: row.iteration_s, default=None)

    def name(row: LayoutBeside) -> str:
        mark = "this plan: " if row is rows[0] else "best: " if row is best else ""
        return f"{mark}{layout_name(row.layout)}"

    return [
        PlanPoint(
            name(row),
            rate * rows[0].iteration_s / row.iteration_s,
            unit,
            row.memory_bytes,
            row.fits,
        )
        for row in rows
    ]


def comparison_picture(comparison: Comparison) -> Picture:
    """Speed against bytes on the fullest device, with the limit of a device as a line."""
    points = points_of(comparison.rows)
    parts = [
        comparison.model,
        comparison.schedule,
        f"microbatch {comparison.microbatch_size}",
    ]
    basis = basis_lines(comparison.estimated)
    best = max((point for point in points if point.fits), key=lambda p: p.speed, default=None)
    fastest = "nothing fits"
    if best is not None:
        fastest = f"fastest {best.name} at {format_rate(best.speed, best.unit)}"
    parts += [f"{comparison.topology.cluster.devices} devices", fastest]
    told = [*map(str, points), *(text for _, text in basis)]
    heading = Heading(parts, f"Speed against memory of plans. {'; '.join(told)}.")

    def draw(heading: Heading) -> Sheet:
        sheet = Sheet(heading, LEFT + _WIDTH + _NAMES + RIGHT)
        draw_points(sheet, points, comparison.topology.device.memory_bytes)
        sheet.legend(handles_of_points(points))
        return sheet

    return Picture(heading, draw)


def draw_points(sheet: Sheet, points: Sequence[PlanPoint], limit: int | None) -> None:
    """A panel of the points, with their names beside it.

    The axes begin at 0, or where the points do if these are far from it.
    """
    height, width = max(_LOWEST, _LINE * len(points)), _WIDTH
    memory, heights = [p.memory_bytes for p in points], [p.speed for p in points]
    near = near_limit(limit, max(memory))
    right = max(*memory, near or 1) * 1.06
    top = max(*heights, 1e-9) * 1.08
    begin, bottom = axis_start(min(memory), right), axis_start(min(heights), top)
    sheet.down += 0.14
    high = sheet.down
    axes = sheet.panel(height, width)
    axes.set_xlim(begin, right)
    axes.set_ylim(bottom, top)

    def place(point: PlanPoint) -> tuple[float, float]:
        """Inches from the left and from above."""
        along, up = (point.memory_bytes - begin) / (right - begin), point.speed - bottom
        return LEFT + width * along, high + height * (1 - up / (top - bottom))

    axes.patch.set_visible(False)  # lines to the names lie below
    if front := pareto(points):
        memory, heights = [p.memory_bytes for p in front], [p.speed for p in front]
        step = [*memory, near or right], [*heights, heights[-1]]
        axes.step(*step, where="post", color=GREY, lw=0.8)
    for point in points:
        full, at = BLUE if point.fits else "white", (point.memory_bytes, point.speed)
        axes.plot(*at, "o", ms=5, mfc=full, mec=BLUE, mew=1.0, clip_on=False, zorder=4)
        sheet.add_point_tooltip(axes, *at, str(point))
    if limit is not None:
        if near is not None:
            axes.axvline(near, color="black", lw=0.8, ls="--")
        text = f"limit {format_bytes(limit)}" + ("" if near else ", far to the right")
        along = (min(limit, right) - begin) / (right - begin)
        look: Any = {"ha": "right" if along > 0.5 else "left", "va": "bottom", "size": SMALL}
        sheet.text(LEFT + width * along, high - 0.02, text, **look)
    ticks(axes.xaxis, "memory of the fullest device", 5, format_bytes)
    axes.xaxis.labelpad = 2
    ticks(axes.yaxis, f"{points[0].unit}/s", 5, format_count)
    # names from the fastest down, a line apart, with lines to their points
    left, down = LEFT + width + 0.3, float("-inf")
    ranked = sorted(points, key=lambda point: -point.speed)
    for n, point in enumerate(ranked):
        point_down = place(point)[1]
        lowest = high + height - _LINE * (len(points) - 1 - n)
        down = max(down + _LINE, high, min(point_down, lowest))
        name = fit(point.name, _NAMES - 0.3, SMALL)
        sheet.text(left, down, name, size=SMALL, va="center_baseline")
        ends = place(point), (LEFT + width + 0.08, point_down)
        sheet.line([*ends, (left - 0.03, down)], color=GREY, linewidth=0.3)
    sheet.down += 0.33


def pareto(points: Sequence[PlanPoint]) -> list[PlanPoint]:
    """The points that fit and of which none is as fast with less memory, by memory."""
    front: list[PlanPoint] = []
    for point in sorted(points, key=lambda point: (point.memory_bytes, -point.speed)):
        if point.fits and (not front or point.speed > front[-1].speed):
            front.append(point)
    return front


def handles_of_points(points: Sequence[PlanPoint]) -> dict[str, Any]:
    """What the marks mean."""
    look: Any = {"marker": "o", "markersize": 4, "linewidth": 0, "markeredgecolor": BLUE}
    handles: dict[str, Any] = {}
    if any(point.fits for point in points):
        handles["plan that fits"] = Line2D([], [], color=BLUE, **look)
        handles["no other is as fast with less"] = Line2D([], [], color=GREY, linewidth=0.8)
    if not all(point.fits for point in points):
        handles["does not fit"] = Line2D([], [], color="white", **look)
    return handles


def run_picture(run: Run) -> Picture:
    """The whole as bars, and below it a panel for every part that takes time: a bar a rank."""
    plan = run.plan
    units = {"microbatch": " a microbatch", "iteration": " an iteration", None: ""}
    parts = (
        plan.model,
        plan.schedule,
        f"{len(run.ranks)} ranks",
        f"{plan.microbatches} microbatches",
        f"measured {format_seconds(run.measured_s)}{units[plan.measured_per]}",
        f"predicted {format_seconds(run.predicted_s)}",
        f"error {error(run.predicted_s, run.measured_s)}",
    )
    about = "Predicted beside measured: the whole, and each rank's forward, backward and waiting."
    heading = Heading.of(parts, about, plan.estimated)
    return Picture(heading, partial(_draw_run, run))


def _draw_run(run: Run, heading: Heading) -> Sheet:
    sheet = Sheet(heading)
    sheet.down += 0.1
    _draw_whole(sheet.axes(LEFT + _WHOLE, PANEL - _WHOLE, 3 * _BAR), run)
    axes = None
    step = max(1, int(np.ceil(0.3 * len(run.ranks) / PANEL)))
    for name, (label, _) in _PARTS.items():
        pairs = [[getattr(half, name) for half in (r.predicted, r.measured)] for r in run.ranks]
        values = np.array(pairs, dtype=float)  # NaN where nobody counted
        if np.nanmax(values, initial=0) <= 0:
            continue
        sheet.down += _GAP
        axes = sheet.panel(_PART)
        _draw_part(axes, name, *values.T)
        axes.set_xlim(-0.6, len(run.ranks) - 0.4)
        axes.set_xticks(range(0, len(run.ranks), step), [])
        axes.tick_params(axis="x", length=0)
        form = format_bytes if name == "peak_memory_bytes" else format_seconds
        for place, pair in enumerate(pairs):
            words = ["-" if value is None else form(value) for value in pair]
            text = f"rank {run.ranks[place].rank}, {label}: predicted {words[0]}"
            sheet.add_tooltip(axes, place - 0.5, place + 0.5, f"{text}, measured {words[1]}")
    if axes is not None:  # ranks are named below the last panel, all or every so many
        axes.set_xticks(axes.get_xticks(), [str(rank.rank) for rank in run.ranks[::step]])
        axes.set_xlabel("rank", labelpad=2)
    sheet.down += 0.33
    sheet.legend(
        {
            "measured": Patch(facecolor="#BBBBBB", edgecolor=GREY, linewidth=0.3),
            "predicted": Line2D([], [], color="black", linewidth=1.2),
        }
    )
    return sheet


def _draw_whole(axes: Axes, run: Run) -> None:
    """The period as it was predicted, with the run's own times, and measured."""
    seconds = [run.predicted_s, run.own_times_s, run.measured_s]
    faces, names = ["white", "#DDDDDD", GREY], ["predicted", "with the run's own times", "measured"]
    bars = axes.barh([2, 1, 0], seconds, 0.7, color=faces, edgecolor="black", linewidth=0.6)
    axes.bar_label(bars, [format_seconds(value) for value in seconds], padding=3, size=SMALL)
    axes.set_xlim(0, 1.2 * max(*seconds, 1e-12))
    axes.set_ylim(-0.5, 2.5)
    axes.set_yticks([2, 1, 0], names)
    axes.tick_params(axis="both", length=0)
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)


def _draw_part(axes: Axes, name: str, predicted: Any, measured: Any) -> None:
    """A bar for what was measured of every rank, a line across it for what was predicted."""
    label, colour = _PARTS[name]
    places = np.arange(len(measured))
    draw_bars(axes, places, measured, 0.7, facecolor=colour, edgecolor=GREY, linewidth=0.3)
    for colour, width in (("white", 2.4), ("black", 1.2)):
        axes.hlines(predicted, places - 0.45, places + 0.45, color=colour, linewidth=width)
    axes.set_ylim(0, 1.12 * np.nanmax([predicted, measured]))
    (bytes_axis if name == "peak_memory_bytes" else seconds_axis)(axes, label, most=2)
