"""A cluster as nested boxes: devices in servers in racks, and where each lies on a sheet."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from partopt.documents.plan import Plan
from partopt.documents.topology import Topology

# all lengths in inches; a box is placed by its upper left corner, down from the top of the cluster

FOLDED = 64  # devices from which on equal neighbours are drawn once
HEAD, BUS, PAD, GAP = 0.13, 0.11, 0.05, 0.04  # above the rows, above each row, within, between
_SHOWN = 256  # devices that are drawn
_ACROSS = 8  # devices beside each other, unless they are many
_NARROWEST = 0.9  # of a box with a title


@dataclass
class Box:
    """A component of level k: number c of its kind, which stands for `times` of its like.

    A device is of level 0. `rows` are its members as they lie; `hidden` of them are not drawn.
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

    def members(self) -> Iterator[Box]:
        """The boxes in it."""
        for row in self.rows:
            yield from row

    def within(self) -> Iterator[Box]:
        """Itself and all boxes in it, outer ones first."""
        yield self
        for member in self.members():
            yield from member.within()


def titles_of(box: Box, topology: Topology) -> list[str]:
    """`server 3: ranks 24-31, and 2 like it`, and shorter forms."""
    size, level = topology.group_size(box.k), topology.levels[box.k - 1]
    name = level.name if topology.devices == size else f"{level.name} {box.c}"
    ranks = f"{box.c * size}-{(box.c + 1) * size - 1}" if size > 1 else str(box.c)
    like = f", and {box.times - 1} like it" if box.times > 1 else ""
    hidden = f", {box.hidden} more not drawn" if box.hidden else ""
    return [f"{name}: ranks {ranks}{like}{hidden}", f"{name}{like}{hidden}"]


def boxes_of(plan: Plan, width: float) -> Box:
    """The cluster of a plan in at most `width` inches, each box at its place."""
    topology, held = plan.topology, plan.stages_by_rank()
    stages = [tuple(held.get(rank, ())) for rank in range(topology.devices)]
    box = _box(topology, topology.outermost_level, 0, stages)
    shown = sum(each.k == 0 for each in box.within())
    cell = 0.3 if shown <= 32 else 0.22 if shown <= 128 else 0.16
    _size(box, width, cell)
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
    limit = max(1, _SHOWN // size)
    for member in range(c * count, (c + 1) * count):
        own, before = (stages[each * size : (each + 1) * size] for each in (member, member - 1))
        fold = topology.devices >= FOLDED and k > 1 and member > c * count and own == before
        if fold and box.rows:
            box.rows[0][-1].times += 1
        elif box.rows and len(box.rows[0]) >= limit:
            box.hidden = (c + 1) * count - member
            break
        else:
            new = _box(topology, k - 1, member, stages)
            box.rows = [[*box.rows[0], new]] if box.rows else [[new]]
    return box


def _size(box: Box, width: float, cell: float) -> None:
    """Lay the members of a box in rows of at most `width` inches, and measure it."""
    if box.k == 0:
        box.width, box.height = cell, min(cell, 0.2)
        return
    members, room = list(box.members()), width - 2 * PAD
    for member in members:
        _size(member, room, cell)
    each = max(member.width for member in members) + GAP
    across = max(1, min(len(members), int((room + GAP) / each)))
    across = min(across, _ACROSS) if len(members) <= 2 * _ACROSS else across
    across = -(-len(members) // -(-len(members) // across))  # in rows of equal length
    box.rows = [members[at : at + across] for at in range(0, len(members), across)]
    rows = [max(member.height for member in row) + BUS + GAP for row in box.rows]
    box.width = max(each * across - GAP + 2 * PAD, _NARROWEST)
    box.height = HEAD + sum(rows) - GAP + PAD


def _place(box: Box, left: float, top: float) -> None:
    box.left, box.top = left, top
    down = top + HEAD
    for row in box.rows:
        right = left + PAD
        for member in row:
            _place(member, right, down + BUS)
            right += max(each.width for each in box.members()) + GAP
        down += BUS + GAP + max(member.height for member in row)
