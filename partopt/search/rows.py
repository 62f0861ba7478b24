"""The best plan of a job under one schedule: the variants that may be fastest, each searched."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from partopt.cost.problem import Problem, Progress
from partopt.documents import Note
from partopt.documents.plan import Plan
from partopt.errors import PartoptError
from partopt.job import Job
from partopt.options import AUTO
from partopt.schedules import SCHEDULES
from partopt.search import contest
from partopt.search.variants import Variant, Within, least_s, variants_of

REACH = 1.04  # of the best estimate: more than that, and than was found, is not searched
QUICK = "quick"  # the effort at which several schedules are searched at first
CLOSE = 1.07  # a schedule whose best plan is slower by more than that is not searched again
# variants that are searched at most, where one of them fits, and where none does
SEARCHED, TRIED = {"quick": 2, "normal": 3, "thorough": 6}, 6


@dataclass(frozen=True)
class Row:
    """What was found under one schedule: `plans` of the best variant by their planners, and notes.

    `problem` is that of the best variant; `by_variant` has the best plan of each variant that was
    searched, the best first.
    """

    problem: Problem
    plans: dict[str, Plan]
    notes: Sequence[Note]
    by_variant: Sequence[Plan]

    @property
    def best(self) -> Plan:
        """The best of all."""
        return self.by_variant[0]

    @property
    def every(self) -> Iterable[Plan]:
        """All plans, those of other variants too."""
        yield from self.by_variant
        yield from (plan for plan in self.plans.values() if plan is not self.best)


def search_rows(
    job: Job, within: Within, progress: Progress, shown: Iterable[str] = ()
) -> list[Row]:
    """The rows of the schedules that the job leaves open, or of its own; the best first.

    `shown` are planners whose plans are wanted beside the best. Of several schedules those that
    come near the best after a quick search are searched again. PartoptError where every schedule is
    refused.
    """
    names = [job.schedule]
    if job.schedule == AUTO:
        names = [name for name in within.schedules or SCHEDULES if SCHEDULES[name].tried_by_auto]
    first = job.with_(effort=QUICK) if len(names) > 1 else job
    rows, refusals = list[Row](), dict[str, PartoptError]()
    for done, name in enumerate(names):
        if len(names) > 1:
            progress("schedules", done, len(names))
        try:
            rows.append(search_row(first, name, within, progress, shown))
        except PartoptError as error:
            refusals[error.message] = error
    if not rows:
        raise PartoptError.together(refusals.values())
    if first.effort != job.effort:
        fastest = min(rows, key=lambda row: order_of(row.best)).best.predicted.samples_per_s
        for place, row in enumerate(rows):
            if row.best.fits and row.best.predicted.samples_per_s * CLOSE >= fastest:
                again = search_row(job, row.problem.schedule, within, progress, shown)
                rows[place] = min(row, again, key=lambda each: order_of(each.best))
    return sorted(rows, key=lambda row: order_of(row.best))


def search_row(
    job: Job, name: str, within: Within, progress: Progress, shown: Iterable[str] | None = ()
) -> Row:
    """The best plan of `job` under one schedule; `shown` as in `search_rows`, None for all."""
    return best_of_variants(variants_of(job, name, within, progress), shown)


def best_of_variants(variants: Iterable[Variant], shown: Iterable[str] | None = ()) -> Row:
    """The best plan of some variants under one schedule.

    Every variant that is estimated within `REACH` of the best is searched, the best first; where
    nothing fits, those that need least memory, too. PartoptError where all are refused.
    """
    variants = sorted(
        variants,
        key=lambda each: (each.estimate_s, each.least_bytes * (each.estimate_s == math.inf)),
    )
    found: list[tuple[Variant, contest.Contest, Plan]] = []
    refusals: dict[str, PartoptError] = {}
    for variant in variants:
        best = min((own for _, _, own in found if own.fits), key=order_of, default=None)
        if len(found) >= (SEARCHED[variant.problem.effort] if best else TRIED):
            break
        if best and not _may_be_best(variant, variants[0], best):
            continue
        size = variant.problem.chain.microbatch_size
        beat_s = size / best.predicted.samples_per_s if best else math.inf
        try:
            own = contest.compete(contest.contestants(variant.plain), variant, shown, beat_s)
        except PartoptError as error:
            refusals[error.message] = error
        else:
            found.append((variant, own, own.plans[contest.best_of(own.plans)]))
    if not found:
        raise PartoptError.together(refusals.values())
    found.sort(key=lambda each: order_of(each[2]))
    (variant, own, _), *_ = found
    return Row(variant.problem, own.plans, own.notes, [best for _, _, best in found])


def _may_be_best(variant: Variant, first: Variant, best: Plan) -> bool:
    """Whether a variant may have a faster plan than the best that was found."""
    best_s = 1 / best.predicted.samples_per_s
    within = variant.estimate_s <= max(best_s, REACH * first.estimate_s)
    return within and least_s(variant.problem) < best_s


def order_of(plan: Plan) -> tuple[bool, float]:
    """The order of plans: those that fit first, and of them the fastest."""
    return not plan.fits, -plan.predicted.samples_per_s
