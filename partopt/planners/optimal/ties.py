"""Breaks ties among equally fast plans: fewest stages, then least memory, then fewest devices.

Memory is the least or nearly so. The plans that are compared keep the bounds that the best one
keeps: its period, or what paces its iteration and its largest update.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial

from partopt.cost.kernels import replica_counts
from partopt.cost.period import objective_s, parts_of_iteration
from partopt.cost.price import peak_memory_bytes
from partopt.cost.problem import Partition, Problem
from partopt.cost.tolerances import LEAST_BYTES, LESS_MEMORY, SUM
from partopt.planners.optimal.bisection import bisect_minimum
from partopt.planners.optimal.bounds import Bounds, Counts
from partopt.planners.optimal.families import FamilyProbe

# layers, times devices, times stages, up to which ties are searched for: a second or so
LIMIT = 200_000
_UNLIMITED = 2**60  # bytes


def break_ties(best: Partition, probes: Sequence[FamilyProbe]) -> Partition:
    """The plan to take of those as fast as `best`; `best` itself where the search would be long."""
    problem = probes[0].problem
    if problem.chain.layers * problem.topology.devices * len(best.stages) > LIMIT:
        return best
    equals = _Equals(best, probes)
    memory = _UNLIMITED if problem.memory_bytes is None else problem.memory_bytes
    fewer = range(1, len(best.stages) if problem.stages is None else 1)
    found = next((plan for K in fewer for plan in equals.plans(K, memory)), best)
    K, memory_of = len(found.stages), partial(peak_memory_bytes, problem=problem)
    peak = memory_of(found)
    leaner, _, _ = bisect_minimum(
        lambda limit: next(equals.plans(K, int(limit)), None),
        memory_of,
        0.0,
        peak,
        max(LEAST_BYTES, LESS_MEMORY * peak),
    )
    found = leaner or found
    smaller = equals.plans(K, memory_of(found))
    return min([*smaller, found], key=lambda plan: sum(len(stage.ranks) for stage in plan.stages))


def _bounds_of(best: Partition, problem: Problem, bounds_recompute: bool) -> Bounds:
    """The bounds that a plan just keeps, rounding apart."""
    loose = 1 + 2 * SUM
    if problem.microbatches is None:
        return Bounds(objective_s(best, problem) * loose * loose)
    _, rest, update = parts_of_iteration(best, problem)
    forward_s = problem.chain.forward_s
    recomputed = (forward_s(stage.start, stage.stop) for stage in best.stages if stage.recompute)
    return Bounds(
        rest * loose, update * loose, sum(recomputed) * loose if bounds_recompute else math.inf
    )


class _Equals:
    """Finds plans that are as fast as the best."""

    def __init__(self, best: Partition, probes: Sequence[FamilyProbe]) -> None:
        self.probes, self.problem = probes, probes[0].problem
        self.seconds = objective_s(best, self.problem) * (1 + 2 * SUM)
        self.bounds = _bounds_of(best, self.problem, probes[0].bounds_recompute)
        self.able: dict[int, list[tuple[FamilyProbe, Counts]]] = {}

    def plans(self, stages: int, memory_bytes: int) -> Iterator[Partition]:
        """Plans of so many stages within so much memory.

        Of each family and number of replicas the one with the fewest devices.
        """
        for probe, counts in self._able(memory_bytes):
            if stages * counts[0] > self.problem.topology.devices:
                continue
            found = probe.find(self.bounds, counts, stages)
            if found is not None and objective_s(found, self.problem) <= self.seconds:
                yield found

    def _able(self, memory_bytes: int) -> list[tuple[FamilyProbe, Counts]]:
        """The families and replica counts that have a plan within so much memory.

        The plan may have any number of stages.
        """
        if memory_bytes not in self.able:
            pairs = [
                (probe.within_memory(memory_bytes), counts)
                for probe in self.probes
                for counts in replica_counts(self.problem)
            ]
            self.able[memory_bytes] = [
                (probe, counts)
                for probe, counts in pairs
                if probe.find(self.bounds, counts, None) is not None
            ]
        return self.able[memory_bytes]
