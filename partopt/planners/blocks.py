"""Ranks of the stages of pipelines inside the members of a level, replicated over them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from partopt.cost.problem import Assignment


class Block(NamedTuple):
    """Layers [start, stop) on `members` members of a level, from `first` on.

    Each member has a copy of the pipeline `inside`; a device has none.
    """

    start: int
    stop: int
    first: int
    members: int
    inside: Sequence[Block] = ()
    recompute: bool | None = None


def stages_of(blocks: Sequence[Block], sizes: Sequence[int]) -> list[Assignment]:
    """The stages of a pipeline of level k = len(sizes) - 1.

    `sizes` are the ranks of a component of every level, beginning with 1 for a device. Copies take
    turns first: replica q of a pipeline inside m members is q*m + c on member c.
    """
    placed = []
    for block in blocks:
        stages = (
            stages_of(block.inside, sizes[:-1])
            if block.inside
            else [Assignment(block.start, block.stop, [0], block.recompute)]
        )
        for stage in stages:
            ranks = [
                (block.first + copy) * sizes[-2] + rank
                for rank in stage.ranks
                for copy in range(block.members)
            ]
            placed.append(Assignment(stage.start, stage.stop, ranks, stage.recompute))
    return placed
