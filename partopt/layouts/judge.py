"""A layout judged: simulated as its trainer runs it, beside the best plan that the trainer runs."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from msgspec import structs

from partopt import planners
from partopt.cost.flight import warmup
from partopt.cost.problem import Problem, Progress, ignore_progress
from partopt.documents.plan import Plan
from partopt.errors import PartoptError
from partopt.exporters.faithful import find_faults, has_usual_warmup, may_begin
from partopt.exporters.target import ANYWHERE, Target
from partopt.job import Job
from partopt.layouts.trainer_layout import TrainerLayout
from partopt.options import MANUAL
from partopt.search.climb import move_cuts
from partopt.search.contest import check_planner
from partopt.search.sizes import order_of, search_sizes
from partopt.search.solve import solve
from partopt.search.warmup import simulate_at_warmup
from partopt.simulator.prediction import simulate_plan
from partopt.simulator.restate import with_conditions

_REPLICATION = {"one": "none", "equal": "uniform", "any": "free"}


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
    plan = plan_layout(layout, job)
    faults = tuple(find_faults(plan, layout.target, layout.parts))
    recut = _recut(layout, job, plan)
    found = [_as_run_by(layout.target, each) for each in _others(layout, job, progress)]
    able = [
        each
        for each in [*([recut] if recut else []), *found]
        if not any(find_faults(each, layout.target, layout.parts))
    ]
    return Judgement(plan, recut, min(able, key=order_of, default=None), faults)


def plan_layout(layout: TrainerLayout, job: Job) -> Plan:
    """The plan of `layout` for `job`, which has its `options`, with the warm-up of its schedule.

    Where the job does not say it, at the microbatch size at which it is fastest.
    """
    check_planner(MANUAL, job.problem)
    warmups = layout.order.warmups if layout.order else None

    def find(each: Job, progress: Progress, beat_s: float) -> Plan:
        return _simulate(each.problem, warmups)

    return next(iter(search_sizes(job, ignore_progress, find, lambda plan: plan).values()))


def _simulate(problem: Problem, warmups: Sequence[int] | None) -> Plan:
    plan = planners.plan(MANUAL, problem)
    return simulate_plan(plan) if warmups is None else simulate_at_warmup(plan, warmups)


def _recut(layout: TrainerLayout, job: Job, plan: Plan) -> Plan | None:
    """The plan with its cuts moved, from where they are and from stages of equal times.

    None where neither are cuts that the trainer has.
    """
    problem = _free(layout, job).with_(microbatch_size=plan.microbatch_size).problem
    starts = [[stage.start for stage in plan.stages[1:]]]
    with suppress(PartoptError):  # so many stages are more than it may cut
        partition = planners.decide("gpipe", replace(problem, stages=len(plan.stages))).partition
        starts.append([stage.start for stage in partition.stages[1:]])
    cells = set(problem.boundaries())
    found = []
    for cuts in starts:
        if cells.issuperset(cuts):
            own = job.with_(microbatch_size=plan.microbatch_size, cuts=cuts or None).problem
            found.append(move_cuts(simulate_plan(planners.plan(MANUAL, own)), problem))
    best = min(found, key=order_of, default=None)
    return structs.replace(best, planner=MANUAL) if best else None


def _others(layout: TrainerLayout, job: Job, progress: Progress) -> list[Plan]:
    """The best plan of all planners under the conditions of `job`, and those beside it."""
    with suppress(PartoptError):  # no planner has one
        result = solve(_free(layout, job), progress)
        return [result.plan, *result.alternatives]
    return []


def _free(layout: TrainerLayout, job: Job) -> Job:
    """The job without the layout, but with what its trainer needs of a plan."""
    target = layout.target
    starts: tuple[str, ...] = ()
    if target.cuts != ANYWHERE:
        names = [job.profile.layers[i].name for i in may_begin(layout.parts, target.cuts)]
        starts = tuple(glob.escape(name) for name in names)
    free = job.replication == "free"
    return job.with_(
        cuts=None,
        replicas=None,
        cut_at=starts,
        replication=_REPLICATION[target.replicas] if free else job.replication,
        tied=job.tied if target.ties else "together",
    )


def _as_run_by(target: Target, plan: Plan) -> Plan:
    """The plan with the warm-up of its schedule, where the trainer knows no other."""
    if (target.schedules or {}).get(plan.schedule) is None or has_usual_warmup(plan):
        return plan
    replicas = [stage.replicas for stage in plan.stages]
    usual = [warmup(plan.schedule, s, replicas, plan.microbatches) for s in range(len(replicas))]
    return simulate_plan(with_conditions(plan, warmups=usual))
