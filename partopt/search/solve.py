"""From a job to its plan, and to the plans that it was chosen from."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import msgspec

from partopt.cost.problem import Problem, Progress, ignore_progress
from partopt.documents import Note
from partopt.documents.plan import Certificate, Plan, RunnerUp
from partopt.errors import ANSWER_IS_NO, PartoptError
from partopt.job import Job
from partopt.options import AUTO
from partopt.search import contest
from partopt.search.advice import note_data_parallel
from partopt.search.auto import search_schedules
from partopt.search.sizes import search_sizes

_BESIDE = ("gpipe", "data_parallel")  # planners whose plans stand beside that of a named planner
_SHOWN = ("pipedream", *_BESIDE)  # and beside the best of all


@dataclass(frozen=True)
class Result:
    """A plan; the `alternatives` to it, fastest first; and notes.

    `by_size` are the best plans at the microbatch sizes that were tried, the best first; `plan`
    alone where the job says which size, and under `schedule="auto"`.
    """

    plan: Plan
    alternatives: tuple[Plan, ...]
    notes: tuple[Note, ...]
    by_size: tuple[Plan, ...]

    @property
    def document(self) -> Plan:
        """The plan with the alternatives to it in short, as it is written."""
        return msgspec.structs.replace(
            self.plan, runners_up=[RunnerUp.of(each) for each in self.alternatives]
        )

    @property
    def certificate(self) -> Certificate | None:
        """What is proved of the plan; None where nothing is."""
        return self.plan.certificate

    @property
    def fits(self) -> bool:
        """Whether the plan fits its devices."""
        return self.plan.fits


def solve(job: Job, progress: Progress = ignore_progress) -> Result:
    """The best plan of `job`, simulated: of its planner, or of all planners that can plan for it.

    Every measured microbatch size is tried unless the job says which, but for those that cannot be
    faster. Under `schedule="auto"` the best under any synchronous schedule; the alternatives are
    then the best under each of the others. A plan that does not fit is returned where none does:
    `fits`. `progress(what, done, total)` is called now and then. Raises PartoptError where there is
    none.
    """
    if job.schedule == AUTO:
        best, *others = _as_fixed(search_schedules(job, progress))
        return Result(best, tuple(others), tuple(job.notes), (best,))
    found = search_sizes(job, progress, _solve_at, lambda result: result.plan)
    results = list(found.values())
    return replace(results[0], by_size=tuple(result.plan for result in results))


def _solve_at(job: Job, progress: Progress, beat_s: float) -> Result:
    """The best plan at the one microbatch size of `job`; see `partopt.search.contest.compete`."""
    problem = job.problem.with_(progress=progress)
    name, notes = job.planner_name, job.notes
    if name is None:
        plans = contest.compete(contest.contestants(problem), problem, _SHOWN, beat_s).plans
        best = plans[contest.best_of(plans)]
    else:
        contest.check_planner(name, problem)
        best, own = contest.plan_alone(name, problem, beat_s)
        plans = _beside(name, problem)
        notes = [*notes, *own, *note_data_parallel(best, plans)]
    others = [plan for plan in plans.values() if plan is not best]
    others.sort(key=lambda other: -other.predicted.samples_per_s)
    best, *others = _as_fixed([best, *others])
    return Result(best, tuple(others), tuple(notes), (best,))


def _as_fixed(plans: Sequence[Plan]) -> list[Plan]:
    """Those whose layout has the degrees that were fixed. PartoptError where none has."""
    found = [plan for plan in plans if not any(plan.find_other_degrees())]
    if not found:
        told = "; ".join(
            dict.fromkeys(what for plan in plans for what in plan.find_other_degrees())
        )
        raise PartoptError(
            f"no plan was found with that layout: {told}",
            "fix less of it, or give another number of devices or microbatches",
            ANSWER_IS_NO,
            code="no-plan",
        )
    return found


def _beside(name: str, problem: Problem) -> dict[str, Plan]:
    """The plans that stand beside that of the planner `name`; none where they refuse."""
    able = [other for other in contest.contestants(problem) if other in _BESIDE and other != name]
    with suppress(PartoptError):
        return contest.compete(able, problem).plans
    return {}
