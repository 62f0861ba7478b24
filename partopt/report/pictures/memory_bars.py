"""The memory of the devices of a plan, part by part, against their limit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from partopt.documents.plan import Plan
from partopt.documents.stage import stages_text
from partopt.report.memory import device_parts
from partopt.report.pictures.axes import bytes_axis, draw_bars
from partopt.report.pictures.chain import CROWDED
from partopt.report.pictures.colours import MEMORY
from partopt.report.pictures.lettering import text_width
from partopt.report.pictures.look import GREY, RED, SMALL
from partopt.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WIDEST = 0.7  # inches of a bar
_FAR = 8  # times the fullest device: a limit above that is not drawn


def held_stages(plan: Plan) -> list[tuple[int, ...]]:
    """The stages of a device, each such set once, in the order of the ranks."""
    return list(dict.fromkeys(tuple(stages) for stages in plan.stages_by_rank().values()))


def below_memory(plan: Plan, inches: float) -> float:
    """Inches below axes of the width `inches`, for labels."""
    widest, turned, _ = _labels(held_stages(plan), inches)
    return 0.24 + (widest if turned else 0.11)


def _labels(held: list[tuple[int, ...]], inches: float) -> tuple[float, bool, int]:
    """Inches of the widest label, whether labels are turned, and which are shown, every n-th."""
    widest = max(text_width(_label(stages), SMALL) for stages in held) + 0.05
    room = inches / len(held)
    turned = 2 * room < widest < 0.8
    return widest, turned, max(1, int(np.ceil((0.11 if turned else widest) / room)))


def _label(stages: tuple[int, ...]) -> str:
    text = ",".join(map(str, stages))
    return text if len(stages) <= 4 else f"{stages[0]},{stages[1]}..{stages[-1]}"


def draw_memory(axes: Axes, plan: Plan, inches: float) -> None:
    """A bar for the devices of each stage, or of the stages that they hold, in red over the limit.

    `inches` is the width of the axes.
    """
    held = held_stages(plan)
    parts = [device_parts([plan.stages[s] for s in stages]) for stages in held]
    bars, bottom = np.arange(len(held)), np.zeros(len(held))
    width = min(0.8, _WIDEST * len(held) / inches)
    for name, (colour, hatch) in MEMORY.items():
        sizes = np.array([own[name] for own in parts], dtype=float)
        line: dict[str, Any] = {"edgecolor": GREY, "linewidth": 0.3, "hatch": hatch}
        if len(held) > CROWDED:
            line = {"edgecolor": "none", "linewidth": 0.0}
        draw_bars(axes, bars, sizes, width, bottom, facecolor=colour, **line)
        bottom += sizes
    peak, limit = float(bottom.max()), plan.memory_limit_bytes
    if limit is not None:
        over = bottom > limit
        frame: dict[str, Any] = {"facecolor": "none", "edgecolor": RED, "linewidth": 1.2}
        draw_bars(axes, bars[over], bottom[over], width, **frame)
    near = limit is not None and limit <= _FAR * max(peak, 1)
    top = max(peak, limit if limit is not None and near else 0, 1)
    axes.set_ylim(0, top * 1.25)
    axes.set_xlim(-0.6, len(held) - 0.4)
    if limit is not None:
        if near:
            axes.axhline(limit, color="black", linewidth=0.8, linestyle="--")
        _label_limit(axes, len(held) - 0.45, top, limit, peak)
    bytes_axis(axes, "memory")
    axes.yaxis.set_label_coords(-0.5 / inches, 0.5)
    _, turned, step = _labels(held, inches)
    places, labels = range(0, len(held), step), [_label(stages) for stages in held[::step]]
    axes.set_xticks(places, labels, rotation=90 if turned else 0)
    axes.set_xlabel("stages of a device", labelpad=2)
    axes.tick_params(axis="x", length=0)


def describe_memory(plan: Plan, held: tuple[int, ...]) -> str:
    """What fills a device that holds these stages, in words."""
    parts = device_parts([plan.stages[s] for s in held])
    words = [f"{name} {format_bytes(size)}" for name, size in parts.items() if size]
    whole = f"{stages_text(held)}: {format_bytes(sum(parts.values()))}"
    return ", ".join([whole, *words])


def _label_limit(axes: Axes, right: float, top: float, limit: int, peak: float) -> None:
    """The limit, at the line where that is the highest that is drawn."""
    how = ", exceeded" if peak > limit else "" if top == limit else ", far above"
    look: Any = {"ha": "right", "va": "bottom", "color": RED if peak > limit else "black"}
    axes.text(right, top * 1.03, f"limit {format_bytes(limit)}{how}", size=SMALL, **look)
