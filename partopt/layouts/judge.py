"""A layout judged: simulated as its trainer runs it, beside the best plan that the trainer runs."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from msgspec.structs import replace

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

_STARTS = 2  # cuts from which others are looked for, the best
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
    recut = _recut(layout, job, plan, progress)
    found = [_as_run_by(layout.target, each) for each in _plans(_free(layout, job), progress)]
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


def _recut(layout: TrainerLayout, job: Job, plan: Plan, progress: Progress) -> Plan | None:
    """The plan with its cuts moved in the simulator, from where they are and where planners cut.

    None where none of these are cuts that the trainer has.
    """
    stated = job.with_(microbatch_size=plan.microbatch_size)
    free = _free(layout, stated)
    cells = set(free.problem.boundaries())
    found: dict[tuple[int, ...], Plan] = {}
    for other in [plan, *_plans(free.with_(stages=len(plan.stages)), progress)]:
        cuts = tuple(stage.start for stage in other.stages[1:])
        if len(other.stages) == len(plan.stages) and cells.issuperset(cuts):
            own = stated.with_(cuts=list(cuts) or None).problem
            found[cuts] = simulate_plan(planners.plan(MANUAL, own))
    starts = sorted(found.values(), key=order_of)[:_STARTS]
    moved = [move_cuts(start, free.problem) for start in starts]
    best = min(moved, key=order_of, default=None)
    return replace(best, planner=MANUAL) if best else None


def _plans(job: Job, progress: Progress) -> list[Plan]:
    """The best plan of all planners for `job`, and those beside it; none where none has one."""
    with suppress(PartoptError):
        result = solve(job, progress)
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
