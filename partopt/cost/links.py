"""Seconds that data takes on the links of a topology: transfers, sides of a cut, all-reduces.

The algorithms of all-reduces are in `partopt.cost.collectives`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from partopt.cost.collectives import algorithm_number, fullest, share
from partopt.cost.compiled import compiled
from partopt.documents.topology import Topology

# beta_k     bytes/s of one link of one level-k member, one direction
# lambda_k   seconds of latency of level k
# r          devices that take part in a collective
# n_k        members of a level-k component that do


def transfer_s(size_bytes: float, k: int, topology: Topology) -> float:
    """Seconds for `size_bytes` between two devices whose lowest common level is `k`.

    On one link: lambda_k + x / beta_k.
    """
    level = topology.levels[k - 1]
    return level.latency_s + size_bytes / level.bandwidth_bytes_per_s


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
    # of all-reduces: s/byte of one member's links, latency, shape (L,); the algorithm or FASTEST
    reduced_s: NDArray[np.float64]
    reduced_delay: NDArray[np.float64]
    algorithm: int
    # for which a message keeps both of its devices from computing: s a message, shape (L,), and
    # s/byte; where devices wait for their messages, the time that these take is part of it
    hold: NDArray[np.float64]
    hold_byte: NDArray[np.float64]
    waited: NDArray[np.float64]  # s, of a message that devices wait for, shape (L,)


def network_of(topology: Topology, serial: bool = False) -> Network:
    """The levels of `topology`; `serial`: devices wait for their messages."""
    levels = topology.levels
    copies = np.array([level.copy_byte_s for level in levels])
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
        np.array([1 / (level.allreduce_bandwidth_bytes_per_s * level.links) for level in levels]),
        np.array([level.allreduce_latency_s for level in levels], dtype=np.float64),
        algorithm_number(topology),
        np.array([level.message_s if level.size > 1 else np.inf for level in levels]),
        copies + [serial / level.bandwidth_bytes_per_s for level in levels],
        np.array([serial * level.latency_s for level in levels], dtype=np.float64),
    )


@compiled()
def run_sides_s(  # type: ignore[no-untyped-def]
    network,
    before,
    after,
    first,
    last,
    gap_before,
    gap_after,
    gradients=0.0,
    pause_s=0.0,
    algorithm=0,
):
    """Seconds per microbatch for which a stage on consecutive ranks keeps its busiest port busy.

    At the least, whatever its neighbours: `before` and `after` bytes cross its two cuts (0 where
    there is none), and the gaps are the levels at which its `first` and its `last` rank part from
    the neighbours' nearest rank; its replicas take turns. Every message of a level-(k-1) member
    parts at level k or above, but for the member at the end of the run where the gap is lower: the
    neighbour may lie there too. What parts at k or above goes through the member's port of level k
    or one of those above it; on a bus, through that of all members. With `gradients`, an
    all-reduce of so many bytes by `algorithm` holds its ports too, once for a microbatch of every
    replica, and for `pause_s` longer than it takes to send them.
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
            carried = _reduced_bytes(network, gradients, pause_s, algorithm, first, last, low, k)
            if gap_before <= k:
                since = low if gap_before == k else max(low, (first // inner + 1) * inner)
                carried += max(0, high - since + 1) * before
            if gap_after <= k:
                until = high if gap_after == k else min(high, last // inner * inner - 1)
                carried += max(0, until - low + 1) * after
            busiest = max(busiest, carried / (r * rate))
    return busiest


@compiled()
def _reduced_bytes(network, gradients, pause_s, algorithm, first, last, rank, k):  # type: ignore[no-untyped-def]
    """Bytes of a cut that the ports of a rank, of levels k and above, could carry.

    That is, in the time for which the all-reduce over `first` to `last` holds them.
    """
    size, r = 0.0, last - first + 1
    for level in range(k, len(network.above) + 1 if gradients > 0.0 else k):
        inner, outer = network.group[level - 1], network.group[level]
        low, high = max(first, rank // outer * outer), min(last, rank // outer * outer + outer - 1)
        if low // inner < high // inner:
            n = members_of_run(network, first, last, level)
            byte_s = share(algorithm, r, n) * run_byte_s(network, n, level)
            size += (gradients * byte_s + pause_s) * network.rate[level - 1]
    return size


@compiled()
def members_of_run(network, first, last, k):  # type: ignore[no-untyped-def]
    """n_k of consecutive ranks: `partopt.cost.collectives.members_crossed`."""
    inner = network.group[k - 1]
    return fullest(first // inner, last // inner, network.group[k] // inner)


@compiled()
def run_byte_s(network, n, k):  # type: ignore[no-untyped-def]
    """Seconds of a byte on level k where n members of a component take part in an all-reduce."""
    return network.reduced_s[k - 1] * (n if network.bus[k - 1] else 1)


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


@compiled()
def hold_s(network, cut_bytes, messages, gap):  # type: ignore[no-untyped-def]
    """Seconds for which so many messages of a cut keep their devices from computing, at the least.

    The devices part at level `gap` or above; 0 for gap 0, and where no devices part.
    """
    if gap == 0:
        return 0.0
    least = np.inf
    for k in range(gap - 1, len(network.hold)):
        seconds = messages * network.hold[k] + network.waited[k] + cut_bytes * network.hold_byte[k]
        least = min(least, seconds)
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
