"""Seconds that data takes on the links of a topology.

For transfers between two devices, sides of a cut, and all-reduces.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from partopt.cost.compiled import compiled
from partopt.documents.topology import Level, Topology

# beta_k     bytes/s of one link of one level-k member, one direction
# lambda_k   seconds of latency of level k
# r          devices that take part in a collective


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
    crossed, members = [], set(ranks)
    for k, level in enumerate(topology.levels, start=1):
        if len(members) == 1:
            break
        components = {member // level.size for member in members}
        crossed += [k] if len(components) < len(members) else []
        members = components
    return crossed


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
    if len(ranks) == 1:
        return 0.0
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


def port_rate(k: int, topology: Topology) -> float:
    """Bytes/s of one cut that a port of level k carries at most, on all of its links.

    Activations and gradients go in opposite directions, which only a bus must share.
    """
    level = topology.levels[k - 1]
    return level.bandwidth_bytes_per_s * level.links / (2 if level.bus else 1)


class Network(NamedTuple):
    """The levels of a topology, for compiled code."""

    group: NDArray[np.int64]  # ranks of a level-k component, shape (L+1,)
    # bytes/s of one cut that the ports of level k and of all levels above it carry, shape (L,): a
    # message that parts at level k or above takes one of them, of its own
    # side; infinite where ports do not count
    above: NDArray[np.float64]
    bus: NDArray[np.bool_]  # shape (L,)
    bandwidth: NDArray[np.float64]  # bytes/s of one link, shape (L,)
    rate: NDArray[np.float64]  # `port_rate` of each level, shape (L,), 0 where no devices part
    delay: NDArray[np.float64]  # s, infinite where no devices part, shape (L,)


def network_of(topology: Topology) -> Network:
    """The levels of `topology`."""
    levels = topology.levels
    rates = [
        port_rate(k, topology) if level.size > 1 else 0.0 for k, level in enumerate(levels, start=1)
    ]
    return Network(
        np.array([topology.group_size(k) for k in range(len(levels) + 1)], dtype=np.int64),
        np.cumsum(rates[::-1])[::-1].astype(np.float64),
        np.array([level.bus for level in levels], dtype=np.bool_),
        np.array([level.bandwidth_bytes_per_s for level in levels], dtype=np.float64),
        np.array(rates, dtype=np.float64),
        np.array([level.latency_s if level.size > 1 else np.inf for level in levels]),
    )


@compiled()
def run_sides_s(  # type: ignore[no-untyped-def]
    network, before, after, first, last, gap_before, gap_after, gradients=0.0, pause_s=0.0
):
    """Seconds per microbatch for which a stage on consecutive ranks keeps its busiest port busy.

    At the least, whatever its neighbours: `before` and `after` bytes cross its two cuts (0 where
    there is none), and the gaps are the levels at which its `first` and its `last` rank part from
    the neighbours' nearest rank; its replicas take turns. Every message of a level-(k-1) member
    parts at level k or above, but for the member at the end of the run where the gap is lower: the
    neighbour may lie there too. What parts at k or above goes through the member's port of level k
    or one of those above it; on a bus, through that of all members. With `gradients`, a ring
    all-reduce of so many bytes holds its ports too, once for a microbatch of every replica, and for
    `pause_s` longer than it takes to send them.
    """
    busiest, r = 0.0, last - first + 1
    for k in range(min(gap_before, gap_after), len(network.above) + 1):
        rate, inner = network.above[k - 1], network.group[k - 1]
        outer = network.group[k] if network.bus[k - 1] else inner
        inside = first // outer + 1
        for port in (first // outer, inside, last // outer):
            low, high = max(first, port * outer), min(last, port * outer + outer - 1)
            if low > high or rate == 0.0 or rate == np.inf:
                continue
            carried = _ring_bytes(network, gradients, pause_s, first, last, low, k)
            if gap_before <= k:
                since = low if gap_before == k else max(low, (first // inner + 1) * inner)
                carried += max(0, high - since + 1) * before
            if gap_after <= k:
                until = high if gap_after == k else min(high, last // inner * inner - 1)
                carried += max(0, until - low + 1) * after
            busiest = max(busiest, carried / (r * rate))
    return busiest


@compiled()
def _ring_bytes(network, gradients, pause_s, first, last, rank, k):  # type: ignore[no-untyped-def]
    """Bytes of a cut that the ports of a rank, of levels k and above, could carry beside a ring.

    That is, in the time for which the ring over `first` to `last` holds them.
    """
    size = 0.0
    for level in range(k, len(network.above) + 1 if gradients > 0.0 else k):
        inner, outer = network.group[level - 1], network.group[level]
        low, high = max(first, rank // outer * outer), min(last, rank // outer * outer + outer - 1)
        if low // inner < high // inner:
            seconds = gradients * run_ring_slope(network, first, last, level) + pause_s
            size += seconds * network.rate[level - 1]
    return size


@compiled()
def run_ring_slope(network, first, last, k):  # type: ignore[no-untyped-def]
    """Seconds per byte for which a ring over consecutive ranks keeps its ports of level k busy.

    They cross it: as in `ring_loads`.
    """
    r, inner, sharers = last - first + 1, network.group[k - 1], 1.0
    if network.bus[k - 1]:  # a cut has half of its rate
        sharers = _fullest(first // inner, last // inner, network.group[k] // inner) / 2
    return 2 * (r - 1) / r * sharers / network.rate[k - 1]


@compiled()
def _fullest(first, last, size):  # type: ignore[no-untyped-def]
    """The most of the consecutive members `first` to `last` in one component of `size` members."""
    if first // size == last // size:
        return last - first + 1
    if last // size - first // size > 1:
        return size
    return max(size - first % size, last % size + 1)


@compiled()
def wait_s(network, cut_bytes, gap):  # type: ignore[no-untyped-def]
    """Seconds of one message between devices that part at level `gap` or above, at the least.

    0 for gap 0, a device that passes to itself, and where no devices part.
    """
    if gap == 0:
        return 0.0
    least = np.inf
    for k in range(gap - 1, len(network.delay)):
        least = min(least, network.delay[k] + cut_bytes / network.bandwidth[k])
    return least if least < np.inf else 0.0


def paired_sides_s(
    ranks: Sequence[int],
    cuts: Sequence[tuple[float, Sequence[int]]],
    topology: Topology,
    rings: Mapping[int, float],
) -> float:
    """Seconds per microbatch for which the ranks of a stage keep their busiest port busy.

    `cuts` are the bytes of each of its cuts and the ranks of the neighbour there, of which rank k
    exchanges with rank k, or all part at one level, as in nested plans. Level 0, a device passing
    to itself, takes nothing. `rings` are the seconds per microbatch for which an all-reduce keeps
    every port of a level busy.
    """
    carried: Counter[tuple[int, int]] = Counter()
    for cut_bytes, others in cuts:
        for place, rank in enumerate(ranks):
            k = topology.common_level(rank, others[place % len(others)])
            if k:
                size = topology.group_size(k if topology.levels[k - 1].bus else k - 1)
                carried[k, rank // size] += cut_bytes / len(ranks)  # type: ignore[assignment]
    return max(
        (size / port_rate(k, topology) + rings.get(k, 0.0) for (k, _), size in carried.items()),
        default=0.0,
    )


def _sharing_a_bus(ranks: Sequence[int], k: int, topology: Topology) -> int:
    """How many level-(k-1) members that hold some of `ranks` share the fullest level-k bus."""
    members = {rank // topology.group_size(k - 1) for rank in ranks}
    return max(Counter(member // topology.levels[k - 1].size for member in members).values())
