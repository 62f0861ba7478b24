"""A plan as a picture: the chain with its cuts, the cluster, and the memory of its devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from partopt.cost.chain import chain_of
from partopt.documents.plan import Plan
from partopt.documents.profile import Profile
from partopt.errors import PartoptError
from partopt.report.pictures.boxes import boxes_of
from partopt.report.pictures.chain import binding_of, describe_stage, draw_stages, draw_times
from partopt.report.pictures.cluster import draw_cluster, use_lines
from partopt.report.pictures.colours import MEMORY
from partopt.report.pictures.comparison import (
    draw_points,
    handles_of,
    height_of,
    points_of_plans,
)
from partopt.report.pictures.heading import heading_of_plan
from partopt.report.pictures.lettering import fit, pack
from partopt.report.pictures.look import (
    FULL,
    GREY,
    RED,
    SIZE,
    SMALL,
    Heading,
    Sheet,
    legend_height,
)
from partopt.report.pictures.memory_bars import (
    below_memory,
    describe_memory,
    draw_memory,
    held_stages,
)
from partopt.report.pictures.port_use import port_use
from partopt.report.ranks import format_ranks
from partopt.simulator.advice import held_back

_LEFT, _RIGHT = 0.65, 0.1  # inches beside the panels
_WIDTH = FULL - _LEFT - _RIGHT
_TIMES, _STRIP, _MEMORY, _GAP, _LINE = 1.0, 0.16, 1.1, 0.14, 0.13  # inches
_TOLD = 16  # stages that the description names
_BUSY, _BINDS = "link, as thick as its bytes over its rate", "what binds"
_EXCEEDS = "exceeds the limit"


def heading(plan: Plan) -> Heading:
    """The model, the schedule, P, M, the time, and what the picture shows."""
    stages = [
        f"stage {s}: layers {stage.start}-{stage.stop - 1}, ranks {format_ranks(stage.ranks)}"
        for s, stage in enumerate(plan.stages[:_TOLD])
    ]
    more = len(plan.stages) - len(stages)
    about = (
        f"A plan of {len(plan.stages)} stages: layers and cuts, the cluster with the devices of "
        f"each stage, and what fills their memory. It is bound by {_binds(plan)}. "
        f"{'; '.join(stages)}{f'; and {more} more' if more else ''}."
    )
    return heading_of_plan(plan, about)


def draw(
    plan: Plan,
    heading: Heading,
    profile: Profile | None = None,
    alternatives: Sequence[Plan] = (),
) -> Sheet:
    """The layers of `profile`, or without it the stages; the cluster; the memory; what else is.

    Raises PartoptError for a profile that the plan was not made from.
    """
    chain = None if profile is None else chain_of(_own(plan, profile), plan.microbatch_size)
    box, used = boxes_of(plan, FULL - 0.2), port_use(plan)
    lines = pack(use_lines(plan, used), FULL - 0.2, SIZE)
    points = points_of_plans([plan, *alternatives]) if alternatives else []
    handles = _handles(plan) | (handles_of(points) if points else {})
    legend = legend_height(handles, FULL)
    memory = legend + below_memory(plan, _WIDTH) + (height_of(points) if points else 0)
    cluster = memory + _MEMORY + _GAP + _LINE * len(lines)
    strip = cluster + box.height + _GAP
    sheet = Sheet(FULL, strip + _STRIP + _TIMES + _LINE + 0.08, heading)
    if points:
        draw_points(sheet, legend, points, plan.memory_limit_bytes)
    held = sheet.axes(_LEFT, memory, _WIDTH, _MEMORY)
    draw_memory(held, plan, _WIDTH)
    for number, line in enumerate(lines):
        sheet.text(0.1, cluster - 0.02 - _LINE * number, line)
    draw_cluster(sheet.axes(0.1, cluster, box.width, box.height), plan, box, used)
    stages = sheet.axes(_LEFT, strip, _WIDTH, _STRIP)
    times = sheet.axes(_LEFT, strip + _STRIP + 0.03, _WIDTH, _TIMES)
    draw_stages(stages, plan, _WIDTH)
    draw_times(times, plan, chain, _WIDTH)
    for s, stage in enumerate(plan.stages):
        for axes in (stages, times):
            sheet.tell(axes, stage.start, stage.stop, describe_stage(s, stage))
    for place, own in enumerate(held_stages(plan)):
        sheet.tell(held, place - 0.5, place + 0.5, describe_memory(plan, own))
    _draw_caption(sheet, strip + _STRIP + _TIMES + _LINE + 0.05, plan)
    sheet.legend(handles)
    return sheet


def _draw_caption(sheet: Sheet, top: float, plan: Plan) -> None:
    """What binds the period, and how to read the chain."""
    binds = fit(f"bound by {_binds(plan)}", _WIDTH - 2.5, SIZE)
    sheet.text(_LEFT, top, binds, color=RED)
    how = "forward above, backward below the axis"
    sheet.text(_LEFT + _WIDTH, top, how, color=GREY, size=SMALL, ha="right")


def _own(plan: Plan, profile: Profile) -> Profile:
    if profile.sha256() != plan.profile.sha256:
        raise PartoptError(
            f"the plan was not made from this profile of {profile.model.name}",
            "give the plan's own `profile`, or none",
            code="plan-of-another-profile",
        )
    return profile


def _handles(plan: Plan) -> dict[str, Any]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    held = {name for stage in plan.stages for name in MEMORY if _bytes(stage.memory, name)}
    handles: dict[str, Any] = {
        name: Patch(facecolor=colour, edgecolor=GREY, linewidth=0.3, hatch=hatch)
        for name, (colour, hatch) in MEMORY.items()
        if name in held
    }
    handles[_BUSY] = Line2D([], [], color="black", linewidth=2.5)
    marks = [_BINDS] if max(binding_of(plan)) >= 0 else []
    marks += [] if plan.fits else [_EXCEEDS]
    if marks:
        handles[" or ".join(marks)] = Patch(facecolor="white", edgecolor=RED, linewidth=1.2)
    return handles


def _binds(plan: Plan) -> str:
    held = held_back(plan)
    return plan.predicted.bound_by if held is None else f"memory: {held.text}"


def _bytes(memory: Any, name: str) -> int:
    return int(getattr(memory, f"{name}_bytes"))
