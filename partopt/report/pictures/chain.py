"""The chain of a plan: its layers, or without a profile its stages, with the cuts drawn."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from partopt.cost.chain import Chain
from partopt.documents.plan import Plan
from partopt.report.pictures.axes import seconds_axis
from partopt.report.pictures.colours import ink, stage_colour
from partopt.report.pictures.lettering import text_width
from partopt.report.pictures.look import GREY, RED, SMALL
from partopt.report.pictures.port_use import cut_use

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_THIN, _THICK = 0.4, 3.0  # points of the line of a cut that is never busy, and always


class Binding(NamedTuple):
    """The stage or the cut that keeps the period from being shorter; -1 for none."""

    stage: int
    cut: int


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
    from matplotlib.collections import PolyCollection

    layers = plan.stages[-1].stop
    for s, stage in enumerate(plan.stages):
        if chain is None:
            left, right = np.array([stage.start]), np.array([stage.stop])
            up, down = np.array([stage.forward_s]), np.array([stage.backward_s])
        else:
            left = np.arange(stage.start, stage.stop)
            right = left + 1
            up, down = chain.f[stage.start : stage.stop], chain.g[stage.start : stage.stop]
        corners = [(left, -down), (right, -down), (right, up), (left, up)]
        boxes: Any = np.stack([np.stack(corner, axis=-1) for corner in corners], axis=1)
        line = 0.4 if layers <= 150 else 0.0
        axes.add_collection(
            PolyCollection(boxes, facecolors=stage_colour(s), edgecolors="white", linewidths=line)
        )
    axes.axhline(0, color="black", linewidth=0.5)
    axes.set_xlim(0, layers)
    axes.autoscale(axis="y")
    axes.spines["bottom"].set_visible(False)
    axes.tick_params(axis="x", bottom=False, labelbottom=False)
    seconds_axis(axes, "time")
    axes.yaxis.set_label_coords(-0.5 / inches, 0.5)
    bound = binding_of(plan).cut
    for cut, share in cut_use(plan).items():
        width, colour = _THIN + (_THICK - _THIN) * min(1.0, share), RED if cut == bound else GREY
        axes.axvline(plan.stages[cut].start, color=colour, linewidth=width, linestyle="--")


def draw_stages(axes: Axes, plan: Plan, inches: float) -> None:
    """The stages as boxes below their layers: number, replicas, and R where they recompute."""
    from matplotlib.patches import Rectangle

    layers, bound = plan.stages[-1].stop, binding_of(plan).stage
    axes.set_xlim(0, layers)
    axes.set_ylim(0, 1)
    axes.set_axis_off()
    for s, stage in enumerate(plan.stages):
        width = stage.stop - stage.start
        colour = stage_colour(s)
        box = Rectangle((stage.start, 0), width, 1, facecolor=colour, edgecolor="white", lw=0.5)
        axes.add_patch(box)
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


def _stage_text(s: int, replicas: int, recompute: bool) -> str:
    times = f" x{replicas}" if replicas > 1 else ""
    return f"{s}{times}{' R' if recompute else ''}"
