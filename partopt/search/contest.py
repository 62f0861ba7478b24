"""Plans of several planners for one problem, all judged by the simulator."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from partopt import planners
from partopt.cost.problem import Problem
from partopt.errors import PartoptError, PartoptWarning
from partopt.plan import Plan
from partopt.planners import PLANNERS, asked_of
from partopt.search.warmup import judged_at_best


@contextmanager
def quiet() -> Iterator[None]:
    """Without the warnings of planners that nobody named."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PartoptWarning)
        yield


def planned(name: str, problem: Problem) -> Plan:
    """The plan of one planner, judged. PartoptError where it refuses the problem, or its schedule cannot run its plan."""
    problem.progress(f"simulating {name}", 0, 1)
    return judged_at_best(planners.plan(name, problem), problem.memory_bytes)


def contestants(problem: Problem) -> list[str]:
    """The planners that can plan for the schedule of `problem` and look at the options that it states, in their order."""
    needed = asked_of(problem)
    able = [name for name, entry in PLANNERS.items() if needed <= entry.uses and entry.plans_for(problem.schedule)]
    return [name for name in able if name != "manual"]


def plans_of(names: Iterable[str], problem: Problem) -> dict[str, Plan]:
    """The judged plans of `names`, but for those that refuse the problem, which say why in a warning. PartoptError where all do."""
    plans, refusals = {}, []
    for name in names:
        try:
            plans[name] = planned(name, problem)
        except PartoptError as error:
            refusals.append(error)
            warnings.warn(f"without {name}: {error.message}", PartoptWarning, stacklevel=2)
    if refusals and not plans:
        raise PartoptError.together({error.message: error for error in refusals}.values())
    return plans


def best_of(plans: dict[str, Plan], memory_bytes: int | None) -> str:
    """The name of the fastest plan that fits, or of all where none does; of equal ones the first."""
    fitting = {name: plan for name, plan in plans.items() if plan.fits(memory_bytes)} or plans
    return max(fitting, key=lambda name: fitting[name].predicted.samples_per_s)
