"""Plans of several planners for one problem, all judged by the simulator.

The optimal planner minimises a formula, and the simulator, which knows of contention and of how
replicas take turns, need not order plans alike: so its best plan, its best with equal replicas, and
the plans of the other planners are candidates, and the fastest is its plan.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import product

from msgspec.structs import replace

from partopt import planners
from partopt.cost.period import objective_s
from partopt.cost.problem import FREE, Problem, certify, partition_of
from partopt.documents.plan import Plan
from partopt.errors import PartoptError, PartoptWarning
from partopt.planners import PLANNERS, asked_of, optimal
from partopt.search.warmup import simulate_with_best_warmup

_FLAGS = {
    "stages": "--stages",
    "costs": "--cost",
    "auto": "--recompute auto",
    "uniform": "--replication uniform",
    "none": "--replication none",
}
UNIFORM_LIMIT = 256  # devices up to which the best plan with equal replicas is a candidate


@contextmanager
def quiet() -> Iterator[None]:
    """Without the warnings of planners that nobody named."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PartoptWarning)
        yield


def planned(name: str, problem: Problem) -> Plan:
    """The plan of one planner, judged; of `optimal` the fastest of its candidates.

    PartoptError where it refuses the problem, or its schedule cannot run its plan.
    """
    own = decided(name, problem)
    if name != "optimal":
        return own
    return _fastest(own, _rivals(problem), problem)


def decided(name: str, problem: Problem) -> Plan:
    """What one planner decides, judged. PartoptError as `planned`."""
    problem.progress(f"simulating {name}", 0, 1)
    return simulate_with_best_warmup(planners.plan(name, problem))


def _fastest(own: Plan, others: dict[str, Plan], problem: Problem) -> Plan:
    """The fastest plan that fits of the optimal planner's `own` and of the others, as its plan:
    with its lower bound, and the gap to it.
    """
    asked = {name: replace(plan, request=own.request) for name, plan in others.items()}
    plans = {"optimal": own} | {
        name: plan for name, plan in asked.items() if not list(plan.disregarded())
    }
    if (
        problem.replication == FREE
        and problem.topology.devices <= UNIFORM_LIMIT
        and len({stage.replicas for stage in own.stages}) > 1
    ):
        with suppress(PartoptError):
            plans["uniform"] = replace(
                decided("optimal", dataclasses.replace(problem, replication="uniform")),
                request=own.request,
            )
    best = plans[best_of(plans)]
    if best is own or own.certificate is None:
        return own
    stages, lower = partition_of(best, problem.recompute_per_stage), own.certificate.lower_bound_s
    seconds = objective_s(stages, problem)
    certificate = certify(seconds, lower, optimal.status(seconds, lower), own.certificate.proof)
    return replace(best, planner="optimal", certificate=certificate)


def _able(uses: set[str], schedule: str) -> list[str]:
    """The planners that look at all of `uses` and can plan for the schedule, in their order."""
    return [
        name for name, entry in PLANNERS.items() if uses <= entry.uses and entry.plans_for(schedule)
    ]


def contestants(problem: Problem) -> list[str]:
    """The planners that can plan for the schedule of `problem` and look at the options that it
    states, in their order.
    """
    needed = asked_of(problem)
    able = _able(needed, problem.schedule)
    if not able:
        flags = sorted(_FLAGS[use] for use in needed)
        raise PartoptError(
            f"--schedule {problem.schedule}: no planner has {' and '.join(flags)} with it",
            "drop one of these options",
        )
    return [name for name in able if name != "manual"]


def plans_of(names: Iterable[str], problem: Problem) -> dict[str, Plan]:
    """The judged plans of `names`, but for those that refuse the problem, which say why in a
    warning. PartoptError where all do.
    """
    plans, refusals = {}, []
    for name in names:
        try:
            plans[name] = decided(name, problem)
        except PartoptError as error:
            refusals.append(error)
            warnings.warn(f"without {name}: {error.message}", PartoptWarning, stacklevel=2)
    if refusals and not plans:
        raise PartoptError.together({error.message: error for error in refusals}.values())
    if "optimal" in plans:
        everything = problem.replication == FREE and not problem.recompute_per_stage
        others = (
            {name: plan for name, plan in plans.items() if name != "optimal"}
            if everything
            else _rivals(problem)
        )
        plans["optimal"] = _fastest(plans["optimal"], others, problem)
    return plans


def _rivals(problem: Problem) -> dict[str, Plan]:
    """Judged plans of the planners that look at what is asked, or may keep to it without: all the
    same replicas, what is recomputed.
    """
    needed = asked_of(problem) - {"uniform", "none", "auto"}
    names = _able(needed, problem.schedule)
    modes = (False, True) if problem.recompute_per_stage else (problem.recompute,)
    plans = {}
    with quiet():
        for name, recompute in product(
            [name for name in names if name not in ("manual", "optimal")], modes
        ):
            with suppress(PartoptError):
                stated = dataclasses.replace(
                    problem, recompute_per_stage=False, recompute=recompute
                )
                plans[f"{name} {recompute}"] = decided(name, stated)
    return plans


def best_of(plans: dict[str, Plan]) -> str:
    """The name of the fastest plan that fits, or of all where none does; of equal ones the
    first.
    """
    fitting = {name: plan for name, plan in plans.items() if plan.fits} or plans
    return max(fitting, key=lambda name: fitting[name].predicted.samples_per_s)
