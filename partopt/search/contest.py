"""Plans of several planners for one problem, all simulated.

The optimal planner minimises a formula, and the simulator, which knows of contention and of how
replicas take turns, need not order plans alike: so its best plan, its best with equal replicas, and
the plans of the other planners are improved in the simulator, and the fastest is its plan.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple

from msgspec.structs import replace

from partopt import planners
from partopt.cost.iteration import cannot_beat
from partopt.cost.price import devices_used, price
from partopt.cost.problem import FREE, Decision, Partition, Problem, certify, partition_of
from partopt.documents import Note
from partopt.documents.plan import Plan
from partopt.errors import PartoptError
from partopt.planners import PLANNERS, required_features
from partopt.planners.optimal import PROOF, drop_useless_recompute, scope
from partopt.search.all_pipelines import best_below
from partopt.search.annealing import anneal, with_equal_replicas
from partopt.search.evaluate import Value, value_of
from partopt.search.improve import BUDGET, improve
from partopt.search.moves import frozen
from partopt.search.rivals import (
    able_planners,
    bound_of,
    cautious_plans,
    is_within,
    rivals_of,
    uniform_plan,
)
from partopt.search.starts import LARGE, LIMIT, simulated_starts, size
from partopt.search.warmup import simulate_at_warmup, simulate_with_best_warmup

OPTIONS = {  # what a planner may look at or keep to -> the option that asks for it
    "stages": "`stages`",
    "costs": "`cost`",
    "auto": "`recompute=auto`",
    "uniform": "`replication=uniform`",
    "none": "`replication=none`",
}
SHOWN_LIMIT = 20_000  # stages times devices of a plan that is simulated only to be shown
_FAR = 0.1  # above the bound: further, a large problem begins on a coarse chain too
_MORE = 2  # times the work of improving its plan where that cannot be annealed
_NEAR = 0.02  # above the bound: nearer, the plan of a small problem is not annealed
_HOPED = 0.1  # above what is to be beaten: slower, it is not either
_HOPELESS = 3.0  # times the bound of a large problem: slower, no warm-up makes a plan the fastest
# layers times devices: above, problems far from the bound have no other plans of `optimal` for the
# chain as it is
HUGE = 50_000


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
    problem: Problem,
    shown: Iterable[str] | None = None,
    beat_s: float = math.inf,
) -> Contest:
    """The simulated plans of `names`; notes say which planners refuse the problem, and why.

    Where only some are `shown`, others that cannot be the fastest are left out, and the shown ones
    too where their simulation is long. Nothing is improved where no plan is proved to go below
    `beat_s` seconds per microbatch. Raises PartoptError where all refuse.
    """
    plans: dict[str, Plan] = {}
    notes: list[Note] = []
    refusals = []
    for name in names:
        try:
            hidden = shown is not None and name not in shown
            if hidden and PLANNERS[name].least_s(problem) >= _best_s(plans):
                continue
            decision = planners.decide(name, problem)
            if shown is not None and _is_left_out(decision.partition, hidden, plans, problem):
                continue
            plans[name], own = _simulate(name, decision, problem)
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
        fastest = _take_fastest(plans["optimal"], others if everything else None, problem, beat_s)
        plans["optimal"] = _close(fastest, problem, beat_s)
    return Contest({name: _with_certificate(plan, problem) for name, plan in plans.items()}, notes)


def plan_alone(name: str, problem: Problem, beat_s: float = math.inf) -> tuple[Plan, list[Note]]:
    """The simulated plan of one planner, of `optimal` the fastest of its candidates; and notes.

    `beat_s` is as for `compete`. Raises PartoptError where it refuses the problem, or its schedule
    cannot run its plan.
    """
    own, notes = _simulate(name, planners.decide(name, problem), problem)
    if name == "optimal":
        own = _close(_take_fastest(own, None, problem, beat_s), problem, beat_s)
    return _with_certificate(own, problem), notes


def plan_with(name: str, problem: Problem) -> tuple[Plan, list[Note]]:
    """What one planner decides, simulated, and notes; raises the errors of `plan_alone`."""
    plan, notes = _simulate(name, planners.decide(name, problem), problem)
    return _with_certificate(plan, problem), notes


def _simulate(name: str, decision: Decision, problem: Problem) -> tuple[Plan, list[Note]]:
    """A decision, simulated, with its certificate whatever the simulator says, and its notes."""
    problem.progress(f"simulating {name}", 0, 1)
    plan = price(decision.partition, problem, name, decision.certificate)
    patience_s = math.inf
    if LARGE <= size(problem) <= LIMIT and plan.certificate is not None:
        patience_s = _HOPELESS * bound_of(plan, problem)
    return simulate_with_best_warmup(plan, patience_s), list(decision.notes)


def _with_certificate(plan: Plan, problem: Problem) -> Plan:
    """The simulated plan with what is known of it; nothing is of one that does not fit."""
    if plan.planner == "optimal" and plan.certificate is not None:
        return certify_simulated(plan, plan.certificate.lower_bound_s, problem)
    return plan if plan.fits else replace(plan, certificate=None)


def _is_left_out(
    partition: Partition, hidden: bool, plans: dict[str, Plan], problem: Problem
) -> bool:
    """Whether a partition cannot be faster than the best of `plans`, and need not be shown."""
    long = len(partition.stages) * devices_used(partition) > SHOWN_LIMIT
    best_s = _best_s(plans)
    return best_s < math.inf and (hidden or long) and cannot_beat(partition, best_s, problem)


def _best_s(plans: dict[str, Plan]) -> float:
    """Seconds of a microbatch of the fastest plan that fits; infinite where none does."""
    return min((plan.predicted.period_s for plan in plans.values() if plan.fits), default=math.inf)


def contestants(problem: Problem) -> list[str]:
    """The planners that can plan for `problem` and look at the options that it states, in order."""
    needed = required_features(problem)
    able = able_planners(needed, problem.schedule)
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


def _take_fastest(
    own: Plan, others: dict[str, Plan] | None, problem: Problem, beat_s: float
) -> Plan:
    """The fastest plan that fits, as the optimal planner's: it carries the certificate of `own`.

    It is `own`, one of the others, by default the rivals, or what a search in the simulator makes
    of them; `own` where its bound says that no plan goes below `beat_s`.
    """
    if bound_of(own, problem) >= beat_s:
        return own
    others = rivals_of(own, problem) if others is None else others
    asked = {name: replace(plan, request=own.request) for name, plan in others.items()}
    plans = {"optimal": own} | {
        name: plan for name, plan in asked.items() if not list(plan.find_deviations())
    }
    far = _is_far(plans, problem)
    if not far or size(problem) <= HUGE:
        plans |= uniform_plan(own, problem) | cautious_plans(own, problem)
    plans |= _alike(plans, problem, beat_s)
    more = _begin_elsewhere(plans, problem, beat_s) if _is_far(plans, problem) else []
    improved = _improve(plans, more, problem, beat_s)
    if improved is not None:
        plans["improved"] = improved
    best = plans[best_of(plans)]
    return replace(best, planner="optimal", request=own.request, certificate=own.certificate)


def _close(plan: Plan, problem: Problem, beat_s: float) -> Plan:
    """The plan of `optimal`, or a faster one, with the bound that simulating all pipelines gives.

    Nothing is looked for that is slower than `beat_s` seconds a microbatch.
    """
    M, seconds = problem.microbatches, plan.predicted.iteration_s
    if M is None or seconds is None or plan.certificate is None:
        return plan
    if not plan.fits or plan.predicted.period_s > beat_s * (1 + _HOPED):
        return plan
    lower_s = plan.certificate.lower_bound_s
    found = best_below(problem, lower_s, min(seconds, beat_s * M))
    certificate = replace(plan.certificate, lower_bound_s=found.lower_s)
    if found.best is not None:
        partition, warmups = found.best
        faster = simulate_at_warmup(price(partition, problem, "optimal"), warmups or ())
        plan = replace(faster, request=plan.request)
    return replace(plan, certificate=certificate)


def certify_simulated(plan: Plan, lower_bound_s: float, problem: Problem) -> Plan:
    """The plan of `optimal` with what is known of its simulated period or iteration.

    `lower_bound_s` is that of the search. A plan that does not fit has no certificate.
    """
    if not plan.fits:
        return replace(plan, certificate=None)
    predicted = plan.predicted
    seconds = predicted.period_s if predicted.iteration_s is None else predicted.iteration_s
    stated = scope(drop_useless_recompute(problem))
    return replace(plan, certificate=certify(seconds, lower_bound_s, stated, PROOF))


def _alike(plans: dict[str, Plan], problem: Problem, beat_s: float) -> dict[str, Plan]:
    """Where stages choose to recompute, the plans of `optimal` in which all do or none does.

    Those that cannot be faster than `beat_s` or the best of `plans` are not improved.
    """
    found: dict[str, Plan] = {}
    for recompute in (False, True) if problem.recompute_per_stage else ():
        stated = dataclasses.replace(problem, recompute_per_stage=False, recompute=recompute)
        known = plans | found
        best = known[best_of(known)]
        best_s = best.predicted.period_s if best.fits else math.inf
        with suppress(PartoptError):
            own, _ = _simulate("optimal", planners.decide("optimal", stated), stated)
            plan = _take_fastest(own, None, stated, min(beat_s, best_s))
            found[f"recompute {recompute}"] = replace(plan, request=best.request)
    return found


def _is_far(plans: dict[str, Plan], problem: Problem) -> bool:
    """Whether a problem is large and the best of its plans far above the bound."""
    lower_s = bound_of(plans["optimal"], problem)
    return LARGE <= size(problem) <= LIMIT and not is_within(_FAR, plans[best_of(plans)], lower_s)


def _keeps_all(plan: Plan) -> bool:
    """Whether a plan fits without recomputing anything."""
    return plan.fits and not any(stage.recompute for stage in plan.stages)


def _begin_elsewhere(
    plans: dict[str, Plan], problem: Problem, beat_s: float
) -> list[tuple[Partition, Value]]:
    """Partitions that may be faster than the `plans`, which are far from the bound, simulated."""
    best, lower_s = plans[best_of(plans)], bound_of(plans["optimal"], problem)
    value, more = value_of(best), []
    if not (problem.recompute_per_stage and _keeps_all(best)):
        more = simulated_starts(problem, value, lower_s, beat_s)
    value = min([value, *(each for _, each in more)], key=lambda each: each[:2])
    starts = [frozen(partition_of(plan, False)) for plan in plans.values()]
    return more + anneal([*starts, *(each for each, _ in more)], problem, value, beat_s)


def _improve(
    plans: dict[str, Plan],
    more: Sequence[tuple[Partition, Value]],
    problem: Problem,
    beat_s: float,
) -> Plan | None:
    """What a search from the `plans` and `more` finds, simulated; None where it is of the plans.

    A small problem that it leaves far from the bound is annealed, with equal replicas too, and the
    best of that improved once more. The plan of "optimal" states the bound. Nothing is simulated
    that cannot be below `beat_s`.
    """
    lower_s = bound_of(plans["optimal"], problem)
    starts = [
        (partition_of(plan, problem.recompute_per_stage), value_of(plan)) for plan in plans.values()
    ]
    budget = BUDGET[problem.effort]
    if problem.microbatches is not None and _is_far(plans, problem):
        budget *= _MORE
    problem.progress("improving the plan", 0, 1)
    found = improve([*starts, *more], problem, lower_s, budget, beat_s)
    far = lower_s * (1 + _NEAR) < found.value.seconds < beat_s * (1 + _HOPED)
    if size(problem) < LARGE and (far or found.value.over):
        begun = [found.partition, *(frozen(partition) for partition, _ in starts)]
        annealed = [
            each
            for stated in (problem, *with_equal_replicas(problem))
            for each in anneal(begun, stated, found.value, beat_s)
        ]
        if annealed:
            again = [(found.partition, found.value), *annealed]
            found = improve(again, problem, lower_s, budget, beat_s)
    if found.partition in [frozen(partition) for partition, _ in starts]:
        return None
    return simulate_with_best_warmup(price(found.partition, problem, "optimal"))
