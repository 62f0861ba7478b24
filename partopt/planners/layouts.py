"""Layouts: the orders in which a pipeline passes the devices of a cluster.

A layout is a row of places; the ranks of a place stand side by side. The members of the outermost
level are cut into groups. All members of a group do the same side by side: a layout of the levels
inside. The pipeline passes one group after the other. With groups of one member the ranks are in
their order; with one group of all members there are copies of one pipeline.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, product

import numpy as np

from partopt.cost.problem import CONTIGUOUS, NESTED, Assignment, Partition, are_consecutive
from partopt.cost.ranks import copies_of, join, spaced
from partopt.documents.topology import Topology

PLACES = 64  # of a layout, at most
FEW = 6  # members of a level up to which all ways to cut it into groups are tried
SINGLE = 4096  # devices up to which plans of others are on places of one
PAIRS = 16  # up to which pairs of unequal groups are

Places = tuple[Sequence[int], ...]  # the ranks at every place
Bounds = tuple[int, ...]  # the S + 1 boundaries of S stages


def layouts_of(topology: Topology, most: int = PLACES) -> list[Places]:
    """The layouts of at most `most` places; of larger topologies a whole server is a place too."""
    sizes = [level.size for level in topology.levels if level.size > 1] or [1]
    whole = topology.devices > most
    alike = layouts(sizes, most, whole, alike=True)  # always among them
    found = dict.fromkeys([*layouts(sizes, most, whole), *alike])
    fitting = [places for places in found if len(places) <= most]
    return fitting or [(range(topology.devices),)]


def layouts(sizes: Sequence[int], most: int, whole: bool, alike: bool = False) -> list[Places]:
    """The layouts of levels of these sizes, innermost first; no more than `most` of them.

    None has more places than that. Inside a server it does not matter who stands beside whom. With
    `whole` a place may be one, or of a server of more devices than that an equal part; with `alike`
    groups are equal.
    """
    if len(sizes) == 1:
        size = sizes[0]
        part = next(w for w in range(1, size + 1) if size % w == 0 and size // w <= most)
        widths = dict.fromkeys([1, part, size] if whole else [1])
        return [tuple(range(k, k + w) for k in range(0, size, w)) for w in widths]
    inner, inside = layouts(sizes[:-1], most, whole, alike), math.prod(sizes[:-1])
    members = sizes[-1]
    # one member alone, and the others idle
    found = dict.fromkeys(inner) if members > 1 else {}
    ways = [groups for groups in groupings(members) if not alike or len(set(groups)) == 1]
    for groups in sorted(ways, key=lambda groups: (_odd(groups, members), groups)):
        firsts = [end - group for end, group in zip(accumulate(groups), groups, strict=True)]
        free = len(groups) < 3 and not alike
        same = ((layout,) * len(groups) for layout in inner)
        for chosen in product(inner, repeat=len(groups)) if free else same:
            places = tuple(
                copies_of(place, first, group, inside)
                for first, group, layout in zip(firsts, groups, chosen, strict=True)
                for place in layout
            )
            if len(places) <= most:
                found.setdefault(places)
            if len(found) >= most:
                return list(found)
    return list(found)


def groupings(members: int) -> list[tuple[int, ...]]:
    """The ways to write a number of members as a sum, in order.

    Of many members these are equal groups, and pairs of groups.
    """
    if members <= FEW:
        return [(members,)] + [
            (first, *rest) for first in range(1, members) for rest in groupings(members - first)
        ]
    equal = [(d,) * (members // d) for d in range(1, members + 1) if members % d == 0]
    pairs = range(1, members) if members <= PAIRS else ()
    return equal + [(d, members - d) for d in pairs if 2 * d != members]


def _odd(groups: Sequence[int], members: int) -> int:
    """How far a grouping is from one group and from groups of one member."""
    return min(len(groups), members + 1 - len(groups))


@dataclass(frozen=True)
class Shape:
    """Stages on the places of a layout.

    `bounds` are the S + 1 boundaries of its stages; of every stage `counts` says how many places it
    has, `idle` how many places before it have no work, and `recompute` whether it recomputes: None
    as the problem says.
    """

    places: Places
    bounds: Bounds
    counts: tuple[int, ...]
    idle: tuple[int, ...]
    recompute: tuple[bool | None, ...]

    @property
    def stages(self) -> int:
        """S."""
        return len(self.counts)

    @property
    def parts(
        self,
    ) -> tuple[Places, Bounds, tuple[int, ...], tuple[int, ...], tuple[bool | None, ...]]:
        """Its places, bounds, counts, idle places, and which stages recompute."""
        return self.places, self.bounds, self.counts, self.idle, self.recompute

    @property
    def spans(self) -> list[tuple[int, int]]:
        """The places [first, end) of every stage."""
        ends = accumulate(i + r for i, r in zip(self.idle, self.counts, strict=True))
        return [(end - r, end) for end, r in zip(ends, self.counts, strict=True)]

    @property
    def ranks(self) -> list[Sequence[int]]:
        """The ranks of every stage."""
        return [ranks_of(self.places[first:end]) for first, end in self.spans]

    def partition(self) -> Partition:
        """The stages on their ranks."""
        ranks = self.ranks
        stages = map(Assignment, self.bounds, self.bounds[1:], ranks, self.recompute)
        return Partition(CONTIGUOUS if are_consecutive(ranks) else NESTED, tuple(stages))

    def on_cells(self, bounds: Sequence[int], cells: Sequence[int]) -> Shape:
        """The shape whose boundaries, numbers of `bounds`, are numbers of `cells` instead."""
        number = {cell: k for k, cell in enumerate(cells)}
        return replace(self, bounds=tuple(number[bounds[b]] for b in self.bounds))


@cache
def ranks_of(places: Places) -> Sequence[int]:
    """The ranks of some places, evenly spaced ones as a range."""
    return join(places)


def shape_of(partition: Partition, devices: int) -> Shape:
    """The shape of a partition whose devices have one stage, on places of one rank.

    On more than `SINGLE` devices places are as wide as they may be for the plan.
    """
    counts = tuple(len(stage.ranks) for stage in partition.stages)
    if partition.family == CONTIGUOUS:
        order, idle, end = [*range(devices)], [], 0
        for stage in partition.stages:
            idle.append(stage.ranks[0] - end)
            end = stage.ranks[-1] + 1
    else:
        used = [rank for stage in partition.stages for rank in stage.ranks]
        order, idle = used + sorted(set(range(devices)) - set(used)), [0] * len(counts)
    bounds = (0, *(stage.stop for stage in partition.stages))
    modes = tuple(stage.recompute for stage in partition.stages)
    w = math.gcd(*counts, *idle, devices) if devices > SINGLE else 1
    places = tuple(map(spaced, np.array(order).reshape(-1, w)))
    counts, gaps = (tuple(many // w for many in widths) for widths in (counts, idle))
    return Shape(places, bounds, counts, gaps, modes)
