"""Of the plans that are equally fast one with fewest stages; of those one with least memory, or
nearly; of those one with fewest devices.

The plans that are compared keep the bounds that the best one keeps: its period, or what paces its
iteration and its largest update.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from partopt.cost.kernels import replica_counts
from partopt.cost.period import objective_s, parts_of_iteration
from partopt.cost.price import peak_memory_bytes
from partopt.cost.problem import Partition
from partopt.planners.families import Screened
from partopt.planners.searching import ENDLESS, TOLERANCE, Counts, least

# layers, times devices, times stages, up to which ties are searched for: a second or so
LIMIT = 200_000
_NEAR = 5e-4  # of the memory: less is not sought for
_UNLIMITED = 2**60  # bytes


def settled(best: Partition, probes: Sequence[Screened]) -> Partition:
    """The plan to take of those that are as fast as `best`; `best` itself where the search would be
    long.
    """
    problem = probes[0].problem
    if problem.chain.layers * problem.topology.devices * len(best.stages) > LIMIT:
        return best
    within = _Within(best, probes)
    memory = _UNLIMITED if problem.memory_bytes is None else problem.memory_bytes
    fewer = range(1, len(best.stages) if problem.stages is None else 1)
    found = next((plan for K in fewer for plan in within.plans(K, memory)), best)
    K, peak = len(found.stages), peak_memory_bytes(found, problem)
    memory_of = partial(peak_memory_bytes, problem=problem)
    leaner, _, _ = least(
        lambda limit: next(within.plans(K, int(limit)), None),
        memory_of,
        0.0,
        peak,
        max(0.25, _NEAR * peak),
    )
    found = leaner or found
    smaller = within.plans(K, peak_memory_bytes(found, problem))
    return min([*smaller, found], key=lambda plan: sum(len(stage.ranks) for stage in plan.stages))


class _Within:
    """Finds plans that are as fast as the best."""

    def __init__(self, best: Partition, probes: Sequence[Screened]) -> None:
        self.probes, self.problem = probes, probes[0].problem
        self.seconds = objective_s(best, self.problem) * (1 + 2 * TOLERANCE)
        parts = (
            (self.seconds, 0.0)
            if self.problem.microbatches is None
            else parts_of_iteration(best, self.problem)[1:]
        )
        self.T, self.U = (part * (1 + 2 * TOLERANCE) for part in parts)
        recomputed = sum(
            self.problem.chain.forward_s(stage.start, stage.stop)
            for stage in best.stages
            if stage.recompute
        )
        self.extra_s = recomputed * (1 + 2 * TOLERANCE) if probes[0].bounds_extra else ENDLESS
        self.able: dict[int, list[tuple[Screened, Counts]]] = {}

    def plans(self, stages: int, memory_bytes: int) -> Iterator[Partition]:
        """Plans of so many stages within so much memory, of each family and number of replicas the
        one with fewest devices.
        """
        for probe, counts in self._able(memory_bytes):
            found = (
                self._find(probe, counts, stages)
                if stages * counts[0] <= self.problem.topology.devices
                else None
            )
            if found is not None and objective_s(found, self.problem) <= self.seconds:
                yield found

    def _find(self, probe: Screened, counts: Counts, stages: int | None) -> Partition | None:
        return probe.find(self.T, self.U, counts, stages, self.extra_s)

    def _able(self, memory_bytes: int) -> list[tuple[Screened, Counts]]:
        """The families and numbers of replicas that have a plan of any number of stages within so
        much memory.
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
                if self._find(probe, counts, None) is not None
            ]
        return self.able[memory_bytes]
