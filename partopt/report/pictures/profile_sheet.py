"""A profile as a picture: what layers take and hold, and what crosses the cuts."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from partopt.documents.profile import Profile
from partopt.report.folds import Fold, fold
from partopt.report.looks import COLOURS
from partopt.report.phrases import count_text
from partopt.report.pictures import Layers
from partopt.report.pictures.sheet import (
    BLUE,
    COLUMN,
    GREY,
    LEFT,
    PANEL,
    RIGHT,
    SMALL,
    Floats,
    Heading,
    Picture,
    Sheet,
    bytes_axis,
    draw_bars,
    fit,
    seconds_axis,
    stack_labels,
    text_width,
)
from partopt.units import format_bytes, format_seconds

_COLUMN = 0.4  # inches of a column at most
_TIME, _HELD, _SENT = 1.3, 0.9, 0.7  # inches of the panels
_GAP, _NAMES, _MARK = 0.1, 1.1, 0.13  # inches between panels, of names at most, of lines of marks
_LETTERS = 5.5  # points of a layer's name
_UNFOLDED = 40  # layers that have room for a column each
_FORWARD, _BACKWARD = COLOURS["F"][0], COLOURS["B"][0]
_STASH = "#F0E442"


class Columns(NamedTuple):
    """The layers of every column, as many as its block has repeats; and the blocks.

    The start of a block is its first column.
    """

    layers: list[list[int]]
    folds: list[Fold]


def columns_of(profile: Profile) -> Columns:
    """The columns of a profile: a layer each, or where these are many, repeated blocks once.

    Blocks are alike where their layers have types, parameters and outputs in common; their times
    may differ.
    """
    N, outputs = len(profile.layers), profile.measured()[-1].layers
    if N <= _UNFOLDED:
        return Columns([[layer] for layer in range(N)], [])
    alike = [
        (layer.type, layer.parameter_bytes, measured.output_bytes)
        for layer, measured in zip(profile.layers, outputs, strict=True)
    ]
    return columns_from(alike)


def columns_from(alike: Sequence[Hashable]) -> Columns:
    """The columns of layers of which equal ones in `alike` are alike."""
    columns = Columns([], [])
    for run in fold(alike):
        if run.times > 1:
            columns.folds.append(run._replace(start=len(columns.layers)))
        columns.layers.extend(
            [layer + run.length * time for time in range(run.times)] for layer in run.block
        )
    return columns


def picture(profile: Profile, layers: Layers) -> Picture:
    """The model, its layers, and what a microbatch takes of which device."""
    count = len(layers.forward_s)
    parts = [
        profile.model.name,
        count_text(count, "layer"),
        f"{format_bytes(profile.parameter_bytes())} of {profile.dtype}",
        profile.device.name,
        f"microbatch {layers.microbatch_size}: {format_seconds(layers.compute_s)}",
    ]
    about = (
        "The layers of a model from left to right: their times, what they hold and what they send."
    )
    if count > 1:
        about += f" Fewest bytes cross the cut after layer {np.argmin(layers.sent_bytes[:-1])}."
    heading = Heading.of(parts, about, profile.estimated_for)
    return Picture(heading, partial(_draw, profile, layers, columns_of(profile)))


def _draw(profile: Profile, profiled: Layers, columns: Columns, heading: Heading) -> Sheet:
    """Forward above and backward below the axis, weights above stash, and bytes at the cuts."""
    count = len(columns.layers)
    width = min(PANEL, max(COLUMN, _COLUMN * count))
    sheet = Sheet(heading, width + LEFT + RIGHT)
    marks = [
        ((run.start + run.length / 2) * width / count, f"x {run.times}") for run in columns.folds
    ]
    lines = stack_labels(marks, SMALL)
    sheet.down += 0.05 + _MARK * max((line + 1 for line in lines if line is not None), default=0)
    for (middle, text), line in zip(marks, lines, strict=True):
        if line is not None:
            look: Any = {"size": SMALL, "ha": "center", "va": "bottom"}
            sheet.text(LEFT + middle, sheet.down - 0.04 - _MARK * line, text, **look)
    for run in columns.folds:  # a line above every block that stands for several
        ends = ((run.start + 0.2) * width / count, (run.start + run.length - 0.2) * width / count)
        down = sheet.down - 0.02
        sheet.line([(LEFT + end, down) for end in ends], color="black", linewidth=0.8)
    panels = [sheet.panel(_TIME, width)]
    _draw_bars(panels[0], columns, profiled.forward_s, _FORWARD, -profiled.backward_s, _BACKWARD)
    seconds_axis(panels[0], "time")
    sheet.down += _GAP
    panels.append(sheet.panel(_HELD, width))
    weights, stash = profiled.parameter_bytes, profiled.stash_bytes
    _draw_bars(panels[1], columns, weights, BLUE, -stash, _STASH)
    bytes_axis(panels[1], "held")
    if len(profile.layers) > 1:
        sheet.down += _GAP
        panels.append(sheet.panel(_SENT, width))
        _draw_sent(panels[2], profiled, columns)
    step = max(1, int(np.ceil(0.1 * count / width)))
    firsts = [layers[0] for layers in columns.layers[::step]]
    names = [fit(f"{n} {profile.layers[n].name}", _NAMES, _LETTERS) for n in firsts]
    for axes in panels:
        axes.set_xlim(-0.5, count - 0.5)
        axes.tick_params(axis="x", bottom=False, labelbottom=False)
        for place, layers in enumerate(columns.layers):
            sheet.add_tooltip(axes, place - 0.5, place + 0.5, _describe(profile, profiled, layers))
    panels[-1].tick_params(axis="x", bottom=True, labelbottom=True, pad=1)
    panels[-1].set_xticks(range(0, count, step), names, rotation=90, fontsize=_LETTERS)
    sheet.down += 0.1 + max(text_width(name, _LETTERS) for name in names)
    sheet.legend(_handles(len(profile.layers) > 1, bool(columns.folds)))
    return sheet


def _spread(values: Floats, columns: Columns) -> list[Floats]:
    """Mean, least and most of every column's layers, shape (columns,)."""
    by_column = [values[layers] for layers in columns.layers]
    return [np.array([form(column) for column in by_column]) for form in (np.mean, np.min, np.max)]


def _draw_bars(
    axes: Axes, columns: Columns, above: Floats, over: str, below: Floats, under: str
) -> None:
    """Two bars for every column, on and below the axis.

    A line goes from the least to the most of its layers.
    """
    for values, colour in ((above, over), (below, under)):
        mean, least, most = _spread(values, columns)
        places = np.arange(len(mean))
        line = 0.3 if len(places) <= 120 else 0.0
        draw_bars(axes, places, mean, 0.8, facecolor=colour, edgecolor=GREY, linewidth=line)
        ranged = np.abs(most - least) > 0.02 * np.abs(mean)
        axes.vlines(places[ranged], least[ranged], most[ranged], color=GREY, linewidth=0.5)
    axes.axhline(0, color="black", linewidth=0.5)
    axes.spines["bottom"].set_visible(False)


def _draw_sent(axes: Axes, layers: Layers, columns: Columns) -> None:
    """The bytes over the cut after every column as a step line, the fewest with a dot."""
    sent = layers.sent_bytes
    best = int(np.argmin(sent[:-1]))
    mean = _spread(sent, columns)[0]
    cuts = np.arange(len(mean)) + 0.5
    axes.step(cuts[:-1], mean[:-1], where="mid", color="black", linewidth=1.0)
    column = next(c for c, layers in enumerate(columns.layers) if best in layers)
    axes.plot(cuts[min(column, len(cuts) - 1)], sent[best], "o", color="black", ms=3)
    axes.set_ylim(0, max(1.0, float(mean.max(initial=0.0))) * 1.1)
    bytes_axis(axes, "sent")


def _describe(profile: Profile, profiled: Layers, layers: list[int]) -> str:
    """The first layer of a column, and of how many more it is."""
    n = layers[0]
    parts = [
        f"layer {n} {profile.layers[n].name}",
        *([f"and {len(layers) - 1} like it"] if len(layers) > 1 else []),
        f"forward {format_seconds(profiled.forward_s[n])}",
        f"backward {format_seconds(profiled.backward_s[n])}",
        f"weights {format_bytes(profiled.parameter_bytes[n])}",
        f"stash {format_bytes(profiled.stash_bytes[n])}",
        f"sends {format_bytes(profiled.sent_bytes[n])}",
    ]
    return ", ".join(parts)


def _handles(cut: bool, folded: bool) -> dict[str, Any]:
    colours = {"forward": _FORWARD, "backward": _BACKWARD, "weights": BLUE, "stash": _STASH}
    handles: dict[str, Any] = {
        label: Patch(facecolor=colour, edgecolor=GREY, linewidth=0.3)
        for label, colour in colours.items()
    }
    if cut:
        sent = Line2D([], [], color="black", linewidth=1.0)
        handles["bytes over the cut after a layer"] = sent
    if folded:
        ranged = Line2D([], [], color=GREY, linewidth=0.5, marker="|", markersize=4)
        handles["least and most of the repeats"] = ranged
    return handles
