"""The cluster of a plan: devices in the colours of their stages, links as thick as busy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from partopt.documents.plan import Plan
from partopt.report.pictures.boxes import BUS, GAP, PAD, Box, titles_of
from partopt.report.pictures.chain import binding_of
from partopt.report.pictures.colours import ink, stage_colour
from partopt.report.pictures.lettering import fit, text_width
from partopt.report.pictures.look import FAINT, GREY, RED, SMALL
from partopt.report.pictures.port_use import Port
from partopt.report.topology import link_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_THIN, _THICK = 0.3, 4.0  # points of a link that is never busy, and of one that always is
_NUMBER = 5.5  # points of a stage's number


def draw_cluster(axes: Axes, plan: Plan, box: Box, used: dict[Port, float]) -> None:
    """Draw `box`, with axes in inches from its lower left corner."""
    axes.set_xlim(0, box.width)
    axes.set_ylim(box.height, 0)
    axes.set_axis_off()
    for each in box.within():
        if each.k == 0:
            _draw_device(axes, plan, each)
        else:
            _draw_group(axes, plan, each, used)


def use_lines(plan: Plan, used: dict[Port, float]) -> list[str]:
    """Each level, its links, and the time that its bytes take of the port that has the most.

    That is over the rate of the port, with all-reduces as rings: where they go otherwise it may be
    more than there is.
    """
    lines = []
    for k, level in enumerate(plan.topology.levels, 1):
        if level.size > 1:
            most = max((share for (own, _), share in used.items() if own == k), default=0.0)
            lines.append(f"{level.name} {link_text(level)}: bytes over rate {most:.1%} of the time")
    return lines


def _draw_device(axes: Axes, plan: Plan, box: Box) -> None:
    """A device in stripes of the colours of its stages; an idle one is empty."""
    from matplotlib.patches import Rectangle

    held = [s for s, stage in enumerate(plan.stages) if box.c in stage.ranks]
    corner, stripe = (box.left, box.top), box.width / max(1, len(held))
    for place, s in enumerate(held):
        left = box.left + place * stripe
        colour = stage_colour(s)
        shape = Rectangle((left, box.top), stripe, box.height, facecolor=colour)
        shape.set(edgecolor="white", linewidth=0.3)
        axes.add_patch(shape)
        if text_width(str(s), _NUMBER) <= stripe - 0.02:
            middle = left + stripe / 2, box.top + box.height / 2
            look: Any = {"ha": "center", "va": "center_baseline", "color": ink(colour)}
            axes.text(*middle, str(s), size=_NUMBER, **look)
    binds = binding_of(plan).stage in held
    frame = Rectangle(corner, box.width, box.height, fill=not held, facecolor=FAINT)
    frame.set(edgecolor=RED if binds else GREY, linewidth=1.5 if binds else 0.3, zorder=4)
    axes.add_patch(frame)


def _draw_group(axes: Axes, plan: Plan, box: Box, used: dict[Port, float]) -> None:
    """The frame of a group and its title, and the links of its members to each other."""
    from matplotlib.patches import Rectangle

    frame = Rectangle((box.left, box.top), box.width, box.height, fill=False)
    frame.set(edgecolor=GREY, linewidth=0.6 if box.times == 1 else 1.4)
    axes.add_patch(frame)
    titles, room = titles_of(box, plan.topology), box.width - 2 * PAD
    title = next((each for each in titles if text_width(each, SMALL) <= room), titles[-1])
    title = fit(title, room, SMALL)
    axes.text(box.left + PAD, box.top + 0.02, title, size=SMALL, ha="left", va="top")
    lines = [row[0].top - BUS + GAP for row in box.rows]
    trunk = box.left + PAD / 2
    for row, line in zip(box.rows, lines, strict=True):
        first = trunk if len(box.rows) > 1 else row[0].left + row[0].width / 2
        last = row[-1].left + row[-1].width / 2
        axes.plot([first, last], [line, line], color=GREY, linewidth=0.6)
        for member in row:
            share = min(1.0, used.get((box.k, member.c), 0.0))
            middle = member.left + member.width / 2
            width = _THIN + (_THICK - _THIN) * share
            axes.plot([middle] * 2, [line, member.top], color="black", lw=width, zorder=3)
    if len(lines) > 1:
        axes.plot([trunk, trunk], [lines[0], lines[-1]], color=GREY, linewidth=0.6)
