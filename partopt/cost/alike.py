"""Pipelines that are alike: one stands for all where they meet in all-reduces alone.

Microbatches g and g + R take the same ranks. Of 0..R-1 those are one pipeline whose ranks lie in
the same members of the outermost level: the messages of one keep no port of another busy. Where
all pipelines lie alike, one does at any time what any other does.

    R   common multiple of the replicas r of the stages
    d   pipelines; n = R / d microbatches of one
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from partopt.cost.compiled import compiled
from partopt.cost.ranks import array_of
from partopt.documents.topology import Topology

MOST = 20_000_000  # ranks that are compared


class Alike(NamedTuple):
    """One pipeline: the ranks of its stages, numbered in the `topology` of its members alone."""

    copies: int
    ranks: tuple[tuple[int, ...], ...]
    topology: Topology


def one_of_alike(
    ranks: Sequence[Sequence[int]], topology: Topology, microbatches: int | None
) -> Alike | None:
    """The first of the pipelines that are alike; None where they are not, or there is one.

    An iteration of so many microbatches has to be as many for every one.
    """
    level, replicas = topology.outermost_level, np.array(list(map(len, ranks)))
    R = math.lcm(*replicas.tolist())
    if level == 0 or topology.levels[level - 1].bus or (microbatches or 0) % R:
        return None
    if R == 1 or len(ranks) * R > MOST:
        return None
    size = topology.group_size(level - 1)
    at = np.array([np.tile(array_of(group), R // len(group)) for group in ranks])
    members = at // size
    pipeline = np.arange(topology.devices // size)
    unite(members, pipeline)
    of_first = pipeline[members[0]]
    counts = np.bincount(of_first)
    counts = counts[counts > 0]
    n, d = int(counts[0]), len(counts)
    if d == 1 or (counts != n).any():
        return None
    rows = np.argsort(of_first, kind="stable").reshape(d, n)
    places, lies = at[:, rows] % size, np.moveaxis(members[:, rows], 1, 0).reshape(d, -1)
    steps = np.sign(np.diff(lies[:, np.argsort(lies[0], kind="stable")], axis=1))
    if (places != places[:, :1]).any() or (steps != steps[0]).any():
        return None
    kept, label = np.unique(lies[0], return_inverse=True)
    taken = label.reshape(len(ranks), n) * size + places[:, 0]
    first = [list(dict.fromkeys(of_stage)) for of_stage in taken.tolist()]
    for of_stage, in_turn, r in zip(taken, first, replicas.tolist(), strict=True):
        again = np.tile(in_turn, -(-n // len(in_turn)))[:n]
        if len(in_turn) * d != r or (again != of_stage).any():
            return None
    levels = list(topology.levels)
    levels[level - 1] = replace(levels[level - 1], size=len(kept))
    smaller = replace(topology, levels=levels, devices=len(kept) * size)
    return Alike(d, tuple(map(tuple, first)), smaller)


@compiled()
def unite(members, pipeline):  # type: ignore[no-untyped-def]
    """Number the members by the first one of their pipeline; those of a column are in one."""
    for column in range(members.shape[1]):
        one = members[0, column]
        while pipeline[one] != one:
            pipeline[one] = pipeline[pipeline[one]]
            one = pipeline[one]
        for stage in range(1, members.shape[0]):
            other = members[stage, column]
            while pipeline[other] != other:
                pipeline[other] = pipeline[pipeline[other]]
                other = pipeline[other]
            one, other = min(one, other), max(one, other)
            pipeline[other] = one
    for member in range(len(pipeline)):
        pipeline[member] = pipeline[pipeline[member]]
