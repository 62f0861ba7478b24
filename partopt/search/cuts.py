"""Cuts moved in the simulator, while every stage keeps its ranks."""

from __future__ import annotations

import random
from itertools import pairwise

from partopt.cost.pricing import price
from partopt.cost.problem import Problem, ReportShare, ignore_share, partition_of, share_of
from partopt.documents.plan import Plan
from partopt.planners.layouts import Bounds
from partopt.search.annealing import anneal
from partopt.search.effort import AnnealingParams, SearchParams
from partopt.search.evaluator import CutEvaluator
from partopt.search.simulations import Simulations
from partopt.simulator.execution import simulate_plan

SEVERAL, ONE_MORE = 0.4, 0.3  # of the steps: neighbouring cuts together; another one beside


def anneal_cuts(
    begin: Bounds,
    evaluator: CutEvaluator,
    params: AnnealingParams,
    budget: float,
    report_progress: ReportShare = ignore_share,
) -> tuple[float, Bounds]:
    """The seconds of the best cuts that steps from some lead to, and the cuts; as of `anneal`."""
    rng = random.Random(0)

    def propose(now: Bounds) -> tuple[float, Bounds | None]:
        drawn, other = rng.random(), _step(now, rng)
        return drawn, other if all(i < j for i, j in pairwise(other)) else None

    if len(begin) - 1 in (1, begin[-1]):  # one stage, or one layer a stage
        return evaluator.seconds(begin), begin
    return anneal(begin, propose, evaluator, params, budget, report_progress=report_progress)


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
    partition = partition_of(plan, problem.recompute_per_stage).on_cells(bounds)
    evaluator = CutEvaluator(partition, Simulations(stated))
    begin = (0, *(stage.stop for stage in partition.stages))
    report_progress = share_of(problem.progress, "moving cuts", 0, 1)
    limits = params.cut_annealing, params.cut_budget
    best_s, best = anneal_cuts(begin, evaluator, *limits, report_progress)
    if best_s >= evaluator.seconds(begin):
        return plan
    return simulate_plan(price(evaluator.partition(best).on_layers(bounds), problem, plan.planner))
