"""The best plan that a trainer can say.

The job is restricted to what the trainer can: where stages begin, replicas, schedules,
recomputation. What planners still decide otherwise, ranks in another order or a deeper warm-up, is
put as the trainer has it, and simulated so.
"""

from __future__ import annotations

import fnmatch
import glob
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from partopt.cost.plan import price
from partopt.cost.problem import (
    CONTIGUOUS,
    NESTED,
    Partition,
    Problem,
    Progress,
    ignore_progress,
    partition_of,
    problem_from_plan,
)
from partopt.documents.plan import Plan
from partopt.errors import ANSWER_IS_NO, PartoptError
from partopt.exporters import EXPORTERS
from partopt.exporters.blocks import Part, find_parts
from partopt.exporters.faithful import find_faults, may_begin
from partopt.exporters.target import ANYWHERE, Target
from partopt.job import Job
from partopt.options import AUTO, CHOSEN_BY_AUTO, MANUAL
from partopt.schedules import SCHEDULES, schedule
from partopt.schedules.layout import LOOPED
from partopt.search.bound import certify_simulated
from partopt.search.cuts import move_cuts
from partopt.search.sizes import order_of
from partopt.search.solve import Result, solve
from partopt.simulator.prediction import simulate_plan

_STARTS = 4  # plans whose cuts are moved, the best
_LENGTHS = 4  # numbers of stages that are tried where a trainer needs several


def solve_for(
    job: Job, to: str, *, rules: Sequence[str] = (), progress: Progress = ignore_progress
) -> Result:
    """The best plan of `job` that the trainer `to`, a name from `EXPORTERS`, can say.

    `rules` are those of `export_plan`; the alternatives are what else was found that it can say.
    Raises PartoptError where the job asks for what the trainer cannot do, and with the reasons
    where no plan that it can say was found.
    """
    target = EXPORTERS.lookup(to)
    names = [layer.name for layer in job.profile.layers]
    parts = [] if target.cuts == ANYWHERE else find_parts(names, rules)
    return solve_within(job, target, parts, progress)


def schedule_for(
    trainers: Sequence[str], options: Mapping[str, Any], several: bool = True
) -> str | None:
    """The schedule of a job with these `options` that each of `trainers` runs.

    That is "auto" where the trainer's schedules may be tried, which needs `several` and no option
    that "auto" chooses itself; else one of them, 1f1b where they run it. None where schedules do
    not matter to the trainers, as to those for inference. Raises PartoptError where they have none
    in common.
    """
    known = [names for each in trainers if (names := EXPORTERS.lookup(each).schedules) is not None]
    chunks, replication = options.get("chunks"), options.get("replication", "free")
    common = [
        name
        for name, entry in SCHEDULES.items()
        if entry.tried_by_auto
        and all(name in names for names in known)
        and (chunks is None or entry.shape == LOOPED)
    ]
    if known and not common:
        raise PartoptError(
            f"{' and '.join(trainers)} have no schedule in common",
            "give one trainer, or name the schedule",
            code="target-cannot-say",
            option="schedule",
        )
    if not known:
        return None
    stated = replication != "free" or any(options.get(n) is not None for n in CHOSEN_BY_AUTO)
    if several and not stated:
        return AUTO
    return min(common, key=lambda name: name != "1f1b")


def solve_within(
    job: Job, target: Target, parts: Sequence[Part], progress: Progress = ignore_progress
) -> Result:
    """`solve_for` of a trainer, to which the layers of the profile are `parts`."""
    results, refusals = [], []
    waiting = deque(restrictions(job, target, parts))
    while waiting:
        changes = waiting.popleft()
        try:
            found = solve(job.with_(**changes), progress)
        except PartoptError as error:
            refusals.append(error)
            continue
        results.append(found)
        if len(found.plan.stages) < target.least_stages:  # the best is no pipeline there
            waiting.extend(_longer(job, target, changes))
    if not results:
        raise PartoptError.together({error.message: error for error in refusals}.values())
    all_found = [
        plan
        for result in results
        for plan in (result.plan, *result.alternatives)
        if job.planner_name in (None, plan.planner)
    ]
    plans = [said for plan in all_found if (said := _as_said(plan, target, parts, job)) is not None]
    if not plans:
        faults = dict.fromkeys(f for plan in all_found for f in find_faults(plan, target, parts))
        raise PartoptError(
            f"no plan was found that {target.name} can say: {'; '.join(faults)}",
            "give other devices or another number of microbatches, or choose the schedule",
            ANSWER_IS_NO,
            code="no-plan",
            target=target.name,
        )
    if job.planner_name is None:
        starts = _starts(plans)
        others = [plan for plan in plans if plan not in starts]
        plans = others + [_improve(plan, target, parts, job) for plan in starts]
    best, *slower = _distinct(sorted(plans, key=order_of), job)
    return Result(best, tuple(slower), results[0].notes, (best,))


def _distinct(plans: Sequence[Plan], job: Job) -> list[Plan]:
    """Of equal stages the first; under `schedule="auto"` the first of each schedule."""
    found: dict[object, Plan] = {}
    for plan in plans:
        stages = tuple((stage.start, tuple(stage.ranks), stage.recompute) for stage in plan.stages)
        found.setdefault(plan.schedule if job.schedule == AUTO else stages, plan)
    return list(found.values())


def _longer(job: Job, target: Target, changes: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The changes, with as many stages as the devices are a multiple of, the fewest first."""
    own = {"schedule": job.schedule, **changes}
    stated = job.stages is not None or "stages" in changes
    if own["schedule"] == AUTO or stated or job.planner_name is not None:
        return
    devices = job.topology.devices
    counts = [S for S in range(target.least_stages, devices + 1) if devices % S == 0]
    for S in counts[:_LENGTHS]:
        yield own | {"stages": S}


def _starts(plans: Sequence[Plan]) -> list[Plan]:
    """The best of the plans with each number of stages, which a search begins from."""
    found: dict[tuple[str, int], Plan] = {}
    for plan in sorted(plans, key=order_of):
        found.setdefault((plan.schedule, len(plan.stages)), plan)
    return list(found.values())[:_STARTS]


def _improve(plan: Plan, target: Target, parts: Sequence[Part], job: Job) -> Plan:
    """The plan with its cuts moved in the simulator, where it helps and the trainer can say it."""
    problem = problem_from_plan(plan, job.profile)
    moved = move_cuts(plan, problem)
    if any(find_faults(moved, target, parts)) or order_of(moved) >= order_of(plan):
        return plan
    return _with_bound_of(plan, moved, problem)


def restrictions(job: Job, target: Target, parts: Sequence[Part]) -> Iterator[dict[str, Any]]:
    """The options that keep the job within what the trainer can say.

    Several where planners are to choose what the trainer has for all stages alike.

    Raises PartoptError where the job asks for anything else.
    """
    _check_asked(job, target)
    if job.planner_name == MANUAL:
        yield {}
        return
    changes: dict[str, Any] = {}
    if target.cuts != ANYWHERE:
        changes["cut_at"] = _places(job, target, parts)
    if not target.ties:
        changes["tied"] = "together"
    if target.recompute == "never":
        changes["recompute"] = "never"
    if job.schedule == AUTO:
        yield dict(changes)
    if target.replicas != "any":
        changes["replication"] = "uniform" if target.replicas == "equal" else "none"
        if job.replication == "none":
            changes["replication"] = "none"
    modes = ["never", "always"] if job.recompute == "auto" and target.recompute == "all" else [None]
    for name in _named(job, target):
        for mode in modes:
            recompute = {} if mode is None else {"recompute": mode}
            yield changes | {"schedule": name} | recompute


def _check_asked(job: Job, target: Target) -> None:
    """Refuse options that the trainer has nothing for."""
    names = target.schedules
    if names is not None and job.schedule != AUTO and job.schedule not in names:
        raise PartoptError(
            f"`schedule={job.schedule}`: {target.name} runs {', '.join(names)}",
            f"choose `schedule={next(iter(names))}`",
            code="target-cannot-say",
            option="schedule",
        )
    if job.shard not in target.shards:
        raise PartoptError(
            f"`shard={job.shard}`: {target.name} has {', '.join(target.shards)}",
            f"choose `shard={target.shards[0]}`",
            code="target-cannot-say",
            option="shard",
        )
    if job.recompute == "always" and target.recompute == "never":
        raise PartoptError(
            f"`recompute=always`: {target.name} recomputes nothing",
            "choose `recompute=never`",
            code="target-cannot-say",
            option="recompute",
        )


def _named(job: Job, target: Target) -> list[str]:
    """The schedules to plan for by name: that of the job, or where it is open those of planners."""
    if job.schedule != AUTO:
        return [job.schedule]
    names = [name for name in target.schedules or SCHEDULES if schedule(name).tried_by_auto]
    return [name for name in names if schedule(name).overlaps]


def _places(job: Job, target: Target, parts: Sequence[Part]) -> list[str]:
    """The layers that a stage may begin with, by name, of those that the job allows."""
    names = [layer.name for layer in job.profile.layers]
    may = [names[i] for i in may_begin(parts, target.cuts)]
    patterns = job.cut_at or ["*"]
    kept = [n for n in may if any(fnmatch.fnmatchcase(n, pattern) for pattern in patterns)]
    return [glob.escape(name) for name in kept or may[:1]]


def _as_said(plan: Plan, target: Target, parts: Sequence[Part], job: Job) -> Plan | None:
    """The plan, or as the trainer would run it; None where it cannot say it either way."""
    if not list(find_faults(plan, target, parts)):
        return plan
    if len({stage.replicas for stage in plan.stages}) > 1 or plan.copies > 1:
        return None
    with suppress(PartoptError):
        said = _as_mesh(plan, job)
        return None if list(find_faults(said, target, parts)) else said
    return None


def _as_mesh(plan: Plan, job: Job) -> Plan:
    """The plan with the ranks of a stage next to each other, at the schedule's own warm-up."""
    problem = problem_from_plan(plan, job.profile)
    held = list(dict.fromkeys(tuple(stage.ranks) for stage in plan.stages))
    d = plan.stages[0].replicas
    partition = partition_of(plan, problem.recompute_per_stage)
    family = CONTIGUOUS if plan.family == NESTED else plan.family
    places = [held.index(tuple(stage.ranks)) for stage in plan.stages]
    stages = [
        replace(stage, ranks=range(p * d, p * d + d))
        for stage, p in zip(partition.stages, places, strict=True)
    ]
    laid = simulate_plan(price(Partition(family, stages), problem, plan.planner))
    return _with_bound_of(plan, laid, problem)


def _with_bound_of(plan: Plan, changed: Plan, problem: Problem) -> Plan:
    """`changed` with what is proved of plans like `plan`, where anything is."""
    if plan.certificate is None:
        return changed
    return certify_simulated(changed, plan.certificate.lower_bound_s, problem)
