"""A run as a picture: what was predicted beside what was measured."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from partopt.documents.run import Run
from partopt.report.actions import COLOURS
from partopt.report.basis import basis_text
from partopt.report.pictures.axes import bytes_axis, draw_bars, draw_levels, seconds_axis
from partopt.report.pictures.look import FULL, GREY, SMALL, Heading, Sheet, legend_height
from partopt.report.run import error
from partopt.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LEFT, _RIGHT, _NAME = 0.65, 0.1, 1.5  # inches beside the panels, and of a name of a whole
_WIDTH = FULL - _LEFT - _RIGHT
_PANEL, _GAP, _BAR, _BELOW = 0.55, 0.1, 0.16, 0.33  # inches
# of a rank: what it is called, and its colour
_PARTS = {
    "forward_s": ("forward", COLOURS["F"]),
    "backward_s": ("backward", COLOURS["B"]),
    "transfer_s": ("transfer", "#0072B2"),
    "allreduce_s": ("all-reduce", COLOURS["A"]),
    "idle_s": ("idle", "#BBBBBB"),
    "peak_memory_bytes": ("memory", "#A8E6CF"),
}


def heading(run: Run) -> Heading:
    """The model, the schedule, ranks, microbatches, what was predicted and what was measured."""
    plan = run.plan
    unit = "a microbatch" if plan.schedule.startswith("pipedream") else "an iteration"
    parts = (
        plan.model,
        plan.schedule,
        f"{len(run.ranks)} ranks",
        f"{plan.microbatches} microbatches",
        f"measured {format_seconds(run.measured_s)} {unit}",
        f"predicted {format_seconds(run.predicted_s)}",
        f"error {error(run.predicted_s, run.measured_s)}",
    )
    about = "Predicted beside measured: the whole, and each rank's forward, backward and waiting."
    basis = "" if plan.estimated is None else f" {basis_text(plan.estimated)}."
    return Heading(parts, f"{about} {', '.join(parts)}.{basis}")


def draw(run: Run, heading: Heading) -> Sheet:
    """The whole as bars, and below it a panel for each part that takes time: a bar a rank."""
    values = {name: _values(run, name) for name in _PARTS}
    shown = {name: pair for name, pair in values.items() if np.nanmax(pair, initial=0) > 0}
    handles = _handles()
    below = legend_height(handles, FULL) + _BELOW
    panels = len(shown) * (_PANEL + _GAP)
    sheet = Sheet(FULL, below + panels + 3 * _BAR + 0.15, heading)
    bottom = below
    for name in reversed(shown):
        axes = sheet.axes(_LEFT, bottom, _WIDTH, _PANEL)
        _draw_part(axes, name, *shown[name])
        _label_ranks(axes, run, last=bottom == below)
        form = format_bytes if name == "peak_memory_bytes" else format_seconds
        for place, (predicted, measured) in enumerate(zip(*shown[name], strict=True)):
            text = f"rank {run.ranks[place].rank}, {_PARTS[name][0]}: predicted "
            text += f"{_word(form, predicted)}, measured {_word(form, measured)}"
            sheet.tell(axes, place - 0.5, place + 0.5, text)
        bottom += _PANEL + _GAP
    left = _LEFT + _NAME
    _draw_whole(sheet.axes(left, bottom, _WIDTH - _NAME, 3 * _BAR), run)
    sheet.legend(handles)
    return sheet


def _values(run: Run, name: str) -> Any:
    """What was predicted and measured of each rank, shape (2, ranks); NaN where nobody counted."""
    return np.array(
        [
            [_number(getattr(half, name)) for half in halves]
            for halves in (
                [rank.predicted for rank in run.ranks],
                [rank.measured for rank in run.ranks],
            )
        ]
    )


def _number(value: float | None) -> float:
    return np.nan if value is None else value


def _word(form: Callable[[float], str], value: float) -> str:
    return "-" if np.isnan(value) else form(value)


def _draw_part(axes: Axes, name: str, predicted: Any, measured: Any) -> None:
    label, colour = _PARTS[name]
    places = np.arange(len(measured))
    draw_bars(axes, places, measured, 0.7, facecolor=colour, edgecolor=GREY, linewidth=0.3)
    for colour, width in (("white", 2.4), ("black", 1.2)):
        draw_levels(axes, places, predicted, 0.9, color=colour, linewidth=width)
    axes.set_ylim(0, 1.12 * max(np.nanmax(predicted, initial=0), np.nanmax(measured, initial=0)))
    (bytes_axis if name == "peak_memory_bytes" else seconds_axis)(axes, label, most=2)
    axes.yaxis.set_label_coords(-0.5 / _WIDTH, 0.5)


def _label_ranks(axes: Axes, run: Run, last: bool) -> None:
    """The numbers of the ranks, or of every so many, below the last panel."""
    axes.set_xlim(-0.6, len(run.ranks) - 0.4)
    step = max(1, int(np.ceil(0.3 * len(run.ranks) / _WIDTH)))
    names = [str(rank.rank) for rank in run.ranks[::step]]
    axes.set_xticks(range(0, len(run.ranks), step), names if last else [""] * len(names))
    axes.tick_params(axis="x", length=0)
    if last:
        axes.set_xlabel("rank", labelpad=2)


def _draw_whole(axes: Axes, run: Run) -> None:
    """The period as it was predicted, with the run's own times, and measured."""
    names = ["predicted", "with the run's own times", "measured"]
    seconds = [run.predicted_s, run.own_times_s, run.measured_s]
    faces = ["white", "#DDDDDD", GREY]
    axes.barh([2, 1, 0], seconds, 0.7, color=faces, edgecolor="black", linewidth=0.6)
    for place, value in zip([2, 1, 0], seconds, strict=True):
        axes.annotate(
            format_seconds(value),
            (value, place),
            (3, 0),
            textcoords="offset points",
            size=SMALL,
            va="center_baseline",
        )
    axes.set_xlim(0, 1.2 * max(*seconds, 1e-12))
    axes.set_ylim(-0.5, 2.5)
    axes.set_yticks([2, 1, 0], names)
    axes.tick_params(axis="both", length=0)
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)


def _handles() -> dict[str, Any]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    return {
        "measured": Patch(facecolor="#BBBBBB", edgecolor=GREY, linewidth=0.3),
        "predicted": Line2D([], [], color="black", linewidth=1.2),
    }
