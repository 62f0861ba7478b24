"""Cuts moved in the simulator, while every stage keeps its ranks."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import pairwise

import numpy as np

from partopt.cost.pricing import price
from partopt.cost.problem import (
    Assignment,
    Partition,
    Problem,
    TellShare,
    ignore_share,
    partition_of,
    share_of,
)
from partopt.documents.plan import Plan
from partopt.planners.layouts import Bounds
from partopt.search.annealing import shares_spent
from partopt.search.effort import AnnealingParams, SearchParams
from partopt.search.simulations import KnownSeconds, Simulations
from partopt.simulator.execution import simulate_plan

SEVERAL, ONE_MORE = 0.4, 0.3  # of the steps: neighbouring cuts together; another one beside


class Cuts:
    """The stages of one partition, cut anywhere; every device runs its schedule's order."""

    def __init__(self, partition: Partition, simulations: Simulations) -> None:
        self.stages = [replace(stage, ranks=tuple(stage.ranks)) for stage in partition.stages]
        self.partition, self.simulations, problem = partition, simulations, simulations.problem
        self._known = KnownSeconds[Bounds](simulations, lambda bounds: (self.cut(bounds), None))
        self.seconds = self._known.seconds
        devices = sorted({rank for stage in self.stages for rank in stage.ranks})
        M, number = problem.microbatches or 1, {rank: k for k, rank in enumerate(devices)}
        # microbatches of every stage on every device, shape (devices, S)
        self.passes = np.zeros((len(devices), len(self.stages)))
        for s, stage in enumerate(self.stages):
            for rank in stage.ranks:
                self.passes[number[rank], s] += M // len(stage.ranks)
        every = [
            problem.recomputes(stage) and not problem.first_again(stage) for stage in self.stages
        ]
        self.prefixes = [problem.chain.busy_prefix(again) for again in every]  # or less than it is

    @property
    def spent(self) -> float:
        """What simulations took, as `Simulations.spent` counts."""
        return self._known.spent

    def cut(self, bounds: Bounds) -> Partition:
        """The partition between these boundaries."""
        stages = zip(self.stages, pairwise(bounds), strict=True)
        moved = [
            Assignment(start, stop, stage.ranks, stage.recompute, stage.first)
            for stage, (start, stop) in stages
        ]
        return replace(self.partition, stages=moved)

    def busiest_s(self, bounds: Bounds) -> float:
        """Seconds a microbatch for which the busiest device computes."""
        spans = zip(self.prefixes, pairwise(bounds), strict=True)
        seconds = [prefix[stop] - prefix[start] for prefix, (start, stop) in spans]
        return float((self.passes @ seconds).max()) / (self.simulations.problem.microbatches or 1)


def anneal_cuts(
    bounds: Bounds,
    cuts: Cuts,
    rng: random.Random,
    steps: AnnealingParams,
    budget: float,
    tell: TellShare = ignore_share,
) -> Bounds:
    """The best cuts that steps lead to; a step is better or, at first, hardly worse."""
    if len(bounds) - 1 in (1, bounds[-1]):  # one stage, or one layer a stage
        return bounds
    now = best = bounds
    for share in shares_spent(lambda: cuts.spent, budget, steps, tell):
        heat = steps.hot * (steps.cold / steps.hot) ** share
        allowed_s = cuts.seconds(now) * (1 - heat * math.log(1 - rng.random()))
        other = _step(now, rng)
        if not all(i < j for i, j in pairwise(other)) or cuts.busiest_s(other) >= allowed_s:
            continue
        if cuts.seconds(other, allowed_s) < allowed_s:
            now = other
            best = min(best, now, key=cuts.seconds)
    return best


def _step(bounds: Bounds, rng: random.Random) -> Bounds:
    """One cut or several neighbouring ones a layer further; now and then another one too."""
    moved, last = list(bounds), len(bounds) - 1
    first, by = rng.randrange(1, last), rng.choice((-1, 1))
    end = rng.randint(first + 1, last) if rng.random() < SEVERAL else first + 1
    for c in range(first, end):
        moved[c] += by
    if rng.random() < ONE_MORE:
        moved[rng.randrange(1, last)] += rng.choice((-1, 1))
    return tuple(moved)


def move_cuts(plan: Plan, problem: Problem, params: SearchParams) -> Plan:
    """The simulated `plan` of `problem` with its cuts moved where the simulator says it helps."""
    bounds, stated = problem.boundaries(), problem.coarsen()
    number = {cell: k for k, cell in enumerate(bounds)}
    partition = partition_of(plan, problem.recompute_per_stage)
    stages = [
        replace(stage, start=number[stage.start], stop=number[stage.stop])
        for stage in partition.stages
    ]
    cuts = Cuts(replace(partition, stages=stages), Simulations(stated))
    start = (0, *(stage.stop for stage in stages))
    tell = share_of(problem.progress, "moving cuts", 0, 1)
    best = anneal_cuts(start, cuts, random.Random(0), params.cut_annealing, params.cut_budget, tell)
    if cuts.seconds(best) >= cuts.seconds(start):
        return plan
    return simulate_plan(price(cuts.cut(best).on_layers(bounds), problem, plan.planner))
