"""Seconds that data takes on the links of a topology.

For transfers between two devices, sides of a cut, and all-reduces.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from partopt.documents.topology import Level, Topology

# beta_k     bytes/s of one link of one level-k member, one direction
# lambda_k   seconds of latency of level k
# r          devices that take part in a collective
# q          level-(K-1) members that a group of ranks spans, K the level of a cut


def transfer_s(size_bytes: float, k: int, topology: Topology) -> float:
    """Seconds for `size_bytes` between two devices whose lowest common level is `k`.

    On one link: lambda_k + x / beta_k.
    """
    level = topology.levels[k - 1]
    return level.latency_s + size_bytes / level.bandwidth_bytes_per_s


def levels_crossed(ranks: Sequence[int], topology: Topology) -> list[int]:
    """The levels k at which some two of `ranks` part, ascending."""
    if isinstance(ranks, range) and ranks.step == 1 and len(ranks) > 1:
        return _levels_crossed_by_run(ranks, topology)
    ordered = np.sort(np.array(ranks))
    components = [ordered // topology.group_size(k) for k in range(len(topology.levels) + 1)]
    return [
        k
        for k, (inner, outer) in enumerate(pairwise(components), start=1)
        if np.any((inner[1:] != inner[:-1]) & (outer[1:] == outer[:-1]))
    ]


def _levels_crossed_by_run(ranks: range, topology: Topology) -> list[int]:
    """The levels k at which consecutive ranks part, ascending.

    They part at level k where a multiple of the size of its members, and not of its own size, lies
    inside the run.
    """
    crossed = []
    for k in range(1, len(topology.levels) + 1):
        inner, outer = topology.group_size(k - 1), topology.group_size(k)
        first = (ranks.start // inner + 1) * inner
        crossed += (
            [k]
            if any(
                border % outer for border in range(first, min(ranks.stop, first + 2 * inner), inner)
            )
            else []
        )
    return crossed


def ring_loads(size_bytes: float, ranks: Sequence[int], topology: Topology) -> dict[int, float]:
    """Seconds for which a ring all-reduce keeps its members' ports busy, at each level k crossed.

    It reduces `size_bytes` over `ranks`. Bandwidth-optimal ring (Patarasuk and Yuan, 2009): each
    member moves 2(r-1)/r of the data, on all of the level's links; those of the group that sit on
    one bus share it, all r on a single level.
    """
    r = len(ranks)
    loads = {}
    for k in levels_crossed(ranks, topology) if r > 1 else []:
        level = topology.levels[k - 1]
        loads[k] = _ring_load_s(
            size_bytes, r, _sharing_a_bus(ranks, k, topology) if level.bus else 1, level
        )
    return loads


def _ring_load_s(size_bytes: float, r: int, sharers: int, level: Level) -> float:
    """Seconds for which a ring of r keeps the ports of a level busy, `sharers` members on each."""
    return 2 * (r - 1) / r * size_bytes * sharers / (level.bandwidth_bytes_per_s * level.links)


def ring_latency_s(ranks: Sequence[int], topology: Topology) -> float:
    """Seconds of latency of a ring over `ranks`; 0 for one rank.

    2(r-1) steps, each of which waits for the largest latency crossed.
    """
    crossed = levels_crossed(ranks, topology) if len(ranks) > 1 else []
    return (
        2 * (len(ranks) - 1) * max((topology.levels[k - 1].latency_s for k in crossed), default=0.0)
    )


def allreduce_s(size_bytes: float, ranks: Sequence[int], topology: Topology) -> float:
    """Seconds for a ring all-reduce of `size_bytes` over `ranks`.

    The load of the narrowest level that it crosses, plus its latency.
    """
    return max(ring_loads(size_bytes, ranks, topology).values(), default=0.0) + ring_latency_s(
        ranks, topology
    )


def tied_s(size_bytes: float, holders: int, topology: Topology) -> float:
    """Seconds for `holders` stages to exchange the gradients of `size_bytes` of tied parameters.

    A ring, as in `allreduce_s`; 0 for one holder, and on one device. Where the other holders will
    lie is not known when a stage is chosen, so the ring is assumed to cross the outermost level on
    which devices part, with one holder on each of its members, all on one bus where the level is a
    bus.
    """
    k = topology.outermost_level
    if k == 0:
        return 0.0
    level = topology.levels[k - 1]
    return (
        _ring_load_s(size_bytes, holders, holders if level.bus else 1, level)
        + 2 * (holders - 1) * level.latency_s
    )


def side_s(cut_bytes: float, ranks: Sequence[int], k: int, topology: Topology) -> float:
    """Seconds per microbatch for which one side of a cut holds its own ports.

    They are a / (beta_K q), or 2 a / beta_K on each bus. `ranks` is the stage on that side and `k`
    the level K at which the cut lies. The stage spans q members of level K-1, each with its own
    port, among which its replicas take turns. Activations and gradients go in opposite directions,
    which only a bus must share; the copies of a nested pipeline have a bus each. Level 0, a device
    passing to itself, costs nothing.
    """
    if k == 0:
        return 0.0
    level = topology.levels[k - 1]
    if level.bus:
        return 2 * cut_bytes / (level.bandwidth_bytes_per_s * members_spanned(ranks, k, topology))
    return cut_bytes / (level.bandwidth_bytes_per_s * members_spanned(ranks, k - 1, topology))


def exchange_s(cut_bytes: float, ranks: Sequence[int], k: int, topology: Topology) -> float:
    """Seconds per microbatch for an activation, then a gradient, to pass one side of a cut.

    See `side_s`.
    """
    return side_s(cut_bytes, ranks, k, topology) * (1 if k and topology.levels[k - 1].bus else 2)


def _sharing_a_bus(ranks: Sequence[int], k: int, topology: Topology) -> int:
    """How many level-(k-1) members that hold some of `ranks` share the fullest level-k bus."""
    members = {rank // topology.group_size(k - 1) for rank in ranks}
    return max(Counter(member // topology.levels[k - 1].size for member in members).values())


def members_spanned(ranks: Sequence[int], k: int, topology: Topology) -> int:
    """How many level-k components hold some of `ranks`."""
    size = topology.group_size(k)
    if isinstance(ranks, range) and ranks.step == 1:
        return ranks[-1] // size - ranks[0] // size + 1
    return len({rank // size for rank in ranks})
