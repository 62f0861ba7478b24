"""Cuts moved in the simulator, while every stage keeps its ranks."""

from __future__ import annotations

import random
from itertools import pairwise

from partopt.cost.pricing import price
from partopt.cost.problem import Problem, partition_of, share_of
from partopt.documents.plan import Plan
from partopt.search.annealing import anneal
from partopt.search.effort import SearchParams
from partopt.search.evaluator import CutEvaluator, Cuts, PlacedStages
from partopt.simulator.execution import simulate_plan

SEVERAL, ONE_MORE = 0.4, 0.3  # of the steps: neighbouring cuts together; another one beside


def neighbour(now: Cuts, rng: random.Random) -> Cuts | None:
    """One cut or several neighbouring ones a layer further; now and then another one too.

    None where a stage has no layer then.
    """
    moved, last = list(now.bounds), now.stages
    if last in (1, moved[-1]):  # one stage, or one layer a stage
        return None
    first, by = rng.randrange(1, last), rng.choice((-1, 1))
    end = rng.randint(first + 1, last) if rng.random() < SEVERAL else first + 1
    for c in range(first, end):
        moved[c] += by
    if rng.random() < ONE_MORE:
        moved[rng.randrange(1, last)] += rng.choice((-1, 1))
    return Cuts(now.placed, tuple(moved)) if all(i < j for i, j in pairwise(moved)) else None


def move_cuts(plan: Plan, problem: Problem, params: SearchParams) -> Plan:
    """The simulated `plan` of `problem` with its cuts moved where the simulator says it helps."""
    bounds, stated, rng = problem.boundaries(), problem.coarsen(), random.Random(0)
    partition = partition_of(plan, problem.recompute_per_stage).on_cells(bounds)
    evaluator, placed = CutEvaluator(stated), PlacedStages(partition, stated)
    begin = Cuts(placed, (0, *(stage.stop for stage in partition.stages)))
    best_s, best = anneal(
        begin,
        lambda now: (rng.random(), neighbour(now, rng)),
        evaluator,
        params.grids.annealing.of_stages(begin.stages),
        params.cut_budget,
        report_progress=share_of(problem.progress, "moving cuts", 0, 1),
    )
    if best_s >= evaluator.seconds(begin):
        return plan
    return simulate_plan(price(best.partition().on_layers(bounds), problem, plan.planner))
