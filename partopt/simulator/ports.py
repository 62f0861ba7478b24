"""The ports of a topology, numbered: what transfers and all-reduces occupy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from partopt.documents.topology import Topology

# k   level; its members are level-(k-1) components
#     a member has one port out and one port in, of `links` lanes each; a bus is one port for all


@dataclass(frozen=True, eq=False)
class Ports:
    """Ports by level: level k has [first[k-1], first[k]), each member's out, then its in."""

    topology: Topology
    sizes: NDArray[np.int64]  # devices in a level-k component, k = 0..L, shape (L + 1,)
    first: NDArray[np.int64]  # shape (L + 1,)
    bus: NDArray[np.bool_]  # shape (L,)
    lanes: NDArray[np.int64]  # links of a port, shape (L,)
    bandwidth: NDArray[np.float64]  # bytes/s of one lane, shape (L,)
    latency: NDArray[np.float64]  # seconds, shape (L,)

    @property
    def count(self) -> int:
        """Ports in all."""
        return int(self.first[-1])

    def of(self, rank: int, k: int) -> tuple[int, int]:
        """The ports through which a rank sends and receives at level k; the same one on a bus."""
        if self.bus[k - 1]:
            port = int(self.first[k - 1] + rank // self.sizes[k])
            return port, port
        out = int(self.first[k - 1] + 2 * (rank // self.sizes[k - 1]))
        return out, out + 1

    def levels_between(
        self, first: NDArray[np.int32], second: NDArray[np.int32]
    ) -> NDArray[np.int64]:
        """`Topology.common_level` of each rank of `first` and its counterpart in `second`.

        It has their shape, and is 0 for a rank and itself.
        """
        levels = np.zeros(first.shape, dtype=np.int64)
        for size in self.sizes:
            levels += first // size != second // size
        return levels

    def of_each(
        self, ranks: NDArray[np.int32], k: NDArray[np.int64], side: int
    ) -> NDArray[np.int64]:
        """The port out (side 0) or in (side 1) of each rank at its own level in `k`.

        It has the shape of `ranks`.
        """
        members = np.where(
            self.bus[k - 1], ranks // self.sizes[k], 2 * (ranks // self.sizes[k - 1]) + side
        )
        return self.first[k - 1] + members

    def of_ring(self, ranks: Sequence[int]) -> list[tuple[int, int]]:
        """The ports that a ring over `ranks` keeps busy, each with its level, ascending."""
        found: list[tuple[int, int]] = []
        members = set(ranks)
        for k, level in enumerate(self.topology.levels, start=1):
            if len(members) == 1:
                break
            inside = Counter(member // level.size for member in members)
            first, shared = int(self.first[k - 1]), {each for each, n in inside.items() if n > 1}
            if level.bus:
                ports = [first + each for each in shared]
            else:
                passing = [member for member in members if member // level.size in shared]
                ports = [first + 2 * member + side for member in passing for side in (0, 1)]
            found += [(port, k) for port in sorted(ports)]
            members = set(inside)
        return found


def ports_of(topology: Topology) -> Ports:
    """The ports of `topology`."""
    levels = topology.levels
    sizes = np.array([topology.group_size(k) for k in range(len(levels) + 1)], dtype=np.int64)
    counts = [
        topology.devices // sizes[k + 1] if level.bus else 2 * (topology.devices // sizes[k])
        for k, level in enumerate(levels)
    ]
    return Ports(
        topology=topology,
        sizes=sizes,
        first=np.cumsum([0, *counts]),
        bus=np.array([level.bus for level in levels]),
        lanes=np.array([level.links for level in levels], dtype=np.int64),
        bandwidth=np.array([level.bandwidth_bytes_per_s for level in levels], dtype=np.float64),
        latency=np.array([level.latency_s for level in levels], dtype=np.float64),
    )
