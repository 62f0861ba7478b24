"""A trainer's layout judged: as its trainer runs it, beside the best plan that the trainer runs."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from msgspec.structs import replace

from partopt import planners
from partopt.cost.problem import Progress, ignore_progress
from partopt.documents.engine import Layout
from partopt.documents.plan import Plan, cuts_of, seconds_of
from partopt.errors import PartoptError, make_each
from partopt.job import Job
from partopt.options import MANUAL
from partopt.search.contest import check_planner
from partopt.search.cuts import move_cuts
from partopt.search.effort import SearchParams
from partopt.search.layout_plans import (
    as_planned,
    beside_of,
    layouts_beside,
    search_layouts,
    simulate_layout,
    with_cut_by_count,
    with_modelled,
)
from partopt.search.layout_questions import fill_layout, training_for
from partopt.search.levers import with_levers
from partopt.search.ranking import order_of
from partopt.search.solve import solve_profile, solve_within
from partopt.search.trainer_limits import restrict
from partopt.search.variants import Within
from partopt.search.warmup import simulate_at_warmup, simulate_with_best_warmup
from partopt.simulator.execution import simulate_plan
from partopt.simulator.prediction import complete_prediction
from partopt.trainers.layout import TrainerLayout
from partopt.trainers.says import find_faults
from partopt.transformer.as_profile import estimate_again

_STARTS = 2  # cuts from which others are looked for, the best
_SWITCHES = ("sequence-parallel", "allreduce", "waits", "ends")  # facts that a flag alone changes
_NEEDING = ("tp-overlap", "exchange-overlap")  # those that not every layout can have


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
    faults: tuple[str, ...] = ()


def judge_layout(
    job: Job, layout: TrainerLayout | None = None, progress: Progress = ignore_progress
) -> Judgement:
    """The plan of the layout that `job` states, and what it stands beside.

    Of a profile that is `layout`, whose `options` the job has. PartoptError where the layout is no
    plan of the job's, as where its schedule cannot run it.
    """
    plan = plan_layout(job, layout)
    if layout is None:
        return _judge_transformer(job, plan, progress)
    trainer, parts = layout.trainer, layout.parts
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


def plan_layout(job: Job, layout: TrainerLayout | None = None) -> Plan:
    """The plan of the layout that `job` states; of a profile `layout`, whose `options` it has.

    That has the warm-up of its schedule, and the microbatch size at which it is fastest where the
    job does not say it. Of a transformer all that is open is 1, and nothing is made again.
    PartoptError where the layout cannot be run.
    """
    if layout is None:
        training = training_for(job)
        return complete_prediction(simulate_layout(job, training, fill_layout(job, training)))
    check_planner(MANUAL, job.problem)
    warmups = layout.stated.warmups

    def plan_at(sized: Job) -> Plan:
        plan = planners.plan(MANUAL, sized.problem)
        if warmups is None:
            return simulate_with_best_warmup(plan)
        return simulate_at_warmup(plan, warmups)

    return complete_prediction(min(make_each(job.at_each_size(), plan_at), key=order_of))


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
        result = solve_profile(free.with_(**stated, stages=len(plan.stages)), progress, within)
        others += [result.plan, *result.alternatives]
    for other in others:
        cuts = tuple(cuts_of(other))
        if len(other.stages) == len(plan.stages) and cells.issuperset(cuts):
            as_cut = job.with_(**stated, cuts=list(cuts) or None).problem
            found[cuts] = simulate_plan(planners.plan(MANUAL, as_cut))
    starts = sorted(found.values(), key=order_of)[:_STARTS]
    moved = [move_cuts(start, problem, SearchParams.at(job.effort)) for start in starts]
    best = min(moved, key=order_of, default=None)
    return replace(best, planner=MANUAL) if best else None


def _judge_transformer(job: Job, plan: Plan, progress: Progress) -> Judgement:
    """The plan of a layout beside the best of all layouts.

    Facts are the same, but for those that a flag alone turns on, or that a layout cannot have.
    """
    facts = {name: value for name, value in job.facts.items() if name not in _SWITCHES}
    if facts.get("attention") == "scores":  # a flag changes it, too
        del facts["attention"]
    free = job.with_(layout=Layout(), facts=facts)
    best, found, _ = search_layouts(free, progress)
    plain = {name: value for name, value in facts.items() if name not in _NEEDING}
    if plain != facts:
        without = free.with_(facts=plain)
        other = search_layouts(without, progress)
        if order_of(other[0]) < order_of(best):
            free, (best, found, _) = without, other
    before, free = free, as_planned(free, best)
    best = with_levers(free, best, found, before=before)
    plan = with_cut_by_count(job, training_for(job), plan)
    if plan.fits and seconds_of(plan) <= seconds_of(best):  # as where blocks lie unevenly
        plan = best = with_levers(free, plan, found, before=before)
    else:
        first, to = map(estimate_again, (best, plan))
        rows = [beside_of(first, to, best, best.fits)]
        others = layouts_beside(free, plan, [], found)
        rows += [other for other in others if other.layout != first.layout]
        plan = with_modelled(plan, tried=found.tried, beside=rows)
    return Judgement(plan, None, best)
