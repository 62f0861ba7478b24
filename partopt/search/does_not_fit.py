"""A plan that does not fit its devices: options with which one does."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from partopt.documents.plan import Plan
from partopt.errors import PartoptError
from partopt.job import Job
from partopt.search import contest


@dataclass(frozen=True)
class Fitting:
    """Options of the job that make a plan fit, and the speed of that plan."""

    options: dict[str, str | int]
    samples_per_s: float


def find_fitting(job: Job, plan: Plan) -> Fitting | None:
    """The changes to `job` under which the fastest plan fits, where `plan` of it does not.

    As few kinds of change as will do: microbatch size and recomputation, then the planner, then the
    optimizer. None where nothing that was tried fits.
    """
    problem, planner = job.problem, plan.planner
    others = [] if planner == "manual" else contest.contestants(problem)
    for optimizer in dict.fromkeys((problem.optimizer, "momentum", "sgd")):
        for names in ([planner], [name for name in others if name != planner]):
            found = list(_fitting(names, plan, optimizer, job))
            if found:
                return max(found, key=lambda each: each.samples_per_s)  # ties keep the first
    return None


def _fitting(names: list[str], plan: Plan, optimizer: str, job: Job) -> Iterator[Fitting]:
    """What fits at every measured size, with and without recomputation.

    At sizes up to the plan's where the job says which.
    """
    now = plan.microbatch_size
    measured = [m.microbatch_size for m in job.profile.measured()]
    free = job.microbatch_size is None
    sizes = [now, *(size for size in reversed(measured) if size < now or (free and size > now))]
    for name, size, recompute in itertools.product(names, sizes, ("never", "always")):
        with suppress(PartoptError):  # a global batch may be no multiple of that size
            changed = job.with_(microbatch_size=size, recompute=recompute, optimizer=optimizer)
            other, _ = contest.plan_with(name, changed.problem)
            if other.fits:
                options: dict[str, str | int] = {} if name == plan.planner else {"planner": name}
                options |= {} if size == now else {"microbatch_size": size}
                options |= (
                    {} if recompute == (job.recompute or "never") else {"recompute": recompute}
                )
                options |= {} if optimizer == job.optimizer else {"optimizer": optimizer}
                yield Fitting(options, other.predicted.samples_per_s)
