"""Breaks ties among plans with the same bound: fewest stages, then least memory, then devices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from partopt.cost.iteration import objective_s
from partopt.cost.kernels import replica_counts
from partopt.cost.price import devices_used, peak_memory_bytes
from partopt.cost.problem import Partition
from partopt.cost.tolerances import SUM
from partopt.planners.optimal.families import FamilyProbe

# layers, times devices, times stages, up to which ties are searched for: a second or so
LIMIT = 200_000


def break_ties(best: Partition, probes: Sequence[FamilyProbe]) -> Partition:
    """A plan of the fewest stages that are as fast as `best`.

    Of those that the probes find it has the least memory, then the fewest devices. `best` itself
    where the search would be long.
    """
    problem, own = probes[0].problem, len(best.stages)
    long = problem.chain.layers * problem.topology.devices * own > LIMIT
    if problem.stages is not None or long:
        return best
    seconds = objective_s(best, problem) * (1 + 2 * SUM)
    for stages in range(1, own):
        if found := list(_as_fast(seconds, stages, probes)):
            return min(
                found, key=lambda plan: (peak_memory_bytes(plan, problem), devices_used(plan))
            )
    return best


def _as_fast(seconds: float, stages: int, probes: Sequence[FamilyProbe]) -> Iterator[Partition]:
    """Plans of so many stages within `seconds`, one of each family and number of replicas."""
    problem = probes[0].problem
    for counts in replica_counts(problem):
        if counts[0] * stages > problem.topology.devices:
            continue
        for probe in probes:
            found = probe.find(seconds * (1 + SUM), counts, stages)
            if found is not None and objective_s(found, problem) <= seconds:
                yield found
