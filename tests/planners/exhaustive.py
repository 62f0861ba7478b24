"""Exhaustive search, priced as plans are: over contiguous plans, every partition, replica count and
placement with idle ranks; and over nested ones, every pipeline inside the members of every level.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import combinations, pairwise, product
from typing import NamedTuple

import numpy as np

from partopt.cost.flight import in_flight, weight_versions
from partopt.cost.iteration import objective_s, stage_objective_s
from partopt.cost.memory import stage_memory
from partopt.cost.price import price
from partopt.cost.problem import CONTIGUOUS, FREE, NESTED, NONE, Assignment, Partition, Problem
from partopt.documents.plan import Plan
from partopt.documents.profile import Device, Model, Profile
from partopt.planners.blocks import Block, stages_of
from partopt.schedules import SCHEDULES


class Found(NamedTuple):
    """The least objective, the fewest stages that have it, and a plan of so many."""

    seconds: float
    stages: int
    partition: Partition


def partitions(problem: Problem) -> Iterator[list[tuple[int, int, range]]]:
    """Every way to cut the layers and to place the stages, in order, on consecutive ranks of which
    some may stay idle.
    """
    N, P = problem.chain.layers, problem.topology.devices
    for S in range(1, min(N, P) + 1):
        if problem.stages not in (None, S):
            continue
        allowed = [
            ranks for ranks in placements(P, S) if _allowed(problem, [len(each) for each in ranks])
        ]
        for cuts in combinations(range(1, N), S - 1):
            bounds = [0, *cuts, N]
            for ranks in allowed:
                yield list(zip(bounds[:-1], bounds[1:], ranks, strict=True))


@cache
def placements(P: int, S: int) -> list[tuple[range, ...]]:
    """Every way to place S stages, in order, on consecutive ranks of P devices."""
    found = []
    for borders in combinations(range(P + S), 2 * S):
        ends = [border - (k // 2) for k, border in enumerate(borders)]
        ranks = tuple(range(*ends[2 * s : 2 * s + 2]) for s in range(S))
        if all(ranks):
            found.append(ranks)
    return found


def _allowed(problem: Problem, replicas: list[int]) -> bool:
    """Whether stages may have so many replicas, each with a microbatch of its own."""
    if problem.microbatches is not None and max(replicas) > problem.microbatches:
        return False
    if problem.replication == FREE and SCHEDULES[problem.schedule].uneven:
        return True
    return set(replicas) == {1} if problem.replication == NONE else len(set(replicas)) == 1


def pipelines(sizes: list[int], i: int, j: int) -> Iterator[list[Block]]:
    """Every pipeline of layers [i, j) inside a component of levels of such `sizes`, innermost
    first; members may stay idle.
    """
    for S in range(1, min(j - i, sizes[-1]) + 1):
        for cuts in combinations(range(i + 1, j), S - 1):
            bounds = [i, *cuts, j]
            spans = list(pairwise(bounds))
            insides = [
                list(pipelines(sizes[:-1], *span)) if len(sizes) > 1 else [()] for span in spans
            ]
            for members in product(range(1, sizes[-1] + 1), repeat=S):
                if sum(members) <= sizes[-1]:
                    firsts = [sum(members[:s]) for s in range(S)]
                    for inside in product(*insides):
                        yield [
                            Block(*parts)
                            for parts in zip(
                                bounds[:-1], bounds[1:], firsts, members, inside, strict=True
                            )
                        ]


def nested(problem: Problem) -> Iterator[Partition]:
    """Every nested plan that is allowed, with every choice of the stages that recompute where that
    is open.
    """
    sizes = [level.size for level in problem.topology.levels if level.size > 1]
    if len(sizes) < 2 or problem.replication == NONE:
        return
    groups = [int(np.prod(sizes[:k])) for k in range(len(sizes) + 1)]
    modes = (False, True) if problem.recompute_per_stage else (None,)
    for blocks in pipelines(sizes, 0, problem.chain.layers):
        stages = stages_of(blocks, groups)
        if problem.stages in (None, len(stages)) and _allowed(
            problem, [len(stage.ranks) for stage in stages]
        ):
            for chosen in product(modes, repeat=len(stages)):
                yield Partition(
                    NESTED,
                    [
                        replace(stage, recompute=mode)
                        for stage, mode in zip(stages, chosen, strict=True)
                    ],
                )


def _rounded(seconds: float) -> float:
    """Thirteen digits: those that differ by their last bits alone are equal, as they are for the
    planner.
    """
    return float(f"{seconds:.13g}")


def held_at_least(problem: Problem, s: int, replicas: list[int]) -> int:
    """The fewest microbatches that stage s can do with in flight: one, where plans state it."""
    if SCHEDULES[problem.schedule].takes_warmup:
        return 1
    return in_flight(problem.schedule, s, replicas, problem.microbatches)


def fits(problem: Problem, stage: Assignment, F: int) -> bool:
    """Whether a stage fits the memory with F in flight."""
    held = stage_memory(
        problem.chain,
        stage.start,
        stage.stop,
        F,
        weight_versions(problem.schedule, F),
        problem.kept,
        len(stage.ranks),
        1,
        problem.recomputes(stage),
        SCHEDULES[problem.schedule].split,
    )
    return problem.memory_bytes is None or held.total_bytes <= problem.memory_bytes


def holds(partition: Partition, problem: Problem) -> bool:
    """Whether every stage of a plan fits the memory, with few enough in flight."""
    replicas = [len(stage.ranks) for stage in partition.stages]
    return all(
        fits(problem, stage, held_at_least(problem, s, replicas))
        for s, stage in enumerate(partition.stages)
    )


def best(problem: Problem) -> Found | None:
    """The best plan that fits; `None` where none does."""
    of_families = (best_contiguous(problem), best_nested(problem))
    return min((found for found in of_families if found), key=lambda found: found[:2], default=None)


def best_nested(problem: Problem) -> Found | None:
    """The best nested plan that fits; `None` where none does."""
    plans = (
        Found(_rounded(objective_s(partition, problem)), len(partition.stages), partition)
        for partition in nested(problem)
        if holds(partition, problem)
    )
    return min(plans, key=lambda found: found[:2], default=None)


def best_contiguous(problem: Problem) -> Found | None:
    """The best contiguous plan that fits; `None` where none does.

    What a stage takes is remembered by its layers, its ranks and the nearest ranks around it.
    """
    modes = (False, True) if problem.recompute_per_stage else (None,)

    @cache
    def best_of_modes(
        i: int, j: int, ranks: range, before: int, after: int, F: int
    ) -> tuple[float, Assignment] | None:
        ways = []
        for mode in modes:
            own = Assignment(i, j, ranks, mode)
            around = [Assignment(0, i, [before])] * (before >= 0)
            behind = [Assignment(j, problem.chain.layers, [after])] * (after >= 0)
            alone = Partition(CONTIGUOUS, [*around, own, *behind])
            if fits(problem, own, F):
                ways.append((stage_objective_s(alone, len(around), problem), own))
        return min(ways, key=lambda way: way[0], default=None)

    found: Found | None = None
    for stages in partitions(problem):
        replicas = [len(ranks) for _, _, ranks in stages]
        firsts, lasts = [ranks[0] for *_, ranks in stages], [ranks[-1] for *_, ranks in stages]
        chosen = [
            best_of_modes(i, j, ranks, before, after, held_at_least(problem, s, replicas))
            for s, ((i, j, ranks), before, after) in enumerate(
                zip(stages, [-1, *lasts[:-1]], [*firsts[1:], -1], strict=True)
            )
        ]
        ways = [way for way in chosen if way is not None]
        if len(ways) == len(stages):
            key = (_rounded(max(seconds for seconds, _ in ways)), len(stages))
            if found is None or key < found[:2]:
                found = Found(*key, Partition(CONTIGUOUS, [own for _, own in ways]))
    assert found is None or _rounded(objective_s(found.partition, problem)) == found.seconds
    return found


def priced(problem: Problem, partition: Partition) -> Plan:
    """The plan of a partition; the problem may have no profile."""
    return price(partition, profiled(problem), "optimal")


def profiled(problem: Problem) -> Problem:
    """The problem with a profile that says nothing, as plans need one."""
    profile = Profile(
        model=Model(name="test"),
        device=Device(name="test"),
        dtype="bfloat16" if problem.chain.sixteen_bit else "float32",
        layers=[],
        measurements=[],
    )
    return replace(problem, profile=profile)
