"""Seconds that messages take of the links of a topology, of its ports, and of the devices.

The algorithms of all-reduces are in `partopt.cost.collectives`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from partopt.cost.ranks import array_of
from partopt.documents.topology import Level, Topology

# beta_k     bytes/s of one link of one level-k member, one direction
# lambda_k   seconds of latency of level k

TURNS = 1024  # of replicas on both sides of a cut, that are looked at

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


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


def port_rates(topology: Topology) -> list[float]:
    """`port_rate` of every level; 0 where no devices part."""
    levels = enumerate(topology.levels, start=1)
    return [port_rate(k, topology) if level.size > 1 else 0.0 for k, level in levels]


def port_size(k: int, topology: Topology) -> int:
    """Ranks behind a port of level k: of a member, or where it is a bus of all."""
    return topology.group_size(k if topology.levels[k - 1].bus else k - 1)


def parting_levels(
    source: NDArray[np.integer[Any]], target: NDArray[np.integer[Any]], topology: Topology
) -> Integers:
    """The levels at which ranks part from others, 0 for the same; arrays of one shape."""
    sizes = [topology.group_size(k) for k in range(len(topology.levels) + 1)]
    levels: Integers = np.sum([source // size != target // size for size in sizes], axis=0)
    return levels


def crossing(
    before: Sequence[int],
    after: Sequence[int],
    topology: Topology,
    most: int | None = None,
) -> tuple[Integers, Integers, Integers]:
    """The ranks before and behind a cut of one microbatch after the other, and where they part.

    They are of `most` microbatches, and of `TURNS`, at most.
    """
    turns = np.arange(min(math.lcm(len(before), len(after)), most or TURNS, TURNS))
    source, target = (array_of(ranks)[turns % len(ranks)] for ranks in (before, after))
    return source, target, parting_levels(source, target, topology)


def cut_ports(
    before: Sequence[int],
    after: Sequence[int],
    size_bytes: float,
    topology: Topology,
    most: int | None = None,
) -> Iterator[tuple[int, Integers, Floats]]:
    """Seconds per microbatch in which the messages over a cut keep ports busy.

    They are given with their ports: the level, and its members, or where it is a bus the components
    of them; those out before those in. So many bytes go over the cut one way, the mean of both
    ways, which a port of both directions carries or more in one of them. A device that passes to
    itself uses none. `most` is as in `crossing`.
    """
    source, target, level = crossing(before, after, topology, most)
    for k in sorted(set(level.tolist()) - {0}):
        turn_s = size_bytes / port_rate(k, topology) / len(level)
        for side in (source,) if topology.levels[k - 1].bus else (source, target):
            many = np.bincount(side[level == k] // port_size(k, topology))
            busy_s = many.astype(np.float64) * turn_s
            members = np.flatnonzero(busy_s).astype(np.int64)
            yield k, members, busy_s[members]


def hold_s(size_bytes: Any, messages: Any, level: Level, serial: bool) -> Any:
    """Seconds for which so many messages that cross `level` keep a device from computing.

    Devices that are `serial` wait until they have arrived. For arrays too.
    """
    held = messages * level.message_s + size_bytes * level.copy_byte_s
    if serial:
        held = held + level.latency_s + size_bytes / level.bandwidth_bytes_per_s
    return held
