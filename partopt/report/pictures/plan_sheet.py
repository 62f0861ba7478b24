"""A plan as a picture: the chain with its cuts, the cluster, and the memory of its devices."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from partopt.documents.plan import Plan, room_bytes
from partopt.documents.stage import Stage, stages_text
from partopt.report.layout_words import layout_name, stage_again
from partopt.report.looks import MEMORY, ink, stage_colour
from partopt.report.phrases import format_ranks
from partopt.report.pictures import Layers, cluster, tables
from partopt.report.pictures.sheet import (
    GREY,
    LEFT,
    MIDDLE,
    RED,
    SIZE,
    SMALL,
    Floats,
    Heading,
    Picture,
    Sheet,
    bytes_axis,
    draw_bars,
    first_fit,
    fit,
    near_limit,
    pack,
    seconds_axis,
    text_width,
)
from partopt.report.plan_text import device_parts
from partopt.units import format_bytes, format_seconds

_TIMES, _STRIP, _MEMORY, _GAP, _LINE = 1.0, 0.16, 1.1, 0.14, 0.13  # inches
_THIN, _THICK = 0.4, 3.0  # points of the line of a cut that is never busy, and always
_CROWDED = 150  # bars, from which on lines around them would hide them
_WIDEST = 0.7  # inches of a bar of memory
_TOLD = 16  # stages that the description names


def picture(plan: Plan, layers: Layers | None = None, alternatives: Sequence[Plan] = ()) -> Picture:
    """The `layers`, or without them the stages; the cluster; the memory; other plans."""
    stages = [
        f"stage {s}: layers {stage.start}-{stage.stop - 1}, ranks {format_ranks(stage.ranks)}"
        for s, stage in enumerate(plan.stages[:_TOLD])
    ]
    more = len(plan.stages) - len(stages)
    about = (
        f"A plan of {len(plan.stages)} stages: layers and cuts, the cluster with the devices of "
        f"each stage, and what fills their memory. It is bound by {plan.predicted.binds}. "
        f"{'; '.join(stages)}{f'; and {more} more' if more else ''}."
    )
    predicted = plan.predicted
    head = heading(plan, about, plan.microbatches, predicted.period_s, predicted.bubble)
    return Picture(head, partial(_draw, plan, layers, alternatives))


def heading(
    plan: Plan, about: str, microbatches: int | None, period_s: float, bubble: float
) -> Heading:
    """The model, the schedule, devices, microbatches, the time, and the idle share of devices.

    `about` is a sentence of what the picture shows.
    """
    group_ranks = plan.topology.group_ranks
    devices, used = plan.topology.devices * group_ranks, len(plan.stages_by_rank()) * group_ranks
    groups = "" if group_ranks == 1 else f" in groups of {group_ranks}"
    time = f"{format_seconds(period_s)} a microbatch"
    if plan.microbatches is not None and microbatches is not None:
        time = f"{format_seconds(period_s * microbatches)} an iteration"
    parts = [
        plan.profile.name,
        layout_name(plan.layout) if plan.transformer else plan.schedule,
        (f"{devices}" if used == devices else f"{used} of {devices}") + f" devices{groups}",
        *([f"{microbatches} microbatches"] if microbatches else []),
        time,
        f"idle {bubble:.1%}",
    ]
    return Heading.of(parts, about, plan.profile.estimated)


def _bound_place(plan: Plan, cut: bool) -> int:
    """The stage, or the cut before it, that keeps the period from being shorter; else -1."""
    bound = plan.predicted.binding_load
    return bound.place if bound is not None and (bound.what == "cut") == cut else -1


def _draw(
    plan: Plan,
    layers: Layers | None,
    alternatives: Sequence[Plan],
    heading: Heading,
) -> Sheet:
    sheet = Sheet(heading)
    binds = f"bound by {plan.predicted.binds}"
    how = "forward above, backward below the axis"
    sheet.text(LEFT, sheet.down, fit(binds, sheet.inside - 2.5, SIZE), color=RED)
    sheet.text(LEFT + sheet.inside, sheet.down, how, color=GREY, size=SMALL, ha="right")
    sheet.down += _LINE
    times = sheet.panel(_TIMES)
    _draw_times(times, plan, layers)
    sheet.down += 0.03
    strip = sheet.panel(_STRIP)
    _draw_stages(strip, plan, sheet.inside)
    for s, stage in enumerate(plan.stages):
        for axes in (strip, times):
            sheet.add_tooltip(axes, stage.start, stage.stop, _describe_stage(s, stage))
    sheet.down += _GAP
    used = cluster.port_use(plan)
    cluster.draw(sheet, plan, used, _bound_place(plan, cut=False))
    for line in pack(cluster.use_lines(plan, used), sheet.width - 0.2, SIZE):
        sheet.text(0.1, sheet.down + 0.02, line)
        sheet.down += _LINE
    sheet.down += _GAP
    _draw_memory(sheet, plan)
    handles = _handles(plan)
    points = tables.points_of_layouts(plan)
    if not points and alternatives:
        points = tables.points_of([plan, *alternatives])
    if points:
        tables.draw_points(sheet, points, room_bytes(plan))
        handles |= tables.handles_of_points(points)
    sheet.legend(handles)
    return sheet


def _draw_times(axes: Axes, plan: Plan, profiled: Layers | None) -> None:
    """Forward above and backward below the axis, in the colours of the stages.

    They are of the layers that were `profiled`; without them, of stages, as wide as they have
    layers. Cuts are as thick as busy, and red where they bind; of very many that alone is drawn.
    """
    layers, sizes = plan.stages[-1].stop, np.array([len(stage.layers) for stage in plan.stages])
    colours = np.array([stage_colour(s) for s in range(len(sizes))])
    middles: Floats = np.cumsum(sizes) - sizes / 2
    widths = sizes
    up: Floats = np.array([stage.forward_s for stage in plan.stages])
    down: Floats = np.array([stage.backward_s for stage in plan.stages])
    if profiled is not None:
        middles, widths = np.arange(layers) + 0.5, np.ones(layers, dtype=int)
        up, down, colours = profiled.forward_s, profiled.backward_s, np.repeat(colours, sizes)
    _draw_coloured(axes, colours, middles, up + down, widths, -down, layers)
    axes.axhline(0, color="black", linewidth=0.5)
    axes.set_xlim(0, layers)
    axes.autoscale(axis="y")
    axes.spines["bottom"].set_visible(False)
    axes.tick_params(axis="x", bottom=False, labelbottom=False)
    seconds_axis(axes, "time")
    bound, cuts = _bound_place(plan, cut=True), cluster.cut_use(plan)
    if len(cuts) > _CROWDED:
        cuts = {cut: share for cut, share in cuts.items() if cut == bound}
    axes.vlines(
        [plan.stages[cut].start for cut in cuts],
        0,
        1,
        transform=axes.get_xaxis_transform(),
        colors=[RED if cut == bound else GREY for cut in cuts],
        linewidths=[_THIN + (_THICK - _THIN) * min(1.0, share) for share in cuts.values()],
        linestyles="--",
    )


def _draw_stages(axes: Axes, plan: Plan, inches: float) -> None:
    """The stages as boxes below their layers: number, replicas, and R where they recompute.

    The layers take so many `inches`.
    """
    layers, bound = plan.stages[-1].stop, _bound_place(plan, cut=False)
    axes.set_xlim(0, layers)
    axes.set_ylim(0, 1)
    axes.set_axis_off()
    sizes = np.array([len(stage.layers) for stage in plan.stages])
    colours = np.array([stage_colour(s) for s in range(len(sizes))])
    middles = np.cumsum(sizes) - sizes / 2
    _draw_coloured(axes, colours, middles, np.ones(len(sizes)), sizes, 0 * sizes, len(sizes))
    for s, stage in enumerate(plan.stages):
        times = f" x{stage.replicas}" if stage.replicas > 1 else ""
        forms = [f"{s}{times}{' R' if stage.recompute else ''}", str(s)]
        text = first_fit(forms, sizes[s] * inches / layers - 0.03, SMALL)
        axes.text(middles[s], 0.5, text, size=SMALL, color=ink(colours[s]), **MIDDLE)
    if bound >= 0:
        frame = Rectangle((plan.stages[bound].start, 0), sizes[bound], 1, fill=False)
        frame.set(edgecolor=RED, linewidth=1.5, clip_on=False, zorder=5)
        axes.add_patch(frame)


def _draw_coloured(
    axes: Axes, colours: Any, places: Floats, heights: Floats, widths: Any, bottom: Any, many: int
) -> None:
    """Bars of one colour together; without a line around them where there are many."""
    look: Any = {"edgecolor": "white", "linewidth": 0.4 if many <= _CROWDED else 0.0}
    for colour in dict.fromkeys(colours.tolist()):
        of_colour = colours == colour
        draw_bars(
            axes,
            places[of_colour],
            heights[of_colour],
            widths[of_colour],
            bottom[of_colour],
            facecolor=colour,
            **look,
        )


def _describe_stage(s: int, stage: Stage) -> str:
    """A stage in words, its seconds those of a microbatch on one replica."""
    names = stage.modules[0]
    if len(stage.modules) > 1:
        names = f"{names} .. {stage.modules[-1]}"
    parts = [
        f"stage {s}: layers {stage.start}-{stage.stop - 1} {names}",
        f"ranks {format_ranks(stage.ranks)}",
        f"forward {format_seconds(stage.forward_s)}",
        f"backward {format_seconds(stage.backward_s)}",
        *([stage_again(stage)] if stage.recompute else []),
    ]
    return ", ".join(parts)


def _draw_memory(sheet: Sheet, plan: Plan) -> None:
    """A bar for the devices that hold the same stages, part by part, in red over the limit."""
    axes = sheet.panel(_MEMORY)
    held = list(dict.fromkeys(map(tuple, plan.stages_by_rank().values())))
    parts = [device_parts([plan.stages[s] for s in stages]) for stages in held]
    bars, bottom = np.arange(len(held)), np.zeros(len(held))
    width = min(0.8, _WIDEST * len(held) / sheet.inside)
    line: Any = {"edgecolor": GREY, "linewidth": 0.3 if len(held) <= _CROWDED else 0.0}
    for name, colour in MEMORY.items():
        sizes = np.array([device[name] for device in parts], dtype=float)
        draw_bars(axes, bars, sizes, width, bottom, facecolor=colour, **line)
        bottom += sizes
    peak, limit = float(bottom.max()), plan.memory_limit_bytes
    near = near_limit(limit, peak)
    top = max(peak, near or 0, 1)
    axes.set_ylim(0, top * 1.25)
    axes.set_xlim(-0.6, len(held) - 0.4)
    most = room_bytes(plan)
    if limit is not None and most is not None:
        over = bottom > limit
        frame: Any = {"facecolor": "none", "edgecolor": RED, "linewidth": 1.2}
        draw_bars(axes, bars[over], bottom[over], width, **frame)
        if near is not None:
            axes.axhline(near, color="black", linewidth=0.8, linestyle="--")
        # at the line of the limit where that is the highest that is drawn
        how = ", exceeded" if peak > limit else "" if top == limit else ", far above"
        look: Any = {"ha": "right", "va": "bottom", "color": RED if peak > limit else "black"}
        reserved = f", {format_bytes(most - limit)} of it reserved" if most > limit else ""
        text = f"limit {format_bytes(most)}{reserved}{how}"
        axes.text(len(held) - 0.45, top * 1.03, text, size=SMALL, **look)
    bytes_axis(axes, "memory")
    labels = [
        ",".join(map(str, stages)) if len(stages) <= 4 else f"{stages[0]},{stages[1]}..{stages[-1]}"
        for stages in held
    ]
    # labels that have no room beside each other are turned or, if too long for that, left out
    room = sheet.inside / len(held)
    widest = max(text_width(label, SMALL) for label in labels) + 0.05
    turned = 2 * room < widest < 0.8
    step = max(1, int(np.ceil((0.11 if turned else widest) / room)))
    axes.set_xticks(bars[::step], labels[::step], rotation=90 if turned else 0)
    axes.set_xlabel("stages of a device", labelpad=2)
    axes.tick_params(axis="x", length=0)
    sheet.down += 0.24 + (widest if turned else 0.11)
    for place, (stages, size_of) in enumerate(zip(held, parts, strict=True)):
        words = [f"{name} {format_bytes(size)}" for name, size in size_of.items() if size]
        whole = f"{stages_text(stages)}: {format_bytes(sum(size_of.values()))}"
        sheet.add_tooltip(axes, place - 0.5, place + 0.5, ", ".join([whole, *words]))


def _handles(plan: Plan) -> dict[str, Any]:
    held = {name for s in plan.stages for name in MEMORY if getattr(s.memory, f"{name}_bytes")}
    handles: dict[str, Any] = {
        name: Patch(facecolor=colour, edgecolor=GREY, linewidth=0.3)
        for name, colour in MEMORY.items()
        if name in held
    }
    busy = "link, as thick as its bytes over its rate"
    handles[busy] = Line2D([], [], color="black", linewidth=2.5)
    binds = max(_bound_place(plan, cut=False), _bound_place(plan, cut=True)) >= 0
    marks = ["what binds"] * binds + ["exceeds the limit"] * (not plan.fits)
    if marks:
        handles[" or ".join(marks)] = Patch(facecolor="white", edgecolor=RED, linewidth=1.2)
    return handles
