"""Plans beside that of the planner `optimal`: what may be faster than it in the simulator.

Its plan with equal replicas, its plans that leave some of the memory free, and those of the other
planners. One that cannot be faster is not simulated.
"""

from __future__ import annotations

import dataclasses
import math
from contextlib import suppress
from itertools import product

from partopt import planners
from partopt.cost.iteration import cannot_beat
from partopt.cost.price import price
from partopt.cost.problem import FREE, Problem
from partopt.documents.plan import Plan
from partopt.errors import PartoptError
from partopt.planners import PLANNERS, required_features
from partopt.schedules import schedule
from partopt.search.starts import CAUTIONS, LIMIT, size
from partopt.search.warmup import simulate_with_best_warmup

UNIFORM_LIMIT = 256  # devices up to which the best plan with equal replicas is a candidate
_NEAR_BOUND = 0.02  # above the bound: nearer, nothing more cautious is tried


def able_planners(features: set[str], schedule: str) -> list[str]:
    """The planners that have all of `features` and can plan for the schedule, in their order."""
    return [
        name
        for name, entry in PLANNERS.items()
        if features <= entry.uses and entry.plans_for(schedule)
    ]


def rivals_of(own: Plan, problem: Problem) -> dict[str, Plan]:
    """Simulated plans of the planners that look at what is asked, or may keep to it without.

    All have the same replicas, and stages that recompute alike. Those that cannot be faster than
    `own` are left out.
    """
    needed = required_features(problem) - {"uniform", "none", "auto"}
    names = [
        name
        for name in able_planners(needed, problem.schedule)
        if name not in ("manual", "optimal")
    ]
    modes = (False, True) if problem.recompute_per_stage else (problem.recompute,)
    plans: dict[str, Plan] = {}
    for name, recompute in product(names, modes):
        with suppress(PartoptError):
            alike = dataclasses.replace(problem, recompute_per_stage=False, recompute=recompute)
            plans |= _simulate_if_faster(f"{name} {recompute}", name, alike, problem, own)
    return plans


def uniform_plan(own: Plan, problem: Problem) -> dict[str, Plan]:
    """The best plan with equal replicas; none where it is `own`, or takes long to find."""
    alike = problem.replication != FREE or len({stage.replicas for stage in own.stages}) == 1
    if alike or problem.topology.devices > UNIFORM_LIMIT:
        return {}
    with suppress(PartoptError):
        equal = dataclasses.replace(problem, replication="uniform")
        return _simulate_if_faster("uniform", "optimal", equal, problem, own)
    return {}


def cautious_plans(own: Plan, problem: Problem) -> dict[str, Plan]:
    """Plans of `optimal` that do with fewer microbatches in flight than fit.

    A bound counts on all that fit; where a plan is slower than it, some of them may have to be
    spare, since replicas take turns. None where that does not limit `own`.
    """
    near = is_within(_NEAR_BOUND, own, bound_of(own, problem))
    if near or problem.memory_bytes is None or size(problem) > LIMIT:
        return {}
    plans: dict[str, Plan] = {}
    for caution in CAUTIONS if schedule(problem.schedule).takes_warmup else ():
        with suppress(PartoptError):
            label, stated = f"optimal {caution}", dataclasses.replace(problem, caution=caution)
            plans |= _simulate_if_faster(label, "optimal", stated, problem, own)
    return plans


def _simulate_if_faster(
    label: str, name: str, stated: Problem, problem: Problem, own: Plan
) -> dict[str, Plan]:
    """The simulated plan of the planner `name` for `stated`, by its label.

    Nothing where a bound says that it is no faster than `own`: that of its planner, or its own.
    """
    best_s = own.predicted.period_s if own.fits else math.inf
    if PLANNERS[name].least_s(stated) >= best_s:
        return {}
    partition = planners.decide(name, stated).partition
    if own.fits and cannot_beat(partition, best_s, stated):
        return {}
    return {label: simulate_with_best_warmup(price(partition, stated, name))}


def bound_of(own: Plan, problem: Problem) -> float:
    """Seconds per microbatch of the bound that a plan of "optimal" states; 0 without one."""
    certificate = own.certificate
    return certificate.lower_bound_s / (problem.microbatches or 1) if certificate else 0.0


def is_within(gap: float, plan: Plan, lower_s: float) -> bool:
    """Whether a plan fits and is no more than a `gap` above the bound, or no bound is known."""
    return not lower_s or (plan.fits and plan.predicted.period_s <= lower_s * (1 + gap))
