"""Which stages each device holds, and which of the microbatches it gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from partopt.errors import PartoptError

# S   stages; P   devices of one pipeline; v   stages that a device holds, its chunks, S = v P
# d   pipelines side by side, each with its share of the microbatches
# p   position of a device in its pipeline, 0..P-1
# r   replicas of a stage; microbatch g is worked on by replica g mod r

STRAIGHT = "straight"  # stage s on device s, replicated as the plan says
LOOPED = "looped"  # stages s, s + P, s + 2P, .. on device s
VEE = "vee"  # stages s and 2P-1-s on device s
# two copies of P stages, one from each end: device p holds stages p and P-1-p
MIRRORED = "mirrored"
CHUNKS = {STRAIGHT: 1, VEE: 2, MIRRORED: 2}  # v, where the shape says


@dataclass(frozen=True, eq=False)
class Layout:
    """A plan as a schedule sees it.

    `ranks[s][k]` is the rank of replica k of stage s; `microbatches` pass through in all;
    `recompute[s]` tells whether stage s keeps its input alone, `tied[s]` whether it exchanges
    gradients with other stages; `warmup[s]` are the forwards that each replica of stage s does
    before its first backward, for schedules that take it.
    """

    ranks: Sequence[Sequence[int]]
    devices: int
    microbatches: int
    recompute: Sequence[bool] = ()
    warmup: Sequence[int] | None = None
    tied: Sequence[bool] = ()

    def exchanges(self, s: int) -> bool:
        """Whether stage s exchanges gradients, over its replicas or with other stages."""
        return len(self.ranks[s]) > 1 or (bool(self.tied) and self.tied[s])

    @property
    def replicas(self) -> list[int]:
        """r of each stage."""
        return [len(ranks) for ranks in self.ranks]


class Place(NamedTuple):
    """One device in its pipeline: what a schedule needs to know to write its row.

    `M` microbatches pass through each of its chunks; `warmup` forwards come before its first
    backward, in schedules that take it.
    """

    p: int
    P: int
    v: int
    M: int
    warmup: int
    recompute: bool


class Chunk(NamedTuple):
    """A stage on a device: that device is replica `k` of stage `stage`."""

    stage: int
    k: int


def own_microbatches(microbatches: int, replicas: int, k: int) -> int:
    """How many of the microbatches g have g mod r = k."""
    return (microbatches - k + replicas - 1) // replicas


def ranks_of(shape: str, P: int, v: int = 1, d: int = 1) -> list[list[int]]:
    """The ranks of every stage of d pipelines of P devices side by side.

    They are P d consecutive ranks, replicas next to each other.
    """
    devices = [list(range(p * d, (p + 1) * d)) for p in range(P)]
    if shape == MIRRORED:
        return [
            [rank for pair in zip(devices[p], devices[P - 1 - p], strict=True) for rank in pair]
            for p in range(P)
        ]
    if shape == VEE:
        return [*devices, *reversed(devices)]
    return devices * v


def chunks_of(layout: Layout, shape: str, uneven: bool = False) -> dict[int, list[Chunk]]:
    """For every rank with work the stages that it holds, chunk 0 first.

    Raises PartoptError where they do not lie as `shape` says or, unless `uneven`, are not all
    replicated alike.
    """
    if not uneven and len(set(layout.replicas)) > 1:
        raise PartoptError(
            "the schedule needs equally many replicas of every stage",
            "plan with `replication=uniform` or `replication=none`",
            code="unequal-replicas",
            replicas=layout.replicas,
        )
    held: dict[int, list[Chunk]] = {}
    for s, ranks in enumerate(layout.ranks):
        for k, rank in enumerate(ranks):
            held.setdefault(rank, []).append(Chunk(s, k))
    if shape == MIRRORED:
        for chunks in held.values():
            chunks.sort(key=lambda chunk: chunk.k % 2)
    fits, needed = _fits_shape(layout, shape, held)
    if not fits:
        raise PartoptError(
            f"the schedule needs {needed}; the stages of the plan lie otherwise",
            "plan for this schedule with `solve`",
            code="wrong-layout",
            shape=shape,
        )
    return held


def _fits_shape(layout: Layout, shape: str, held: dict[int, list[Chunk]]) -> tuple[bool, str]:
    """Whether the stages lie as `shape` says, and what it needs, in words."""
    S, v = len(layout.ranks), len(held[layout.ranks[0][0]])
    if shape == STRAIGHT:
        return v == 1 and all(
            len(chunks) == 1 for chunks in held.values()
        ), "one stage on each device"
    if shape == LOOPED:
        right = S % v == 0 and all(
            list(ranks) == list(layout.ranks[s % (S // v)]) for s, ranks in enumerate(layout.ranks)
        )
        return right and len(held) * v == sum(
            layout.replicas
        ), "stages s, s + P, s + 2P, .. on the devices of stage s"
    if shape == VEE:
        right = (
            S % 2 == 0
            and v == 2
            and all(
                list(ranks) == list(layout.ranks[S - 1 - s]) for s, ranks in enumerate(layout.ranks)
            )
        )
        return right and len(held) * v == sum(
            layout.replicas
        ), "stages s and 2P-1-s on the same devices"
    right = all(
        len(chunks) == 2
        and chunks[0].stage + chunks[1].stage == S - 1
        and [chunk.k % 2 for chunk in chunks] == [0, 1]
        for chunks in held.values()
    )
    return right, "two copies of every stage, stages s and P-1-s on each device"
