"""Plans of several planners for one problem, all simulated.

The plan of `optimal` is the best that a search in the simulator finds, which begins with the plans
of its dynamic program and with those of the other planners (`partopt.search.improve`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import suppress
from typing import NamedTuple

from msgspec.structs import replace

from partopt import planners
from partopt.cost.plan import price
from partopt.cost.problem import Decision, Partition, Problem
from partopt.documents import Note
from partopt.documents.plan import Plan
from partopt.errors import PartoptError
from partopt.planners import PLANNERS, required_features
from partopt.schedules import schedule
from partopt.search.bound import certify_simulated, lower_bound_s
from partopt.search.grids import GRID, best_grid
from partopt.search.improve import best_plan
from partopt.search.variants import Variant
from partopt.search.warmup import simulate_with_best_warmup

OPTIMAL = "optimal"
OPTIONS = {  # what a planner may look at or keep to -> the option that asks for it
    "stages": "`stages`",
    "costs": "`cost`",
    "auto": "`recompute=auto`",
    "uniform": "`replication=uniform`",
    "none": "`replication=none`",
}
EQUAL = 8  # equal pipelines with which `optimal` begins beside its own plans
SHOWN_LIMIT = 20_000  # stages times devices of a plan that is simulated only to be shown


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


def compete(
    names: Iterable[str],
    variant: Variant,
    shown: Iterable[str] | None = None,
    beat_s: float = math.inf,
) -> Contest:
    """The simulated plans of `names`; notes say which planners refuse the problem, and why.

    Where only some are `shown`, others that cannot be the fastest are left out, and the shown ones
    too where their simulation is long. Planners that do not choose which stages recompute plan for
    the variant in which none does. Nothing is improved where no plan is proved to go below
    `beat_s` seconds per microbatch. Raises PartoptError where all refuse.
    """
    plain = variant.plain
    names, plans, notes, refusals = list(names), dict[str, Plan](), list[Note](), []

    def refuse(name: str, error: PartoptError) -> None:
        refusals.append(error)
        if error.code == "no-plan-fits":
            return  # which the plan that is shown instead says of itself
        text = f"without {name}: {error.message}"
        notes.append(Note(code="planner-refused", text=text, fields={"planner": name}))

    decided = dict[str, Decision]()
    # the plans of `straight` are among those of `optimal`
    covered = {OPTIMAL, GRID}
    if shown is not None and OPTIMAL in names:
        covered.add("straight")
    for name in (each for each in names if each not in covered):
        try:
            decided[name] = planners.decide(name, plain)
        except PartoptError as error:
            refuse(name, error)
    if OPTIMAL in names:
        try:
            rivals = [own.partition for own in decided.values()]
            plans[OPTIMAL] = _optimal(variant, rivals, beat_s)
        except PartoptError as error:
            refuse(OPTIMAL, error)
    if GRID in names:
        found = best_grid(plain, variant.grids, variant.coarse[1])
        plans |= {GRID: found} if found else {}
    for name, decision in decided.items():
        hidden = shown is not None and name not in shown
        if shown is not None and _is_left_out(decision.partition, hidden, plans, plain):
            continue
        try:
            plans[name] = _simulate(name, decision, plain)
            notes += decision.notes
        except PartoptError as error:
            refuse(name, error)
    if refusals and not plans:
        raise PartoptError.together({error.message: error for error in refusals}.values())
    return Contest({name: plans[name] for name in names if name in plans}, notes)


def plan_alone(name: str, problem: Problem, beat_s: float = math.inf) -> tuple[Plan, list[Note]]:
    """The simulated plan of one planner, and its notes; of `optimal` the best that is found.

    `beat_s` is as for `compete`. Raises PartoptError where it refuses the problem, or its schedule
    cannot run its plan.
    """
    if name == OPTIMAL:
        planners.check_schedule(name, problem.schedule)
        return _optimal(Variant(problem), list(_rivals(problem)), beat_s), []
    decision = planners.decide(name, problem)
    return _simulate(name, decision, problem), list(decision.notes)


def _optimal(variant: Variant, others: Iterable[Partition], beat_s: float) -> Plan:
    """The best plan that the planner `optimal` finds, with the bound."""
    problem, cells = variant.problem, variant.coarse[1]
    lower_s = lower_bound_s(problem)
    equal = (each.partition.on_layers(cells) for each in variant.grids[:EQUAL])
    best = best_plan(variant, [*others, *equal], lower_s, beat_s)
    return certify_simulated(best, lower_s * (problem.microbatches or 1), problem)


def _rivals(problem: Problem) -> Iterable[Partition]:
    """What the other planners decide that look at what is asked, or may keep to it without.

    All stages recompute alike. The plans of `straight` are among those of `optimal`.
    """
    needed = required_features(problem) - {"uniform", "none", "auto"}
    for name in able_planners(needed, problem.schedule):
        if name not in ("manual", "straight", OPTIMAL):
            with suppress(PartoptError):
                yield planners.decide(name, problem.recompute_alike()).partition


def _simulate(name: str, decision: Decision, problem: Problem) -> Plan:
    """A decision, simulated; nothing is known of one that does not fit."""
    problem.progress(f"simulating {name}", 0, 1)
    plan = price(decision.partition, problem, name, decision.certificate)
    plan = simulate_with_best_warmup(plan)
    return plan if plan.fits else replace(plan, certificate=None)


def _is_left_out(
    partition: Partition, hidden: bool, plans: dict[str, Plan], problem: Problem
) -> bool:
    """Whether a partition is not estimated to be faster than the best of `plans`.

    One that is hidden or long need not be shown then. A stage that computes for as long is enough
    to know it.
    """
    stages, chain, best_s = partition.stages, problem.chain, _best_s(plans)
    long = len(stages) * len({rank for own in stages for rank in own.ranks}) > SHOWN_LIMIT
    if best_s == math.inf or not (hidden or long):
        return False
    computing = (
        chain.compute_s(own.start, own.stop, problem.all_recompute) / len(own.ranks)
        for own in stages
    )
    return max(computing) >= best_s or price(partition, problem, "").predicted.period_s >= best_s


def _best_s(plans: dict[str, Plan]) -> float:
    """Seconds of a microbatch of the fastest plan that fits; infinite where none does."""
    return min((plan.predicted.period_s for plan in plans.values() if plan.fits), default=math.inf)


def able_planners(features: set[str], schedule: str) -> list[str]:
    """The planners that have all of `features` and can plan for the schedule, in their order."""
    return [
        name
        for name, entry in PLANNERS.items()
        if features <= entry.uses and entry.plans_for(schedule)
    ]


def contestants(problem: Problem) -> list[str]:
    """The planners that can plan for `problem` and look at the options that it states, in order."""
    needed = required_features(problem)
    able = able_planners(needed, problem.schedule)
    if not schedule(problem.schedule).overlaps and "costs" not in needed:
        able.append(GRID)
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
