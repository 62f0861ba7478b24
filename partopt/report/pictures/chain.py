"""The chain of a plan: its layers, or without a profile its stages, with the cuts drawn."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from partopt.cost.chain import Chain
from partopt.documents.plan import Plan
from partopt.documents.stage import Stage
from partopt.report.pictures.axes import Floats, draw_bars, seconds_axis
from partopt.report.pictures.colours import ink, stage_colour
from partopt.report.pictures.lettering import text_width
from partopt.report.pictures.look import GREY, RED, SMALL
from partopt.report.pictures.port_use import cut_use
from partopt.report.ranks import format_ranks
from partopt.units import format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CROWDED = 150  # bars, from which on lines around them would hide them
_THIN, _THICK = 0.4, 3.0  # points of the line of a cut that is never busy, and always


class Binding(NamedTuple):
    """The stage or the cut that keeps the period from being shorter; -1 for none."""

    stage: int
    cut: int


class Bars(NamedTuple):
    """Where bars stand and how wide they are, in layers; seconds of both passes; colours."""

    middles: Floats
    widths: Floats
    up: Floats
    down: Floats
    colours: NDArray[Any]


def binding_of(plan: Plan) -> Binding:
    """What `bound_by` of the plan names."""
    what = plan.predicted.bound_by
    found = re.search(r"(before|of) stage (\d+)", what)
    if found is None:
        return Binding(-1, -1)
    place = int(found[2])
    return Binding(-1, place) if found[1] == "before" else Binding(place, -1)


def draw_times(axes: Axes, plan: Plan, chain: Chain | None, inches: float) -> None:
    """Forward above and backward below the axis, in the colours of the stages.

    They are of each layer of `chain`; without it, of each stage. Cuts are as thick as busy.
    """
    layers = plan.stages[-1].stop
    middles, widths, up, down, colours = _stage_bars(plan) if chain is None else _bars(plan, chain)
    line = 0.4 if layers <= CROWDED else 0.0
    for colour in dict.fromkeys(colours.tolist()):
        own = colours == colour
        look: Any = {"facecolor": colour, "edgecolor": "white", "linewidth": line}
        draw_bars(axes, middles[own], (up + down)[own], widths[own], -down[own], **look)
    axes.axhline(0, color="black", linewidth=0.5)
    axes.set_xlim(0, layers)
    axes.autoscale(axis="y")
    axes.spines["bottom"].set_visible(False)
    axes.tick_params(axis="x", bottom=False, labelbottom=False)
    seconds_axis(axes, "time")
    axes.yaxis.set_label_coords(-0.5 / inches, 0.5)
    _draw_cuts(axes, plan)


def _stage_bars(plan: Plan) -> Bars:
    """A bar for each stage, as wide as it has layers."""
    layers = [float(len(stage.layers)) for stage in plan.stages]
    return Bars(
        np.cumsum(layers) - np.array(layers) / 2,
        np.array(layers),
        np.array([stage.forward_s for stage in plan.stages]),
        np.array([stage.backward_s for stage in plan.stages]),
        _colours(plan),
    )


def _bars(plan: Plan, chain: Chain) -> Bars:
    """A bar for each layer."""
    colours = np.repeat(_colours(plan), [len(stage.layers) for stage in plan.stages])
    N = chain.layers
    return Bars(np.arange(N) + 0.5, np.ones(N), chain.f, chain.g, colours)


def _draw_cuts(axes: Axes, plan: Plan) -> None:
    """Dashed lines, red where it is a cut that binds; of very many cuts that alone."""
    bound, used = binding_of(plan).cut, cut_use(plan)
    if len(used) > CROWDED:
        used = {cut: share for cut, share in used.items() if cut == bound}
    axes.vlines(
        [plan.stages[cut].start for cut in used],
        0,
        1,
        transform=axes.get_xaxis_transform(),
        colors=[RED if cut == bound else GREY for cut in used],
        linewidths=[_THIN + (_THICK - _THIN) * min(1.0, share) for share in used.values()],
        linestyles="--",
    )


def draw_stages(axes: Axes, plan: Plan, inches: float) -> None:
    """The stages as boxes below their layers: number, replicas, and R where they recompute."""
    from matplotlib.patches import Rectangle

    layers, bound = plan.stages[-1].stop, binding_of(plan).stage
    axes.set_xlim(0, layers)
    axes.set_ylim(0, 1)
    axes.set_axis_off()
    widths = np.array([len(stage.layers) for stage in plan.stages])
    middles = np.array([stage.start for stage in plan.stages]) + widths / 2
    colours = _colours(plan)
    for colour in dict.fromkeys(colours.tolist()):
        own = colours == colour
        line = 0.5 if len(widths) <= CROWDED else 0.0
        look: Any = {"facecolor": colour, "edgecolor": "white", "linewidth": line}
        draw_bars(axes, middles[own], np.ones(own.sum()), widths[own], **look)
    for s, (stage, width, colour) in enumerate(zip(plan.stages, widths, colours, strict=True)):
        forms = [_stage_text(s, stage.replicas, stage.recompute), str(s)]
        room = width * inches / layers - 0.03
        text = next((form for form in forms if text_width(form, SMALL) <= room), None)
        if text is not None:
            middle: Any = {"ha": "center", "va": "center_baseline", "color": ink(colour)}
            axes.text(stage.start + width / 2, 0.5, text, size=SMALL, **middle)
    if bound >= 0:
        stage = plan.stages[bound]
        frame = Rectangle((stage.start, 0), stage.stop - stage.start, 1, fill=False)
        frame.set(edgecolor=RED, linewidth=1.5, clip_on=False, zorder=5)
        axes.add_patch(frame)


def describe_stage(s: int, stage: Stage) -> str:
    """A stage in words, its seconds those of a microbatch on one replica."""
    names = stage.modules[0]
    if len(stage.modules) > 1:
        names = f"{names} .. {stage.modules[-1]}"
    parts = [
        f"stage {s}: layers {stage.start}-{stage.stop - 1} {names}",
        f"ranks {format_ranks(stage.ranks)}",
        f"forward {format_seconds(stage.forward_s)}",
        f"backward {format_seconds(stage.backward_s)}",
        *(["recomputed"] if stage.recompute else []),
    ]
    return ", ".join(parts)


def _colours(plan: Plan) -> NDArray[Any]:
    """The colour of each stage."""
    return np.array([stage_colour(s) for s in range(len(plan.stages))])


def _stage_text(s: int, replicas: int, recompute: bool) -> str:
    times = f" x{replicas}" if replicas > 1 else ""
    return f"{s}{times}{' R' if recompute else ''}"
