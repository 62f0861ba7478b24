"""Exhaustive search, priced as plans are: over contiguous plans, every partition, replica count and
placement with idle ranks; and over nested ones, every pipeline inside the members of every level.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import chain, combinations, pairwise, product
from typing import NamedTuple

import numpy as np

from partopt.cost.flight import in_flight, weight_versions
from partopt.cost.memory import stage_memory
from partopt.cost.period import binding, stage_loads
from partopt.cost.price import peak_memory_bytes, price
from partopt.cost.problem import CONTIGUOUS, FREE, NESTED, NONE, Assignment, Partition, Problem
from partopt.documents.plan import Plan
from partopt.documents.profile import Device, Model, Profile
from partopt.planners.blocks import Block, stages_of


class Found(NamedTuple):
    """The best plan by period, stages, memory of the fullest device, and devices; and its
    stages.
    """

    seconds: float
    stages: int
    memory_bytes: int
    devices: int
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
    if problem.replication == FREE and problem.schedule != "zb-h1":
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
    """Thirteen digits: periods that differ by their last bit alone are equal, as they are for the
    planner.
    """
    return float(f"{seconds:.13g}")


def best_nested(problem: Problem) -> Found | None:
    """The best nested plan of an asynchronous schedule that fits; `None` where none does."""
    best: Found | None = None
    for partition in nested(problem):
        memory = peak_memory_bytes(partition, problem)
        devices = sum(len(stage.ranks) for stage in partition.stages)
        seconds = _rounded(binding(partition, problem).seconds)
        key = (seconds, len(partition.stages), memory, devices)
        if (problem.memory_bytes is None or memory <= problem.memory_bytes) and (
            best is None or key < best[:4]
        ):
            best = Found(*key, partition)
    return best


def best_period(problem: Problem) -> Found | None:
    """The best plan of an asynchronous schedule that fits; `None` where none does."""
    return min(
        (found for found in (best_contiguous(problem), best_nested(problem)) if found),
        key=lambda found: found[:4],
        default=None,
    )


def best_contiguous(problem: Problem) -> Found | None:
    """The best contiguous plan of an asynchronous schedule that fits; `None` where none does."""

    @cache
    def loads_s(i: int, j: int, ranks: range, before: int, after: int, recompute: bool) -> float:
        """The largest load of a stage whose nearest neighbours are these ranks; -1 where there is
        none.
        """
        stages, s = [Assignment(i, j, ranks, recompute)], 0
        if before >= 0:
            stages, s = [Assignment(0, i, [before]), *stages], 1
        if after >= 0:
            stages.append(Assignment(j, problem.chain.layers, [after]))
        return max(load.seconds for load in stage_loads(Partition(CONTIGUOUS, stages), s, problem))

    @cache
    def memory(i: int, j: int, F: int, recompute: bool) -> int:
        versions = weight_versions(problem.schedule, F)
        return stage_memory(
            problem.chain, i, j, F, versions, problem.optimizer, recompute
        ).total_bytes

    modes = (False, True) if problem.recompute_per_stage else (problem.recompute,)
    best: Found | None = None
    for stages in partitions(problem):
        replicas = [len(ranks) for _, _, ranks in stages]
        best_of_modes = []
        for s, (i, j, ranks) in enumerate(stages):
            F = in_flight(problem.schedule, s, replicas, problem.microbatches)
            before = stages[s - 1][2][-1] if s else -1
            after = stages[s + 1][2][0] if s + 1 < len(stages) else -1
            ways = [
                (loads_s(i, j, ranks, before, after, mode), memory(i, j, F, mode), mode)
                for mode in modes
            ]
            best_of_modes.append(
                [
                    way
                    for way in ways
                    if problem.memory_bytes is None or way[1] <= problem.memory_bytes
                ]
            )
        for chosen in product(*best_of_modes):
            key = (
                _rounded(max(way[0] for way in chosen)),
                len(stages),
                max(way[1] for way in chosen),
                sum(replicas),
            )
            if best is None or key < best[:4]:
                assignments = [
                    Assignment(i, j, ranks, way[2])
                    for (i, j, ranks), way in zip(stages, chosen, strict=True)
                ]
                best = Found(*key, Partition(CONTIGUOUS, assignments))
    return best


def best_iteration(problem: Problem) -> Found | None:
    """The best plan of a synchronous schedule that fits; `None` where none does.

    Nothing is remembered: for few devices.
    """
    best: Found | None = None
    for partition in chain(_contiguous(problem), nested(problem)):
        plan = priced(problem, partition)
        assert plan.predicted.iteration_s is not None
        devices = sum(len(stage.ranks) for stage in partition.stages)
        key = (plan.predicted.iteration_s, len(partition.stages), plan.peak_memory_bytes, devices)
        if plan.fits and (best is None or key < best[:4]):
            best = Found(*key, partition)
    return best


def _contiguous(problem: Problem) -> Iterator[Partition]:
    modes = (False, True) if problem.recompute_per_stage else (None,)
    for stages in partitions(problem):
        for chosen in product(modes, repeat=len(stages)):
            yield Partition(
                CONTIGUOUS,
                [Assignment(*stage, mode) for stage, mode in zip(stages, chosen, strict=True)],
            )


def priced(problem: Problem, partition: Partition) -> Plan:
    """The plan of a partition; the problem may have no profile."""
    profile = Profile(
        model=Model(name="test"),
        device=Device(name="test"),
        dtype="float32",
        layers=[],
        measurements=[],
    )
    return price(partition, replace(problem, profile=profile), "optimal")
