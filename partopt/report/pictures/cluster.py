"""The cluster of a plan as nested boxes: devices in servers in racks, links as thick as busy."""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from partopt.documents.plan import Plan
from partopt.documents.topology import Topology
from partopt.report.looks import ink, stage_colour
from partopt.report.phrases import link_text
from partopt.report.pictures.sheet import (
    FAINT,
    GREY,
    MIDDLE,
    RED,
    SMALL,
    Sheet,
    first_fit,
    fit,
    text_width,
)

# k   level of the topology, from 1; c   a component of level k - 1, which has a port of level k

Port = tuple[int, int]  # k, c
Message = tuple[int, int, float]  # sender, receiver, and the bytes of a microbatch between them
_PAIRS = 4096  # of ranks that send to each other, by which a cut is looked at at most
_FOLDED = 64  # devices from which on equal neighbours are drawn once
_SHOWN = 256  # devices that are drawn
_ACROSS = 8  # devices beside each other, unless they are many
# inches: above the rows, above every row, within, between; and the least width with a title
_HEAD, _BUS, _PAD, _GAP, _NARROWEST = 0.13, 0.11, 0.05, 0.04, 0.9
_THIN, _THICK = 0.3, 4.0  # points of a link that is never busy, and of one that always is
_NUMBER = 5.5  # points of a stage's number


def port_use(plan: Plan) -> dict[Port, float]:
    """The share of the time for which ports (k, c) are busy; those without traffic are left out.

    A message takes the ports of the level at which its ends part, and on a bus those of all its
    members. An all-reduce takes them for as long as its algorithm does; exchanges of tied
    parameters are not counted.
    """
    cuts = (_sent(plan, cut) for cut in range(1, len(plan.stages)))
    busy = _busy(plan, itertools.chain(*cuts))
    for port, seconds in _reduced_s(plan):
        busy[port] = busy.get(port, 0.0) + seconds / plan.predicted.period_s
    return busy


def cut_use(plan: Plan) -> dict[int, float]:
    """The share of the time for which every cut keeps a port busy, the busiest one."""
    return {
        cut: max(_busy(plan, _sent(plan, cut)).values(), default=0.0)
        for cut in range(1, len(plan.stages))
    }


def _sent(plan: Plan, cut: int) -> Iterator[Message]:
    """Activations over a cut, and the gradients that come back."""
    first, second = plan.stages[cut - 1], plan.stages[cut]
    pairs = min(_PAIRS, math.lcm(first.replicas, second.replicas))
    for microbatch in range(pairs):
        sender, receiver = first.rank_of(microbatch), second.rank_of(microbatch)
        yield sender, receiver, first.output_bytes / pairs
        yield receiver, sender, second.gradient_bytes / pairs


def _reduced_s(plan: Plan) -> Iterator[tuple[Port, float]]:
    """The ports of every all-reduce, and the seconds of a microbatch for which it takes them."""
    topology = plan.topology
    levels = {level.name: k for k, level in enumerate(topology.levels, 1)}
    for taken in plan.predicted.allreduce_ports or []:
        k, ranks = levels[taken.level], plan.stages[taken.stage].ranks
        members = {rank // topology.group_size(k - 1) for rank in ranks}
        joined = Counter(c // topology.levels[k - 1].size for c in members)
        for c in members:
            if joined[c // topology.levels[k - 1].size] > 1:
                yield (k, c), taken.seconds


def _busy(plan: Plan, messages: Iterable[Message]) -> dict[Port, float]:
    """The share of the time that messages take of ports, in the busier direction of each."""
    topology = plan.topology
    out: dict[Port, float] = defaultdict(float)
    into: dict[Port, float] = defaultdict(float)
    shared: dict[Port, float] = defaultdict(float)  # of a bus, by the component that it joins
    for sender, receiver, size in messages:
        k = topology.common_level(sender, receiver)
        if k and size:
            members = topology.group_size(k - 1)
            out[k, sender // members] += size
            into[k, receiver // members] += size
            shared[k, sender // topology.group_size(k)] += size
    busy = {}
    for k, c in sorted(out.keys() | into.keys()):
        level = topology.levels[k - 1]
        moved = shared[k, c // level.size] if level.bus else max(out[k, c], into[k, c])
        seconds = moved / (level.bandwidth_bytes_per_s * level.links)
        busy[k, c] = seconds / plan.predicted.period_s
    return busy


def use_lines(plan: Plan, used: dict[Port, float]) -> list[str]:
    """Every level, its links, and the time that its bytes take of the port that has the most.

    Bytes are divided by the rate of the port: of messages and all-reduces that have to wait the
    share can exceed 100 %.
    """
    lines = []
    for k, level in enumerate(plan.topology.levels, 1):
        if level.size > 1:
            most = max(
                (share for (port_level, _), share in used.items() if port_level == k), default=0.0
            )
            lines.append(f"{level.name} {link_text(level)}: bytes over rate {most:.1%} of the time")
    return lines


@dataclass
class Box:
    """A component of level k: number c of its kind, which stands for `times` of its like.

    A device is of level 0. `rows` are its members as they lie; `hidden` of them are not drawn. It
    is placed by its upper left corner, in inches down from the top of the cluster.
    """

    k: int
    c: int
    times: int = 1
    rows: list[list[Box]] = field(default_factory=list)
    hidden: int = 0
    width: float = 0.0
    height: float = 0.0
    left: float = 0.0
    top: float = 0.0

    def within(self) -> Iterator[Box]:
        """Itself and all boxes in it, outer ones first."""
        yield self
        for member in itertools.chain(*self.rows):
            yield from member.within()


def boxes_of(plan: Plan, width: float) -> Box:
    """The cluster of a plan in at most `width` inches, every box at its place."""
    topology, held = plan.topology, plan.stages_by_rank()
    stages = [tuple(held.get(rank, ())) for rank in range(topology.devices)]
    box = _box(topology, topology.outermost_level, 0, stages)
    shown = sum(inner.k == 0 for inner in box.within())
    _size(box, width, 0.3 if shown <= 32 else 0.22 if shown <= 128 else 0.16)
    _place(box, 0.0, 0.0)
    return box


def _box(topology: Topology, k: int, c: int, stages: Sequence[tuple[int, ...]]) -> Box:
    """The box of component c of level k; levels of one member have none."""
    while k > 1 and topology.levels[k - 1].size == 1:
        k -= 1
    box = Box(k, c)
    if k == 0:
        return box
    size, count = topology.group_size(k - 1), topology.levels[k - 1].size
    members: list[Box] = []
    for member in range(c * count, (c + 1) * count):
        of_member, of_previous = (
            stages[number * size : (number + 1) * size] for number in (member, member - 1)
        )
        if members and topology.devices >= _FOLDED and k > 1 and of_member == of_previous:
            members[-1].times += 1
        elif members and len(members) >= max(1, _SHOWN // size):
            box.hidden = (c + 1) * count - member
            break
        else:
            members.append(_box(topology, k - 1, member, stages))
    box.rows = [members]
    return box


def _size(box: Box, width: float, cell: float) -> None:
    """Lay the members of a box in rows of at most `width` inches, and measure it."""
    if box.k == 0:
        box.width, box.height = cell, min(cell, 0.2)
        return
    [members], room = box.rows, width - 2 * _PAD
    for member in members:
        _size(member, room, cell)
    pitch = max(member.width for member in members) + _GAP
    across = max(1, min(len(members), int((room + _GAP) / pitch)))
    across = min(across, _ACROSS) if len(members) <= 2 * _ACROSS else across
    across = -(-len(members) // -(-len(members) // across))  # in rows of equal length
    box.rows = [members[at : at + across] for at in range(0, len(members), across)]
    rows = [max(member.height for member in row) + _BUS + _GAP for row in box.rows]
    box.width = max(pitch * across - _GAP + 2 * _PAD, _NARROWEST)
    box.height = _HEAD + sum(rows) - _GAP + _PAD


def _place(box: Box, left: float, top: float) -> None:
    box.left, box.top = left, top
    down, pitch = top + _HEAD, max((m.width for row in box.rows for m in row), default=0.0) + _GAP
    for row in box.rows:
        for place, member in enumerate(row):
            _place(member, left + _PAD + place * pitch, down + _BUS)
        down += _BUS + _GAP + max(member.height for member in row)


def draw(sheet: Sheet, plan: Plan, used: dict[Port, float], bound: int) -> None:
    """Devices in the colours of their stages, red around those of the stage that is `bound`."""
    box = boxes_of(plan, sheet.width - 0.2)
    axes = sheet.axes(0.1, box.width, box.height)
    axes.set_xlim(0, box.width)
    axes.set_ylim(box.height, 0)
    axes.set_axis_off()
    for inner in box.within():
        if inner.k == 0:
            held = [s for s, stage in enumerate(plan.stages) if inner.c in stage.ranks]
            _draw_device(axes, inner, held, bound)
        else:
            _draw_group(axes, plan.topology, inner, used)


def _draw_device(axes: Axes, box: Box, held: list[int], bound: int) -> None:
    """A device in stripes of the colours of its stages; an idle one is empty."""
    stripe = box.width / max(1, len(held))
    for place, s in enumerate(held):
        left, colour = box.left + place * stripe, stage_colour(s)
        shape = Rectangle((left, box.top), stripe, box.height, facecolor=colour)
        shape.set(edgecolor="white", linewidth=0.3)
        axes.add_patch(shape)
        if text_width(str(s), _NUMBER) <= stripe - 0.02:
            middle = left + stripe / 2, box.top + box.height / 2
            axes.text(*middle, str(s), size=_NUMBER, color=ink(colour), **MIDDLE)
    frame = Rectangle((box.left, box.top), box.width, box.height, fill=not held, facecolor=FAINT)
    binds = bound in held
    frame.set(edgecolor=RED if binds else GREY, linewidth=1.5 if binds else 0.3, zorder=4)
    axes.add_patch(frame)


def _draw_group(axes: Axes, topology: Topology, box: Box, used: dict[Port, float]) -> None:
    """The frame of a group and its title, and the links of its members to each other."""
    frame = Rectangle((box.left, box.top), box.width, box.height, fill=False)
    frame.set(edgecolor=GREY, linewidth=0.6 if box.times == 1 else 1.4)
    axes.add_patch(frame)
    size, level = topology.group_size(box.k), topology.levels[box.k - 1]
    name = level.name if topology.devices == size else f"{level.name} {box.c}"
    ranks = f"{box.c * size}-{(box.c + 1) * size - 1}" if size > 1 else str(box.c)
    like = f", and {box.times - 1} like it" if box.times > 1 else ""
    like += f", {box.hidden} more not drawn" if box.hidden else ""
    room = box.width - 2 * _PAD
    title = first_fit([f"{name}: ranks {ranks}{like}"], room, SMALL)
    title = title or fit(f"{name}{like}", room, SMALL)
    axes.text(box.left + _PAD, box.top + 0.02, title, size=SMALL, ha="left", va="top")
    lines = [row[0].top - _BUS + _GAP for row in box.rows]
    trunk = box.left + _PAD / 2
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
