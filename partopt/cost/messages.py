"""Seconds that messages take of the links of a topology, of its ports, and of the devices.

The algorithms of all-reduces are in `partopt.cost.collectives`.
"""

from __future__ import annotations

from typing import Any

from partopt.documents.topology import Level, Topology

# beta_k     bytes/s of one link of one level-k member, one direction
# lambda_k   seconds of latency of level k


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


def hold_s(size_bytes: Any, messages: Any, level: Level, serial: bool) -> Any:
    """Seconds for which so many messages that cross `level` keep a device from computing.

    Devices that are `serial` wait until they have arrived. For arrays too.
    """
    held = messages * level.message_s + size_bytes * level.copy_byte_s
    if serial:
        held = held + level.latency_s + size_bytes / level.bandwidth_bytes_per_s
    return held
