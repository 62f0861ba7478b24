"""A trainer's layout judged: as its trainer runs it, beside the best plan that the trainer runs."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from msgspec.structs import replace

from partopt import planners
from partopt.cost.problem import Progress, ignore_progress
from partopt.documents.plan import Plan
from partopt.errors import PartoptError
from partopt.job import Job
from partopt.options import MANUAL
from partopt.search.contest import check_planner
from partopt.search.cuts import move_cuts
from partopt.search.effort import SearchParams
from partopt.search.rows import order_of
from partopt.search.sizes import search_sizes
from partopt.search.solve import solve
from partopt.search.variants import Within
from partopt.search.warmup import simulate_at_warmup, simulate_with_best_warmup
from partopt.simulator.execution import simulate_plan
from partopt.trainer_plans.planning import restrict, solve_within
from partopt.trainers.layout import TrainerLayout
from partopt.trainers.says import find_faults

_STARTS = 2  # cuts from which others are looked for, the best


@dataclass(frozen=True)
class Judgement:
    """The plan of a layout, and what it stands beside.

    `recut` has as many stages and replicas, cut where the simulator finds them fastest; `best` is
    the best plan found that the trainer runs, None where it runs none. `faults` say why it does not
    run the plan as it is.
    """

    plan: Plan
    recut: Plan | None
    best: Plan | None
    faults: tuple[str, ...]


def judge_layout(
    layout: TrainerLayout, job: Job, progress: Progress = ignore_progress
) -> Judgement:
    """The plan of `layout` for `job`, which has its `options`, and what it stands beside.

    PartoptError where the layout is no plan of the job's, as where its schedule cannot run it.
    """
    plan, trainer, parts = plan_layout(layout, job), layout.trainer, layout.parts
    faults = tuple(find_faults(plan, trainer, parts))
    free = job.with_(cuts=None, replicas=None)
    try:
        restricted, within = restrict(free, trainer, parts)
    except PartoptError:  # the trainer does not run the job's schedule
        return Judgement(plan, None, None, faults)
    recut = _recut(job, restricted, within, plan, progress)
    able = [] if recut is None or any(find_faults(recut, trainer, parts)) else [recut]
    with suppress(PartoptError):  # no planner has one
        able.append(solve_within(free, trainer, parts, progress).plan)
    return Judgement(plan, recut, min(able, key=order_of, default=None), faults)


def plan_layout(layout: TrainerLayout, job: Job) -> Plan:
    """The plan of `layout` for `job`, which has its `options`, with the warm-up of its schedule.

    Where the job does not say it, at the microbatch size at which it is fastest.
    """
    check_planner(MANUAL, job.problem)
    warmups = layout.reading.warmups

    def find(sized: Job, progress: Progress, beat_s: float) -> Plan:
        plan = planners.plan(MANUAL, sized.problem)
        if warmups is None:
            return simulate_with_best_warmup(plan)
        return simulate_at_warmup(plan, warmups)

    return next(iter(search_sizes(job, ignore_progress, find, lambda plan: plan).values()))


def _recut(job: Job, free: Job, within: Within, plan: Plan, progress: Progress) -> Plan | None:
    """The plan with its cuts moved in the simulator, from where they are and where planners cut.

    `free` is the job within what the trainer has, without the layout. None where none of these are
    cuts that it allows.
    """
    stated = {"microbatch_size": plan.microbatch_size}
    problem = free.with_(**stated).problem
    cells = set(problem.boundaries())
    found: dict[tuple[int, ...], Plan] = {}
    others = [plan]
    with suppress(PartoptError):  # no planner has one
        result = solve(free.with_(**stated, stages=len(plan.stages)), progress, within)
        others += [result.plan, *result.alternatives]
    for other in others:
        cuts = tuple(stage.start for stage in other.stages[1:])
        if len(other.stages) == len(plan.stages) and cells.issuperset(cuts):
            as_cut = job.with_(**stated, cuts=list(cuts) or None).problem
            found[cuts] = simulate_plan(planners.plan(MANUAL, as_cut))
    starts = sorted(found.values(), key=order_of)[:_STARTS]
    moved = [move_cuts(start, problem, SearchParams.at(job.effort)) for start in starts]
    best = min(moved, key=order_of, default=None)
    return replace(best, planner=MANUAL) if best else None
