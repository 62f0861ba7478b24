"""A probe of contiguous plans in plain Python: the witness that the compiled one is held to.

From the last cut to the first it keeps every stage that may begin there, with what lies behind it:
every end, every ranks, recomputed or not. `partopt.cost` says what a stage takes. It knows of no
tables, no trees, no blocks, and it takes no way for better than another.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from partopt.cost.iteration import stage_objective_s
from partopt.cost.problem import CONTIGUOUS, Assignment, Partition, Problem
from partopt.planners.optimal.probes import Counts
from tests.planners.exhaustive import fits, held_at_least

# [i, j)    a stage on ranks [first, last]
# before    the last rank of the stage before it, following the first of the stage behind it; -1
#           where there is none
# behind    devices in use behind it


class Stage(NamedTuple):
    i: int
    j: int
    first: int
    last: int
    recompute: bool
    following: int
    behind: int

    @property
    def used(self) -> int:
        return self.behind + self.last - self.first + 1

    @property
    def assignment(self) -> Assignment:
        return Assignment(self.i, self.j, range(self.first, self.last + 1), self.recompute)


def exists(problem: Problem, T: float, counts: Counts) -> bool:
    """Whether a contiguous plan takes `T` seconds or less, of stages with so many replicas."""
    N, P = problem.chain.layers, problem.topology.devices
    modes = (False, True) if problem.recompute_per_stage else (problem.recompute,)
    kept = cache(lambda stage, before: within(problem, T, stage, before))
    stages: list[set[Stage]] = [set() for _ in range(N + 1)]
    nothing = Stage(N, N, P, P - 1, False, -1, 0)
    most = min(counts[1], problem.microbatches or P)
    for i in range(N - 1, -1, -1):
        for j in range(i + 1, N + 1):
            for after in stages[j] if j < N else {nothing}:
                for last in range(after.first):
                    if j < N and not kept(after, last):
                        continue
                    for first in range(max(0, last + 1 - most), last + 2 - counts[0]):
                        for mode in modes:
                            following = after.first if j < N else -1
                            stage = Stage(i, j, first, last, mode, following, after.used)
                            if holds(problem, stage) and kept(stage, -1):
                                stages[i].add(stage)
    return bool(stages[0])


def holds(problem: Problem, stage: Stage) -> bool:
    """Whether a stage fits the memory."""
    replicas = [stage.used - stage.behind, *([stage.behind] if stage.behind else [])]
    return fits(problem, stage.assignment, held_at_least(problem, 0, replicas))


def within(problem: Problem, T: float, stage: Stage, before: int) -> bool:
    """Whether a stage takes `T` seconds or less beside its neighbours."""
    ahead = [Assignment(0, stage.i, [before])] * (before >= 0)
    following = [Assignment(stage.j, problem.chain.layers, [stage.following])]
    around = [*ahead, stage.assignment, *following * (stage.following >= 0)]
    return stage_objective_s(Partition(CONTIGUOUS, around), len(ahead), problem) <= T
