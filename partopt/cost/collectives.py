"""All-reduces over a group of ranks: the algorithm, its seconds, and the ports that it holds.

- `ring` (Patarasuk and Yuan, 2009): every member moves 2(r-1)/r of the data, in 2(r-1) steps, all
  levels at once.
- `tree`: two binary trees with half of the data in either (Sanders, Speck and Träff, 2009), as
  NCCL has them: twice the data, in 2 log2(r) steps, all levels at once.
- `hierarchical` (BlueConnect; Cho et al., 2019): a reduce-scatter inside, an all-reduce of the
  parts across, an all-gather inside, one level after the other; of a group that lies evenly.

A topology names one, or takes the fastest. Trainers exchange gradients in buckets and libraries
choose for every call, so that is the fastest for one bucket.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from partopt.cost.ranks import array_of
from partopt.documents.topology import Level, Topology

# k        level, 1..L innermost first; its members are level-(k-1) components
# n_k      members of the fullest level-k component that hold ranks of the group
# r        ranks of the group; where it lies evenly, n_1 * ... * n_L

ALGORITHMS: Final = ("ring", "tree", "hierarchical")
RING, TREE, HIERARCHICAL = range(3)
FASTEST = -1
# of gradients that are exchanged at once: of torch's DistributedDataParallel (`bucket_cap_mb`)
BUCKET_BYTES = 25 * 2**20


class AllReduce(NamedTuple):
    """An all-reduce over a group of ranks."""

    algorithm: int
    slopes: Mapping[int, float]  # s/byte for which it holds the ports of a level k that it crosses
    latency_s: float

    @property
    def slope(self) -> float:
        """Seconds per byte: of all levels in turn, or of the narrowest."""
        slopes = self.slopes.values()
        return sum(slopes) if self.algorithm == HIERARCHICAL else max(slopes, default=0.0)

    def seconds(self, size_bytes: float) -> float:
        """Seconds for `size_bytes`."""
        return self.slope * size_bytes + self.latency_s


def allreduce_over(ranks: Sequence[int], topology: Topology) -> AllReduce:
    """The all-reduce over `ranks`; of one rank it takes nothing."""
    r, crossed = len(ranks), members_crossed(ranks, topology)
    if not crossed:
        return AllReduce(RING, {}, 0.0)
    byte_s = {k: byte_in_level_s(topology.levels[k - 1], n) for k, n in crossed.items()}
    delay = {k: topology.levels[k - 1].allreduce_latency_s for k in crossed}
    in_turn = math.inf
    if math.prod(crossed.values()) == r:
        in_turn = sum(2 * (n - 1) / n * byte_s[k] for k, n in crossed.items())
    algorithm, _, latency_s = choose(
        algorithm_number(topology),
        r,
        max(byte_s.values()),
        max(delay.values()),
        in_turn,
        float(sum(2 * (n - 1) * delay[k] for k, n in crossed.items())),
    )
    slopes = {k: share(algorithm, r, n) * byte_s[k] for k, n in crossed.items()}
    return AllReduce(algorithm, slopes, latency_s)


def allreduce_s(size_bytes: float, ranks: Sequence[int], topology: Topology) -> float:
    """Seconds for an all-reduce of `size_bytes` over `ranks`."""
    return allreduce_over(ranks, topology).seconds(size_bytes)


def tied_s(size_bytes: float, holders: int, topology: Topology) -> float:
    """Seconds for `holders` stages to exchange the gradients of `size_bytes` of tied parameters.

    An all-reduce; 0 for one holder, and on one device. Where the other holders will lie is not
    known when a stage is chosen, so it is assumed to cross the outermost level on which devices
    part, with one holder on every member of it, all on one bus where the level is a bus.
    """
    k = topology.outermost_level
    if k == 0 or holders == 1:
        return 0.0
    level = topology.levels[k - 1]
    byte_s, delay = byte_in_level_s(level, holders), level.allreduce_latency_s
    allowed = algorithm_number(topology)
    _, slope, latency_s = choose(allowed, holders, byte_s, delay, math.inf, math.inf)
    return float(slope * size_bytes + latency_s)


def byte_in_level_s(level: Level, members: int) -> float:
    """Seconds of a byte through the ports of a level: a bus carries it for all `members` on it."""
    rate = level.allreduce_bandwidth_bytes_per_s * level.links
    return (members if level.bus else 1) / rate


def algorithm_number(topology: Topology) -> int:
    """The algorithm of a topology's all-reduces, or FASTEST."""
    named = topology.allreduce
    return ALGORITHMS.index(named) if named in ALGORITHMS else FASTEST


def members_crossed(ranks: Sequence[int], topology: Topology) -> dict[int, int]:
    """n_k of the levels k at which some two of `ranks` part, by ascending k."""
    crossed, members = {}, array_of(ranks)
    for k, level in enumerate(topology.levels, start=1):
        inside = np.bincount(members // level.size)
        crossed[k], members = int(inside.max()), np.flatnonzero(inside)
    return {k: n for k, n in crossed.items() if n > 1}


def choose(
    allowed: int, r: int, narrowest: float, delay: float, in_turn: float, delays: float
) -> tuple[int, float, float]:
    """The algorithm of an all-reduce over r ranks, its seconds per byte, and its latency.

    `allowed` is an algorithm or FASTEST; a byte takes `narrowest` seconds on the narrowest of the
    levels crossed, and a step the latency `delay`. One level after the other takes `in_turn`
    seconds per byte and `delays` of latency, infinite where ranks do not lie evenly: then a ring
    is taken.
    """
    depth = (r - 1).bit_length()
    ways = (
        (RING, 2 * (r - 1) / r * narrowest, 2 * (r - 1) * delay),
        (TREE, 2 * narrowest, 2.0 * depth * delay),
        (HIERARCHICAL, in_turn, delays),
    )
    tried = [way for way in ways if allowed in (way[0], FASTEST) and way[1] < math.inf]
    return min(tried or ways[:1], key=lambda way: way[1] * BUCKET_BYTES + way[2])


def share(algorithm: int, r: int, n: int) -> float:
    """Bytes that a member of a level moves for a byte reduced, of r ranks and n_k = n."""
    if algorithm == RING:
        return 2 * (r - 1) / r
    return 2.0 if algorithm == TREE else 2 * (n - 1) / n


def tail_share(size_bytes: Any, bucket_bytes: float) -> Any:
    """The share of an exchange of gradients that begins when the backward has ended: a bucket."""
    return 1.0 / np.maximum(1.0, np.ceil(size_bytes / bucket_bytes))


def exposed(seconds: Any, size_bytes: Any, backward_s: Any, bucket_bytes: float) -> Any:
    """Seconds of an exchange of gradients that are left when the backward has ended.

    It begins with the first bucket, as torch's DistributedDataParallel does (Li et al., VLDB 2020),
    and ends with the last one; an infinite bucket waits for the end. For numbers and arrays.
    """
    later = tail_share(size_bytes, bucket_bytes)
    return np.maximum(seconds * later, seconds - backward_s * (1.0 - later))
