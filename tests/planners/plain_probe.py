"""A probe of contiguous plans in plain Python: the witness that the compiled one is held to.

From the last cut to the first it keeps every stage that may begin there, with what lies behind it:
every end, every ranks, recomputed or not. `partopt.cost` says what a stage takes. It knows of no
tables, no trees, no blocks, and it takes no way for better than another.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from partopt.cost.flight import in_flight, weight_versions
from partopt.cost.links import allreduce_s
from partopt.cost.memory import stage_memory
from partopt.cost.period import compute_s, optimizer_step_s, stage_loads, tied_exchange_s
from partopt.cost.problem import CONTIGUOUS, Assignment, Partition, Problem
from partopt.planners.optimal.bounds import Bounds, Counts

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


def exists(problem: Problem, bounds: Bounds, counts: Counts) -> bool:
    """Whether a contiguous plan is within the bounds, of stages with so many replicas. The bound
    on recomputation is not looked at.
    """
    N, P = problem.chain.layers, problem.topology.devices
    modes = (False, True) if problem.recompute_per_stage else (problem.recompute,)
    kept = cache(lambda stage, before: keeps(problem, bounds, stage, before))
    stages: list[set[Stage]] = [set() for _ in range(N + 1)]
    nothing = Stage(N, N, P, P - 1, False, -1, 0)
    for i in range(N - 1, -1, -1):
        for j in range(i + 1, N + 1):
            for after in stages[j] if j < N else {nothing}:
                for last in range(after.first):
                    if j < N and not kept(after, last):
                        continue
                    for first in range(max(0, last + 1 - counts[1]), last + 2 - counts[0]):
                        for mode in modes:
                            following = after.first if j < N else -1
                            stage = Stage(i, j, first, last, mode, following, after.used)
                            if fits(problem, stage) and kept(stage, -1):
                                stages[i].add(stage)
    return bool(stages[0])


def fits(problem: Problem, stage: Stage) -> bool:
    """Whether a stage fits the memory."""
    if problem.memory_bytes is None:
        return True
    replicas = [stage.used - stage.behind, *([stage.behind] if stage.behind else [])]
    F = in_flight(problem.schedule, 0, replicas, problem.microbatches)
    versions = weight_versions(problem.schedule, F)
    held = stage_memory(
        problem.chain, stage.i, stage.j, F, versions, problem.optimizer, stage.recompute
    )
    return held.total_bytes <= problem.memory_bytes


def keeps(problem: Problem, bounds: Bounds, stage: Stage, before: int) -> bool:
    """Whether a stage keeps the bounds beside its neighbours."""
    ranks = range(stage.first, stage.last + 1)
    own = Assignment(stage.i, stage.j, ranks, stage.recompute)
    s = int(before >= 0)
    around = [
        *([Assignment(0, stage.i, [before])] if before >= 0 else []),
        own,
        *([Assignment(stage.j, problem.chain.layers, [stage.following])] * (stage.following >= 0)),
    ]
    partition, M = Partition(CONTIGUOUS, around), problem.microbatches
    busy, gradients, *sides = (load.seconds for load in stage_loads(partition, s, problem))
    if M is None:
        return max([busy, gradients, *sides]) <= bounds.pace_s
    weights, r = problem.chain.parameter_bytes(stage.i, stage.j), len(ranks)
    update = (
        allreduce_s(weights, ranks, problem.topology)
        + tied_exchange_s(partition, s, problem)
        + optimizer_step_s(own, problem)
    )
    passed = (
        problem.chain.compute_s(stage.i, stage.j)
        if problem.schedule == "gpipe"
        else compute_s(own, problem)
    )
    all_s = max([-(-M // r) * r * busy, *(M * side for side in sides)])
    return all_s - passed <= bounds.pace_s and update <= bounds.update_s
