"""From a job to its plan, and to the plans that it was chosen from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from partopt.cost.problem import Problem, Progress, ignore_progress
from partopt.documents import Note
from partopt.documents.plan import Certificate, Plan, RunnerUp
from partopt.errors import ANSWER_IS_NO, PartoptError, found_until_then
from partopt.job import Job
from partopt.options import AUTO
from partopt.search import contest
from partopt.search.effort import SearchParams
from partopt.search.rows import Row, search_planners, search_rows
from partopt.search.variants import ANY, Variant, Within

_BESIDE = ("gpipe", "data_parallel")  # planners whose plans stand beside that of a named planner
_SHOWN = ("pipedream", *_BESIDE)  # and beside the best of all
_NOTICED = 0.01  # of the speed: a smaller difference is not told


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
        """The plan with the alternatives to it in short, as it is written.

        Beside a transformer's stand layouts in any case.
        """
        if self.plan.transformer:
            return self.plan
        return msgspec.structs.replace(
            self.plan, runners_up=[RunnerUp.of(plan) for plan in self.alternatives]
        )

    @property
    def certificate(self) -> Certificate | None:
        """What is proved of the plan; None where nothing is."""
        return self.plan.certificate

    @property
    def fits(self) -> bool:
        """Whether the plan fits its devices."""
        return self.plan.fits


def solve_profile(job: Job, progress: Progress = ignore_progress, within: Within = ANY) -> Result:
    """The best plan of `job`, simulated: of its planner, or of all planners that can plan for it.

    What the job leaves open is chosen: the schedule where it is "auto", the microbatch size of
    those that were measured, the layout, recomputation and, for a trainer, what replicas share;
    all of it `within` what plans may be. Under "auto" the alternatives are the best under each of
    the other schedules. A plan that does not fit is returned where none was found that does:
    `fits`. `progress(what, done, total)` is called now and then. Raises PartoptError where there is
    none, and Interrupted with the result until then.
    """
    if job.planner_name is not None:
        return _solve_by_planner(job, job.planner_name, progress)
    with found_until_then(lambda rows: rows and _of_rows(job, rows)):
        shown = () if job.schedule == AUTO else _SHOWN
        return _of_rows(job, search_rows(job, within, progress, shown))


def _of_rows(job: Job, rows: Sequence[Row]) -> Result:
    """The best plan of the rows, and others beside it."""
    if job.schedule == AUTO:
        best, *others = as_fixed([row.best for row in rows])
        return Result(best, tuple(others), tuple(job.notes), (best,))
    (row,) = rows
    others = [plan for plan in row.plans.values() if plan is not row.best]
    others.sort(key=lambda other: -other.predicted.samples_per_s)
    best, *others = as_fixed([row.best, *others])
    sizes: dict[int, Plan] = {}
    for plan in row.by_variant:
        sizes.setdefault(plan.microbatch_size, plan)
    return Result(best, tuple(others), (*job.notes, *row.notes), tuple(sizes.values()))


def _solve_by_planner(job: Job, name: str, progress: Progress) -> Result:
    """The plan of the planner `name` at its best microbatch size, beside those of others there."""
    row: Row | None = None

    def until_then(last: Row | None) -> Result | None:
        found = row or last
        return found and Result(found.best, (), (), tuple(found.by_variant))

    with found_until_then(until_then):
        row = search_planners(job, [name], progress)
        plans = _beside(name, row.problem, SearchParams.at(job.effort))
    notes = [*job.notes, *row.notes, *_note_data_parallel(row.best, plans)]
    others = sorted(plans.values(), key=lambda other: -other.predicted.samples_per_s)
    best, *others = as_fixed([row.best, *others])
    return Result(best, tuple(others), tuple(notes), tuple(row.by_variant))


def as_fixed(plans: Sequence[Plan]) -> list[Plan]:
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


def _beside(name: str, problem: Problem, params: SearchParams) -> dict[str, Plan]:
    """The plans that stand beside that of the planner `name`; none where they refuse."""
    able = [other for other in contest.contestants(problem) if other in _BESIDE and other != name]
    with suppress(PartoptError):
        return contest.Contest(able, Variant(problem)).plans_at(params).plans
    return {}


def _note_data_parallel(plan: Plan, others: Mapping[str, Plan]) -> Iterator[Note]:
    """That plain data parallelism is faster than `plan`, where it is among `others` and fits."""
    other = others.get("data_parallel")
    if other is None or not other.fits:
        return
    speedup = other.predicted.samples_per_s / plan.predicted.samples_per_s
    if speedup > 1 + _NOTICED:
        fits = "" if other.memory_limit_bytes is None else " and fits"
        yield Note(
            code="data-parallel-faster",
            text=f"data_parallel is {speedup - 1:.1%} faster{fits}: `planner=data_parallel`",
            fields={"planner": plan.planner, "speedup": speedup},
        )
