"""Plans of several planners for one problem, all simulated.

The optimal planner minimises a formula, and the simulator, which knows of contention and of how
replicas take turns, need not order plans alike: so its best plan, its best with equal replicas, and
the plans of the other planners are candidates, and the fastest is its plan.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from contextlib import suppress
from itertools import product
from typing import NamedTuple

from msgspec.structs import replace

from partopt import planners
from partopt.cost.price import price
from partopt.cost.problem import FREE, Problem, certify
from partopt.documents import Note
from partopt.documents.plan import Certificate, Plan
from partopt.errors import PartoptError
from partopt.planners import PLANNERS, required_features
from partopt.search.warmup import simulate_with_best_warmup

OPTIONS = {  # what a planner may look at or keep to -> the option that asks for it
    "stages": "`stages`",
    "costs": "`cost`",
    "auto": "`recompute=auto`",
    "uniform": "`replication=uniform`",
    "none": "`replication=none`",
}
UNIFORM_LIMIT = 256  # devices up to which the best plan with equal replicas is a candidate


class Contest(NamedTuple):
    """Simulated plans by the names of their planners, and notes on them."""

    plans: dict[str, Plan]
    notes: list[Note]


def check_planner(name: str, problem: Problem) -> None:
    """Raise PartoptError for options of `problem` that the planner `name` would ignore."""
    for feature in sorted(required_features(problem)):
        using = [other for other, entry in PLANNERS.items() if feature in entry.uses]
        if name in PLANNERS and name not in using:
            raise PartoptError(
                f"{OPTIONS[feature]}: the planner {name} does not look at it",
                f"choose {', '.join(f'`planner={other}`' for other in using)}",
                code="option-ignored",
                planner=name,
                feature=feature,
            )


def compete(names: Iterable[str], problem: Problem) -> Contest:
    """The simulated plans of `names`; notes say which planners refuse the problem, and why.

    Raises PartoptError where all of them do.
    """
    plans: dict[str, Plan] = {}
    notes: list[Note] = []
    refusals = []
    for name in names:
        try:
            plans[name], own = plan_with(name, problem)
            notes += own
        except PartoptError as error:
            refusals.append(error)
            text = f"without {name}: {error.message}"
            notes.append(Note(code="planner-refused", text=text, fields={"planner": name}))
    if refusals and not plans:
        raise PartoptError.together({error.message: error for error in refusals}.values())
    if "optimal" in plans:
        everything = problem.replication == FREE and not problem.recompute_per_stage
        others = {name: plan for name, plan in plans.items() if name != "optimal"}
        rivals = others if everything else _rivals(problem)
        plans["optimal"] = _take_fastest(plans["optimal"], rivals, problem)
    return Contest(plans, notes)


def plan_alone(name: str, problem: Problem) -> tuple[Plan, list[Note]]:
    """The simulated plan of one planner, of `optimal` the fastest of its candidates; and notes.

    Raises PartoptError where it refuses the problem, or its schedule cannot run its plan.
    """
    own, notes = plan_with(name, problem)
    if name == "optimal":
        own = _take_fastest(own, _rivals(problem), problem)
    return own, notes


def plan_with(name: str, problem: Problem) -> tuple[Plan, list[Note]]:
    """What one planner decides, simulated, and notes; raises the errors of `plan_alone`."""
    problem.progress(f"simulating {name}", 0, 1)
    decision = planners.decide(name, problem)
    plan = price(decision.partition, problem, name, decision.certificate)
    found = simulate_with_best_warmup(plan)
    return found if found.fits else replace(found, certificate=None), list(decision.notes)


def contestants(problem: Problem) -> list[str]:
    """The planners that can plan for `problem` and look at the options that it states, in order."""
    needed = required_features(problem)
    able = _able(needed, problem.schedule)
    if not able:
        options = " and ".join(sorted(OPTIONS[feature] for feature in needed))
        raise PartoptError(
            f"`schedule={problem.schedule}`: no planner has {options} with it",
            "drop one of these options",
            code="no-planner",
            schedule=problem.schedule,
        )
    return [name for name in able if name != "manual"]


def best_of(plans: dict[str, Plan]) -> str:
    """The name of the fastest plan that fits, or of all where none does; ties keep the first."""
    fitting = {name: plan for name, plan in plans.items() if plan.fits} or plans
    return max(fitting, key=lambda name: fitting[name].predicted.samples_per_s)


def _able(features: set[str], schedule: str) -> list[str]:
    """The planners that have all of `features` and can plan for the schedule, in their order."""
    return [
        name
        for name, entry in PLANNERS.items()
        if features <= entry.uses and entry.plans_for(schedule)
    ]


def _take_fastest(own: Plan, others: dict[str, Plan], problem: Problem) -> Plan:
    """The fastest plan that fits of the optimal planner's `own` and of the others, as its plan.

    It carries the lower bound of `own`, and the gap to it.
    """
    asked = {name: replace(plan, request=own.request) for name, plan in others.items()}
    plans = {"optimal": own} | {
        name: plan for name, plan in asked.items() if not list(plan.find_deviations())
    }
    if _uniform_may_win(own, problem):
        with suppress(PartoptError):
            equal = dataclasses.replace(problem, replication="uniform")
            plans["uniform"] = replace(plan_with("optimal", equal)[0], request=own.request)
    return certified(replace(plans[best_of(plans)], planner="optimal"), own.certificate)


def certified(plan: Plan, bound: Certificate | None) -> Plan:
    """The plan of `optimal` with what is known of its simulated period or iteration.

    `bound` is that of the search. A plan that does not fit has no certificate.
    """
    if bound is None or not plan.fits:
        return replace(plan, certificate=None)
    predicted = plan.predicted
    seconds = predicted.period_s if predicted.iteration_s is None else predicted.iteration_s
    certificate = certify(seconds, bound.lower_bound_s, bound.scope, bound.proof)
    return replace(plan, certificate=certificate)


def _uniform_may_win(own: Plan, problem: Problem) -> bool:
    """Whether the best plan with equal replicas is another one, and quick enough to find."""
    unequal = len({stage.replicas for stage in own.stages}) > 1
    return unequal and problem.replication == FREE and problem.topology.devices <= UNIFORM_LIMIT


def _rivals(problem: Problem) -> dict[str, Plan]:
    """Simulated plans of the planners that look at what is asked, or may keep to it without.

    All have the same replicas, and stages that recompute alike.
    """
    needed = required_features(problem) - {"uniform", "none", "auto"}
    names = [name for name in _able(needed, problem.schedule) if name not in ("manual", "optimal")]
    modes = (False, True) if problem.recompute_per_stage else (problem.recompute,)
    plans = {}
    for name, recompute in product(names, modes):
        with suppress(PartoptError):
            alike = dataclasses.replace(problem, recompute_per_stage=False, recompute=recompute)
            plans[f"{name} {recompute}"], _ = plan_with(name, alike)
    return plans
