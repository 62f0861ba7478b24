"""Which stages every device holds, and which of the microbatches it gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from partopt.errors import PartoptError

if TYPE_CHECKING:
    from partopt.documents.plan import Plan

# S   stages; P   devices of one pipeline; v   stages that a device holds, its chunks, S = v P
# d   pipelines side by side, all with their shares of the microbatches
# p   position of a device in its pipeline, 0..P-1
# r   replicas of a stage; microbatch g is worked on by replica g mod r

STRAIGHT = "straight"  # stage s on device s, replicated as the plan says
LOOPED = "looped"  # stages s, s + P, s + 2P, .. on device s
VEE = "vee"  # stages s and 2P-1-s on device s
# two copies of P stages, one from either end: device p holds stages p and P-1-p
MIRRORED = "mirrored"
CHUNKS = {STRAIGHT: 1, VEE: 2, MIRRORED: 2}  # v, where the shape says


@dataclass(frozen=True, eq=False)
class Placement:
    """A plan as a schedule sees it.

    `ranks[s][k]` is the rank of replica k of stage s; `microbatches` pass through in all;
    `recompute[s]` tells whether stage s keeps its input alone, `tied[s]` whether it exchanges
    gradients with other stages; `warmup[s]` are the forwards that a replica of stage s does
    before its first backward, for schedules that take it. `in_turn`: a forward and a backward that
    the schedule joins run one after the other.
    """

    ranks: Sequence[Sequence[int]]
    devices: int
    microbatches: int
    recompute: Sequence[bool] = ()
    warmup: Sequence[int] | None = None
    tied: Sequence[bool] = ()
    in_turn: bool = False

    def exchanges(self, s: int) -> bool:
        """Whether stage s exchanges gradients, over its replicas or with other stages."""
        return len(self.ranks[s]) > 1 or (bool(self.tied) and self.tied[s])

    @property
    def replicas(self) -> list[int]:
        """r of every stage."""
        return [len(ranks) for ranks in self.ranks]


def placement_of(plan: Plan, microbatches: int | None = None) -> Placement:
    """The placement of a plan's stages.

    `microbatches` pass through, by default those of the plan's iteration.
    """
    passing = microbatches or plan.microbatches
    assert passing is not None
    return Placement(
        ranks=[stage.ranks for stage in plan.stages],
        devices=plan.topology.devices,
        microbatches=passing,
        recompute=[stage.recomputes_whole for stage in plan.stages],
        warmup=[stage.warmup for stage in plan.stages],
        tied=[stage.tied_exchange_s > 0 for stage in plan.stages],
        in_turn=plan.schedule in plan.engine.in_turn,
    )


def pipeline_of(plan: Plan, shape: str) -> tuple[int, int, int]:
    """P, v and the microbatches of one of the equal pipelines of a synchronous plan.

    Balanced stages with unequal replicas fill as one pipeline of all devices does, one behind the
    other: 15-1 passes its first 15 microbatches on at once, and the last stage works through them
    alone.
    """
    assert plan.microbatches is not None
    held = plan.stages_by_rank()
    devices, v, S = len(held), len(next(iter(held.values()))), len(plan.stages)
    if len({stage.replicas for stage in plan.stages}) > 1:
        return devices, v, plan.microbatches
    P = S if shape == MIRRORED else S // v
    return P, v, max(1, plan.microbatches * P // devices)


class Place(NamedTuple):
    """One device in its pipeline: what a schedule needs to know to write its row.

    `M` microbatches pass through all of its chunks; `warmup` forwards come before its first
    backward, in schedules that take it.
    """

    p: int
    P: int
    v: int
    M: int
    warmup: int
    recompute: bool


class Chunks(NamedTuple):
    """The stages on devices, n of them: `rank` is replica `k` of stage `stage`.

    They are ordered by rank, those of one rank as its chunks are.
    """

    rank: NDArray[np.int64]  # shape (n,)
    stage: NDArray[np.int32]
    k: NDArray[np.int32]


def ranks_of(shape: str, P: int, v: int = 1, d: int = 1) -> Sequence[Sequence[int]]:
    """The ranks of every stage of d pipelines of P devices side by side.

    They are P d consecutive ranks, replicas next to one another.
    """
    devices = [range(p * d, (p + 1) * d) for p in range(P)]
    if shape == MIRRORED:
        return [
            tuple(
                rank for pair in zip(devices[p], devices[P - 1 - p], strict=True) for rank in pair
            )
            for p in range(P)
        ]
    if shape == VEE:
        return [*devices, *reversed(devices)]
    return devices * v


def chunks_of(placement: Placement, shape: str, uneven: bool = False) -> tuple[Chunks, int]:
    """The stages that the ranks with work hold, and v, how many one of them holds.

    Raises PartoptError where they do not lie as `shape` says or, unless `uneven`, are not all
    replicated alike.
    """
    if not uneven and len(set(placement.replicas)) > 1:
        raise PartoptError(
            "the schedule needs equally many replicas of every stage",
            "plan with `replication=uniform` or `replication=none`",
            code="unequal-replicas",
        )
    chunks = held_chunks(placement, copies=2 if shape == MIRRORED else 1)
    counts = np.bincount(chunks.rank)
    fits, needed = _fits_shape(placement, shape, chunks, counts[counts > 0])
    if not fits:
        raise PartoptError(
            f"the schedule needs {needed}; the stages of the plan lie otherwise",
            "plan for this schedule with `solve`",
            code="wrong-layout",
        )
    return chunks, int(counts.max())


def held_chunks(placement: Placement, copies: int = 1) -> Chunks:
    """The stages that ranks hold: of one rank those of the first of `copies`, in order."""
    replicas = np.array(placement.replicas)
    rank = np.fromiter(chain.from_iterable(placement.ranks), np.int64, int(replicas.sum()))
    stage = np.repeat(np.arange(len(replicas), dtype=np.int32), replicas)
    k = np.arange(len(rank)) - np.repeat(np.cumsum(replicas) - replicas, replicas)
    by_rank = np.lexsort((k % copies, rank))
    return Chunks(rank[by_rank], stage[by_rank], k[by_rank].astype(np.int32))


def _fits_shape(
    placement: Placement, shape: str, chunks: Chunks, counts: NDArray[np.int64]
) -> tuple[bool, str]:
    """Whether the stages lie as `shape` says, and what it needs, in words.

    `counts` are the stages of every rank with work.
    """
    ranks, S, v = list(placement.ranks), len(placement.ranks), int(counts[0])
    even = bool((counts == v).all())
    if shape == STRAIGHT:
        return even and v == 1, "one stage on each device"
    if shape == LOOPED:
        loops = even and S % v == 0 and _are_alike(ranks, ranks[: S // v] * v)
        return loops, "stages s, s + P, s + 2P, .. on the devices of stage s"
    if shape == VEE:
        turns = even and v == 2 and S % 2 == 0 and _are_alike(ranks, ranks[::-1])
        return turns, "stages s and 2P-1-s on the same devices"
    needed = "two copies of every stage, stages s and P-1-s on each device"
    if not even or v != 2:
        return False, needed
    stage, k = chunks.stage.reshape(-1, 2), chunks.k.reshape(-1, 2)
    pairs = bool((stage.sum(axis=1) == S - 1).all()) and bool((k % 2 == [0, 1]).all())
    return pairs, needed


def _are_alike(ranks: Sequence[Sequence[int]], others: Sequence[Sequence[int]]) -> bool:
    pairs = zip(ranks, others, strict=True)
    return all(one is other or np.array_equal(one, other) for one, other in pairs)
