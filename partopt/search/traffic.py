"""What a partition's messages and all-reduces load on every port of a topology."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from partopt.cost.links import transfer_s
from partopt.cost.problem import Partition, Problem
from partopt.simulator.ports import ports_of

# r   replicas of a stage
# M   microbatches of an iteration

Floats = NDArray[np.float64]
LONGEST = 4096  # microbatches, beyond which the turns of two stages are not followed


class Traffic:
    """The loads of partitions of one problem, replica by replica as they take turns."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.ports = problem, ports_of(problem.topology)
        rates = self.ports.bandwidth * self.ports.lanes
        self.seconds = np.repeat(1 / rates, np.diff(self.ports.first))  # a byte, by port
        self._levels = lru_cache(maxsize=None)(self._levels_of)
        self._cut = lru_cache(maxsize=None)(self._cut_of)
        self._ring = lru_cache(maxsize=None)(self._ring_of)

    def busiest_s(self, partition: Partition) -> float:
        """Seconds per microbatch for which the busiest port is busy."""
        stages, chain = partition.stages, self.problem.chain
        load = np.zeros(self.ports.count)
        for before, after in pairwise(stages):
            load += chain.traffic[after.start] * self._cut(before.ranks, after.ranks)
        for stage in stages:
            if len(stage.ranks) > 1:
                load += chain.trained_bytes(stage.start, stage.stop) * self._ring(stage.ranks)
        return float(load.max())

    def passed_s(self, partition: Partition) -> list[float]:
        """Seconds at the least for which messages pass from the first stage to each stage."""
        seconds, topology = [0.0], self.problem.topology
        for before, after in pairwise(partition.stages):
            size = float(self.problem.chain.traffic[after.start])
            hops = (transfer_s(size, k, topology) for k in self._levels(before.ranks, after.ranks))
            seconds.append(seconds[-1] + min(hops))
        return seconds

    def _levels_of(self, before: Sequence[int], after: Sequence[int]) -> range:
        """The levels at which ranks of two stages may part."""
        topology = self.problem.topology
        if isinstance(before, range) and isinstance(after, range):
            nearest = topology.common_level(before[-1], after[0])
            return range(nearest, topology.common_level(before[0], after[-1]) + 1)
        return range(1, len(topology.levels) + 1)

    def _cut_of(self, before: Sequence[int], after: Sequence[int]) -> Floats:
        """Seconds a microbatch for each byte of a cut, shape (ports,): there, and back."""
        ports, load = self.ports, np.zeros(self.ports.count)
        count = self.problem.microbatches or math.lcm(len(before), len(after))
        turn = np.arange(min(count, LONGEST))
        first, second = (
            np.array(ranks, dtype=np.int32)[turn % len(ranks)] for ranks in (before, after)
        )
        k = ports.levels_between(first, second)
        for source, to in ((first, second), (second, first)):
            np.add.at(load, ports.of_each(source, k, 0), 1.0)
            switched = ~ports.bus[k - 1]
            np.add.at(load, ports.of_each(to[switched], k[switched], 1), 1.0)
        return load * self.seconds / count

    def _ring_of(self, ranks: Sequence[int]) -> Floats:
        """Seconds a microbatch for each byte of the all-reduce over `ranks`, shape (ports,)."""
        load, loads = np.zeros(self.ports.count), self.problem.allreduce_over(ranks).slopes
        for port, k in self.ports.of_ring(ranks):
            load[port] = loads[k]
        return load / (self.problem.microbatches or len(ranks))
