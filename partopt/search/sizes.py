"""Which microbatch size: every one that a job leaves open, as long as it may be the fastest."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

from partopt.cost.problem import Progress
from partopt.documents.plan import Plan
from partopt.errors import PartoptError, found_until_then
from partopt.job import Job
from partopt.search.rows import order_of
from partopt.search.variants import least_s, part_of

Found = TypeVar("Found")


def search_sizes(
    job: Job,
    progress: Progress,
    find: Callable[[Job, Progress, float], Found],
    best: Callable[[Found], Plan],
) -> dict[int, Found]:
    """What `find` finds for `job` at every microbatch size, by size; that with the best plan first.

    `find` is told below how many seconds per microbatch a plan is faster than the best so far, and
    `best` is the best plan of what was found. A size that cannot be faster is left out. Raises
    PartoptError where every size is refused, and Interrupted with what was found until then.
    """
    jobs = sorted(job.at_each_size(), key=lambda sized: least_s(sized.problem))
    found: dict[int, Found] = {}
    refusals: dict[str, PartoptError] = {}
    fastest = 0.0  # of the plans that fit, samples/s

    def best_first(last: Found | None = None) -> dict[int, Found]:
        every = found if last is None else found | {size: last}
        return dict(sorted(every.items(), key=lambda item: order_of(best(item[1]))))

    for sized in jobs:
        size = sized.problem.chain.microbatch_size
        if fastest * least_s(sized.problem) >= 1:
            continue
        report_progress = part_of(progress, f"microbatch {size}", len(jobs))
        try:
            with found_until_then(lambda last: best_first(last) or None):
                found[size] = find(sized, report_progress, size / fastest if fastest else math.inf)
        except PartoptError as error:
            refusals[error.message] = error
        else:
            plan = best(found[size])
            fastest = max(fastest, plan.predicted.samples_per_s if plan.fits else 0.0)
    if not found:
        raise PartoptError.together(refusals.values())
    return best_first()
