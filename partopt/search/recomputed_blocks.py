"""Where an engine makes blocks again one by one: as few of a stage's blocks as fit the memory."""

from __future__ import annotations

from dataclasses import replace

from partopt.cost.pricing import price, under
from partopt.cost.problem import Partition, Problem, partition_of
from partopt.documents.plan import Plan
from partopt.schedules import schedule
from partopt.search.bound import certify_simulated, lower_bound_s
from partopt.search.rows import order_of
from partopt.search.warmup import simulate_at_warmup


def recompute_less(plan: Plan, problem: Problem, alike: bool) -> Plan:
    """The simulated `plan` of `problem` with as few blocks made again as fit, and no slower.

    They are the first of every stage that recomputes; with `alike` every stage has as many, which
    the plan then records as requested. Ranks, cuts and warm-ups stay.
    """
    if alike:
        partition = partition_of(plan, recompute_per_stage=False)
        for first in range(1, max(stage.blocks_again for stage in plan.stages)):
            stated = problem.with_(recompute=first)
            if _fits(plan, partition, stated):
                found = _simulated(plan, partition, stated)
                if found is not plan:
                    return found
        return plan
    if not any(stage.blocks_again for stage in plan.stages):
        return plan
    problem = problem.with_(recompute="auto")  # as the plan then is
    chosen = partition_of(plan, recompute_per_stage=True)
    for s, stage in enumerate(plan.stages):
        for first in range(1, stage.blocks_again):
            stages = list(chosen.stages)
            stages[s] = replace(stages[s], first=first)
            other = replace(chosen, stages=stages)
            if _fits(plan, other, problem):
                chosen = other
                break
    return _simulated(plan, chosen, problem)


def _fits(plan: Plan, partition: Partition, problem: Problem) -> bool:
    """Whether it fits, by the formulas, at the warm-ups of `plan`."""
    priced, warmups = price(partition, problem, plan.planner), None
    if schedule(plan.schedule).takes_warmup:
        warmups = [stage.warmup for stage in plan.stages]
    return under(priced, warmups=warmups).fits


def _simulated(plan: Plan, partition: Partition, problem: Problem) -> Plan:
    """The plan of `partition` at the warm-ups of `plan`; `plan` itself where it is no better."""
    priced = price(partition, problem, plan.planner, plan.certificate)
    found = simulate_at_warmup(priced, [stage.warmup for stage in plan.stages])
    if not found.fits or order_of(found) > order_of(plan):
        return plan
    if plan.certificate is None or plan.planner != "optimal":
        return found
    lower_s = lower_bound_s(problem) * (plan.microbatches or 1)
    return certify_simulated(found, lower_s, problem)
