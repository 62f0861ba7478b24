"""The best plan of a job under one schedule: a search of the variants that may be fastest."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from partopt.cost.problem import (
    CONTIGUOUS,
    NESTED,
    Partition,
    Problem,
    Progress,
    partition_of,
)
from partopt.documents import Note
from partopt.documents.plan import Plan
from partopt.errors import Interrupted, PartoptError, found_until_then
from partopt.job import Job
from partopt.options import AUTO
from partopt.schedules import SCHEDULES
from partopt.search.contest import Contest, Plans, check_planner, contestants
from partopt.search.effort import SearchParams
from partopt.search.ranking import is_as_good, order_of, rate
from partopt.search.variants import (
    ANY,
    Variant,
    Within,
    least_s,
    part_of,
    promise,
    variants_of,
)


@dataclass(frozen=True)
class Row:
    """What was found under one schedule: `plans` of the best variant by their planners, and notes.

    `problem` is that of the best variant; `by_variant` has the best plan of every variant that was
    searched, the best first; `simpler` may be as good as these, under any schedule.
    """

    problem: Problem
    plans: dict[str, Plan]
    notes: Sequence[Note]
    by_variant: Sequence[Plan]
    simpler: Sequence[Plan] = ()

    @property
    def best(self) -> Plan:
        """The best of all."""
        return self.by_variant[0]

    @property
    def every(self) -> Iterable[Plan]:
        """All plans, those of other variants too."""
        yield from self.by_variant
        yield from (plan for plan in self.plans.values() if plan is not self.best)
        yield from self.simpler


def search_rows(
    job: Job, within: Within, progress: Progress, shown: Iterable[str] = ()
) -> list[Row]:
    """The rows of the job's schedule, or of those that it leaves open; the best first.

    `shown` are planners whose plans are wanted beside the best. After a quick search several
    schedules take the stages of one another, and those that come near the best are searched again.
    PartoptError where every schedule is refused; Interrupted with the rows until then.
    """
    names, params = _schedules(job, within), SearchParams.at(job.effort)
    first = params.stages[0] if len(names) > 1 else params
    searches, refusals = list[Search](), dict[str, PartoptError]()
    with found_until_then(lambda _: _rows_of(searches) or None):
        for done, name in enumerate(names):
            at = f"{name}, {done + 1} of {len(names)}"
            try:
                variants = variants_of(job, name, within, part_of(progress, at, len(names)))
                searches.append(Search(variants, shown, alone=len(names) == 1))
                searches[-1].best_row(first)
            except PartoptError as error:
                refusals[error.message] = error
        found = [row.best for row in _rows_of(searches)]
        for search in searches:
            search.begin_with(found, first)
        if first != params and (rows := _rows_of(searches)):
            fastest = rate(rows[0].best)
            for search in searches:
                row = search.row_so_far()
                if row and row.best.fits and params.close * rate(row.best) >= fastest:
                    search.best_row(params)
    if not (rows := _rows_of(searches)):
        raise PartoptError.together(refusals.values())
    best, *others = rows
    simpler = [plan for search in searches for plan in search.simpler_plans(best.best)]
    return [replace(best, simpler=simpler), *others]


def _rows_of(searches: Iterable[Search]) -> list[Row]:
    """The rows of those that found plans, the best first."""
    rows = [row for search in searches if (row := search.row_so_far())]
    return sorted(rows, key=lambda row: order_of(row.best))


def search_planners(job: Job, planners: Sequence[str], progress: Progress) -> Row:
    """The plans of named planners, at the microbatch size at which the best of them is fastest.

    Every size is tried that may be faster. Raises PartoptError where one of them refuses all sizes,
    and Interrupted with the row until then.
    """
    for name in planners:
        check_planner(name, job.problem)
    jobs = job.at_each_size()
    parts = [part_of(progress, f"microbatch {sized.microbatch_size}", len(jobs)) for sized in jobs]
    problems = [sized.problem.with_(progress=part) for sized, part in zip(jobs, parts, strict=True)]
    search = Search(map(Variant, problems), None, planners=planners)
    with found_until_then(lambda _: search.row_so_far()):
        return search.best_row(SearchParams.at(job.effort))


def may_fit(job: Job) -> bool:
    """Whether some plan of a job, of no planner that it names, may fit: known without a search."""
    for name in _schedules(job, ANY):
        with suppress(PartoptError):
            if any(variant.may_fit for variant in variants_of(job, name, ANY)):
                return True
    return False


def _schedules(job: Job, within: Within) -> list[str]:
    """The schedules that a job leaves open, or the one that it names."""
    if job.schedule != AUTO:
        return [job.schedule]
    return [name for name in within.schedules or SCHEDULES if SCHEDULES[name].tried_by_auto]


class Search:
    """The search of the variants of a job under one schedule.

    It goes on from one effort to the next, with the stages of others where it is beside them.
    `shown` is as in `search_rows`, None for all. Unless it stands `alone`, variants that cannot fit
    are not searched, but for the first: other schedules may have plans that do. Of named `planners`
    all variants are searched that may be faster.
    """

    def __init__(
        self,
        variants: Iterable[Variant],
        shown: Iterable[str] | None = (),
        alone: bool = True,
        planners: Sequence[str] = (),
    ) -> None:
        self.variants = sorted(variants, key=_least if planners else promise)
        self.shown, self.alone, self.planners, self._stages = shown, alone, planners, 0
        self._contests: dict[Variant, Contest] = {}
        self._found: dict[Variant, Plans] = {}

    def best_row(self, params: SearchParams) -> Row:
        """The best plan at an effort, and what was found beside it.

        Every variant whose estimate is within reach of the best is searched, the best first;
        where nothing fits, those that need least memory, too. PartoptError where all are refused.
        """
        for stage in params.stages[self._stages :]:
            self._search_further(stage)
            self._stages += 1
        self._share_less()
        row = self.row_so_far()
        assert row
        return row

    def begin_with(self, plans: Sequence[Plan], params: SearchParams) -> None:
        """Take the stages of plans under other schedules where they are faster under this one."""
        for variant, contest in self._contests.items():
            problem, stages = variant.problem, list[Partition]()
            for plan in plans:
                alike = plan.schedule != problem.schedule and plan.family in (CONTIGUOUS, NESTED)
                alike &= plan.layout.shard == problem.shard and plan.fits
                if alike and plan.microbatch_size == problem.chain.microbatch_size:
                    stages.append(partition_of(plan, problem.recompute_per_stage))
            if contest.optimal and stages:
                contest.optimal.begin_with(stages)
                self._found[variant] = contest.plans_at(params)

    def row_so_far(self) -> Row | None:
        """The best plan that was found, also in a search that is interrupted, and others."""
        if not self._found:
            return None
        found = sorted(self._found.items(), key=lambda pair: order_of(pair[1].best))
        variant, (plans, notes) = found[0]
        return Row(variant.problem, plans, notes, [plans.best for _, plans in found])

    def simpler_plans(self, fastest: Plan) -> list[Plan]:
        """Plans that may be simpler than the best of variants that are as good as the fastest."""
        good = [
            (v, plans.best) for v, plans in self._found.items() if is_as_good(plans.best, fastest)
        ]
        return [plan for v, best in good for plan in self._contests[v].simpler_plans(best)]

    def _search_further(self, params: SearchParams) -> None:
        """Search the variants that may be best, a stage further."""
        refusals, done = dict[str, PartoptError](), Counter[str]()  # by what replicas share
        for variant in self.variants:
            others = [plans.best for other, plans in self._found.items() if other is not variant]
            best = min((plan for plan in others if plan.fits), key=order_of, default=None)
            most = params.variants if best or self._fits(variant) else params.unfit_variants
            if done[variant.problem.shard] >= most and not self.planners:
                continue
            if best and not self._may_be_best(variant, best, params):
                continue
            if self._found and variant not in self._found and not (self.alone or variant.may_fit):
                continue
            size = variant.problem.chain.microbatch_size
            time_to_beat_s = size / rate(best) if best else math.inf
            try:
                if variant not in self._contests:
                    names, named = self.planners, bool(self.planners)
                    names = names or contestants(variant.plain)
                    self._contests[variant] = Contest(names, variant, self.shown, named)
                contest = self._contests[variant]
                with found_until_then(contest.plans_so_far):
                    self._found[variant] = contest.plans_at(params, time_to_beat_s)
            except PartoptError as error:
                refusals[error.message] = error
            except Interrupted as stopped:
                self._found[variant] = stopped.found
                raise
            else:
                done[variant.problem.shard] += 1
        if not self._found:
            raise PartoptError.together(refusals.values())

    def _share_less(self) -> None:
        """Take the best plan's stages for variants that share less, if they are faster so."""
        variant, found = min(self._found.items(), key=lambda pair: order_of(pair[1].best))
        size, request = variant.problem.chain.microbatch_size, variant.problem.request
        for plan in self._contests[variant].share_less(found.best):
            for other, known in self._found.items():
                like = other.problem.chain.microbatch_size == size
                like &= (
                    other.problem.request == request and other.problem.shard == plan.layout.shard
                )
                if like and order_of(plan) < order_of(known.best):
                    self._found[other] = known._replace(plans={**known.plans, plan.planner: plan})

    def _fits(self, variant: Variant) -> bool:
        return variant in self._found and self._found[variant].best.fits

    def _may_be_best(self, variant: Variant, best: Plan, params: SearchParams) -> bool:
        """Whether a variant may have a faster plan than the best of the others."""
        fastest = rate(best)
        if self.planners:
            return least_s(variant.problem) < 1 / fastest
        if self._fits(variant) and params.close * rate(self._found[variant].best) < fastest:
            return False
        within_s = params.reach * max(1 / fastest, self.variants[0].estimate_s)
        return variant.estimate_s <= within_s and least_s(variant.problem) < 1 / fastest


def _least(variant: Variant) -> float:
    return least_s(variant.problem)
