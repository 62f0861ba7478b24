"""Bounds on what any set of ranks of a given size can carry, wherever the ranks lie.

They hold for runs of ranks and for the replicas of nested pipelines alike, as tables of one level:
a plan that they refute exists in neither family.
"""

from __future__ import annotations

from itertools import product

import numpy as np
from numpy.typing import NDArray

from partopt.cost.capacity import Shapes
from partopt.cost.links import port_rate
from partopt.documents.topology import Topology

# m_k   members of level k on which each component of the level has a copy
# r     replicas, m_1 * ... * m_L


def relax(shapes: Shapes, topology: Topology) -> Shapes:
    """The tables of one level of P devices on which r ranks carry what the best r ranks do.

    The best are taken over the runs of the topology, with the tables `shapes`, and its nested
    replicas.
    """
    P = topology.devices
    slope, latency = shapes.slope.min(axis=0), shapes.latency.min(axis=0)
    side = shapes.sides.max(axis=(0, 1, 2))
    r, nested_slope, nested_latency, nested_side = _nested(topology)
    np.minimum.at(slope, r, nested_slope)
    np.minimum.at(latency, r, nested_latency)
    np.maximum.at(side, r, nested_side)
    ends = np.array([1, P])
    network = shapes.network._replace(
        group=ends, above=np.array([np.inf]), bus=np.array([False], dtype=np.bool_)
    )
    return Shapes(ends, slope[None], latency[None], np.stack([side, side])[:, None, None], network)


def _nested(topology: Topology) -> tuple[NDArray[np.int64], ...]:
    """Rates of nested replicas for every m_1, ..., m_L.

    r, its all-reduce's seconds per byte and latency, and the most bytes/s of a side.
    """
    levels = topology.levels
    counts = np.array(
        list(product(*[range(1, level.size + 1) for level in levels])), dtype=np.int64
    )
    # m_k * ... * m_L: level-(k-1) components that hold a replica
    above = np.cumprod(counts[:, ::-1], axis=1)[:, ::-1]
    r = above[:, 0]
    rates = np.array([level.bandwidth_bytes_per_s for level in levels])
    links = np.array([level.links for level in levels])
    bus = np.array([level.bus for level in levels])
    waits = np.array([level.latency_s for level in levels])
    crossed = counts > 1
    ring = np.where(crossed, np.where(bus, counts, 1) / (rates * links), 0.0).max(axis=1)
    spread = np.where(
        bus, np.concatenate([above[:, 1:], np.ones((len(r), 1), np.int64)], axis=1), above
    )
    side = np.array([port_rate(k, topology) for k in range(1, len(levels) + 1)]) * spread
    return (
        r,
        2 * (r - 1) / r * ring,
        2 * (r - 1) * np.where(crossed, waits, 0.0).max(axis=1),
        side.max(axis=1),
    )
