"""The best plan that a trainer can say.

The job is restricted to what the trainer can: where stages begin, replicas, schedules,
recomputation. What planners still decide otherwise, ranks in another order or a deeper warm-up, is
put as the trainer has it, and simulated so.
"""

from __future__ import annotations

import fnmatch
import glob
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
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
from partopt.job import Job
from partopt.options import AUTO, CHOSEN_BY_AUTO, MANUAL
from partopt.schedules import SCHEDULES, schedule
from partopt.schedules.layout import LOOPED
from partopt.search.blocks import recompute_less
from partopt.search.bound import certify_simulated
from partopt.search.cuts import move_cuts
from partopt.search.sizes import order_of
from partopt.search.solve import Result, solve
from partopt.simulator.execution import simulate_plan
from partopt.trainers import TRAINERS
from partopt.trainers.parts import EMBEDDING, HEAD, Part, block_bounds, find_parts
from partopt.trainers.says import find_faults, may_begin
from partopt.trainers.trainer import ANYWHERE, Trainer

_STARTS = 4  # plans whose cuts are moved, the best
_LENGTHS = 4  # numbers of stages that are tried where a trainer needs several


def solve_for(
    job: Job, to: str, *, rules: Sequence[str] = (), progress: Progress = ignore_progress
) -> Result:
    """The best plan of `job` that the trainer `to`, a name from `TRAINERS`, can say.

    `rules` are those of `export_plan`; the alternatives are what else was found that it can say.
    Raises PartoptError where the job asks for what the trainer cannot do, and with the reasons
    where no plan that it can say was found.
    """
    trainer, job = TRAINERS.lookup(to), job_for(job, to, rules)
    return solve_within(job, trainer, _parts_of(job, trainer, rules), progress)


def job_for(job: Job, to: str, rules: Sequence[str] = ()) -> Job:
    """The job for the trainer `to`: with its engine, of which the job's facts replace some.

    `rules` are those of `export_plan`, for blocks that it makes again. Raises PartoptError where
    the job asks for what the trainer cannot do.
    """
    trainer = TRAINERS.lookup(to)
    _check_asked(job, trainer)
    blocks = trainer.engine.recomputes_blocks
    bounds = block_bounds(_parts_of(job, trainer, rules)) if blocks else None
    return job.with_(trainer=to, engine=trainer.engine, block_bounds=bounds)


def _parts_of(job: Job, trainer: Trainer, rules: Sequence[str]) -> list[Part]:
    names = [layer.name for layer in job.profile.layers]
    return [] if trainer.says.cuts == ANYWHERE else find_parts(names, rules)


def schedule_for(
    trainers: Sequence[str], options: Mapping[str, Any], several: bool = True
) -> str | None:
    """The schedule of a job with these `options` that each of `trainers` runs.

    That is "auto" where the trainer's schedules may be tried, which needs `several` and no option
    that "auto" chooses itself; else the first of them. To trainers for inference schedules do not
    matter: a batch asks for a synchronous one, else it is None. Raises PartoptError where they have
    none in common.
    """
    named = [TRAINERS.lookup(name).schedules for name in trainers]
    known: list[Collection[str]] = [names for names in named if names is not None]
    if not known and not (options.get("microbatches") or options.get("global_batch")):
        return None
    known = known or [sorted(SCHEDULES, key=lambda name: name != "1f1b")]
    common = [
        name
        for name in known[0]
        if SCHEDULES[name].tried_by_auto
        and all(name in names for names in known)
        and (options.get("chunks") is None or SCHEDULES[name].shape == LOOPED)
    ]
    if not common:
        raise PartoptError(
            f"{' and '.join(trainers)} have no schedule in common",
            "give one trainer, or name the schedule",
            code="target-cannot-say",
            option="schedule",
        )
    stated = options.get("replication", "free") != "free"
    stated = stated or any(options.get(name) is not None for name in CHOSEN_BY_AUTO)
    return AUTO if several and not stated else common[0]


def solve_within(
    job: Job, trainer: Trainer, parts: Sequence[Part], progress: Progress = ignore_progress
) -> Result:
    """`solve_for` of a trainer, to which the layers of the profile are `parts`."""

    def improve(plan: Plan) -> Plan:
        """With fewer blocks made again, and its cuts moved, where it helps and can be said."""
        plan = recompute_fewer(plan)
        problem = problem_from_plan(plan, job.profile)
        moved = move_cuts(plan, problem)
        if any(find_faults(moved, trainer, parts)) or order_of(moved) >= order_of(plan):
            return plan
        return recompute_fewer(_with_bound_of(plan, moved, problem))

    def recompute_fewer(plan: Plan) -> Plan:
        """With as few blocks made again as fit, where the trainer says how many and the job not."""
        says = trainer.says.recomputed
        if job.recompute not in chosen or says == "all" or not plan.engine.recomputes_blocks:
            return plan
        return recompute_less(plan, problem_from_plan(plan, job.profile), alike=says == "first")

    chosen = ("auto", None) if job.schedule == AUTO else ("auto",)  # where planners decide it

    _check_model(job, trainer, parts)
    results, refusals = [], []
    waiting = deque(restrictions(job, trainer, parts))
    while waiting:
        changes = waiting.popleft()
        try:
            found = solve(job.with_(**changes), progress)
        except PartoptError as error:
            refusals.append(error)
            continue
        results.append(found)
        if len(found.plan.stages) < trainer.says.least_stages:  # the best is no pipeline there
            waiting.extend(_longer(job, trainer, changes))
    if not results:
        raise PartoptError.together({error.message: error for error in refusals}.values())
    all_found = [
        plan
        for result in results
        for plan in (result.plan, *result.alternatives)
        if job.planner_name in (None, plan.planner)
    ]
    as_said = (_as_said(plan, trainer, parts, job) for plan in all_found)
    plans = [plan for plan in as_said if plan is not None]
    if not plans:
        faults = dict.fromkeys(f for plan in all_found for f in find_faults(plan, trainer, parts))
        raise PartoptError(
            f"no plan was found that {trainer.name} can say: {'; '.join(faults)}",
            "give other devices or another number of microbatches, or choose the schedule",
            ANSWER_IS_NO,
            code="no-plan",
            target=trainer.name,
        )
    if job.planner_name is None:
        firsts: dict[tuple[str, int], Plan] = {}  # of each number of stages the best
        for plan in sorted(plans, key=order_of):
            firsts.setdefault((plan.schedule, len(plan.stages)), plan)
        starts = list(firsts.values())[:_STARTS]
        others = [plan for plan in plans if plan not in starts]
        plans = others + [improve(plan) for plan in starts]
    best, *slower = _distinct(sorted(plans, key=order_of), job)
    return Result(best, tuple(slower), results[0].notes, (best,))


def _distinct(plans: Sequence[Plan], job: Job) -> list[Plan]:
    """Of equal stages the first; under `schedule="auto"` the first of each schedule."""
    found: dict[object, Plan] = {}
    for plan in plans:
        stages = tuple((stage.start, tuple(stage.ranks), stage.recompute) for stage in plan.stages)
        found.setdefault(plan.schedule if job.schedule == AUTO else stages, plan)
    return list(found.values())


def _longer(job: Job, trainer: Trainer, changes: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The changes, with as many stages as the devices are a multiple of, the fewest first."""
    own = {"schedule": job.schedule, **changes}
    stated = job.stages is not None or "stages" in changes
    if own["schedule"] == AUTO or stated or job.planner_name is not None:
        return
    devices = job.topology.devices
    counts = [S for S in range(trainer.says.least_stages, devices + 1) if devices % S == 0]
    for S in counts[:_LENGTHS]:
        yield own | {"stages": S}


def restrictions(job: Job, trainer: Trainer, parts: Sequence[Part]) -> Iterator[dict[str, Any]]:
    """The options that keep the job within what the trainer can say.

    Several where planners are to choose what the trainer has for all stages alike. Raises
    PartoptError where the job asks for what the trainer cannot do.
    """
    _check_asked(job, trainer)
    if job.planner_name == MANUAL:
        yield {}
        return
    changes: dict[str, Any] = {}
    if trainer.says.cuts != ANYWHERE:
        changes["cut_at"] = _places(job, trainer, parts)
    if not trainer.says.ties:
        changes["tied"] = "together"
    if trainer.engine.recompute == ("none",):
        changes["recompute"] = "never"
    if job.schedule == AUTO:
        yield dict(changes)
    if trainer.says.replicas != "any":
        alone = job.replication == "none" or job.layout.dp == 1
        equal = trainer.says.replicas == "equal" and not alone
        changes["replication"] = "uniform" if equal else "none"
    alike = job.recompute == "auto" and trainer.says.recomputed != "each"
    modes = ["never", "always"] if alike else [None]
    names: Collection[str] = [job.schedule]
    if job.schedule == AUTO:  # those that planners can plan for
        own = [schedule(name) for name in trainer.schedules or SCHEDULES]
        names = [entry.name for entry in own if entry.tried_by_auto and entry.overlaps]
    for name in names:
        for mode in modes:
            recompute = {} if mode is None else {"recompute": mode}
            yield changes | {"schedule": name} | recompute


def _check_asked(job: Job, trainer: Trainer) -> None:
    """Refuse options that the trainer has nothing for."""
    modes: list[object] = [job.recompute]
    if trainer.engine.recompute == ("none",):
        modes = ["never", None]
    elif job.first is not None and trainer.says.recomputed == "all":
        modes = ["always", "never"]
    for option, able in (
        ("schedule", list(trainer.schedules or [job.schedule])),
        ("shard", list(trainer.engine.shard)),
        ("recompute", modes),
    ):
        asked, has = getattr(job, option), ", ".join(str(own) for own in able if own)
        if asked not in able and asked != AUTO:
            raise PartoptError(
                f"`{option}={asked}`: {trainer.name} has {has}",
                f"choose `{option}={able[0]}`",
                code="target-cannot-say",
                option=option,
            )


def _check_model(job: Job, trainer: Trainer, parts: Sequence[Part]) -> None:
    """Refuse a model of which the trainer can say no plan, however it is cut.

    It may lack a part, or have no cut between layers that share parameters, where these have to
    stay together.
    """
    layers, kinds = job.profile.layers, {part.kind for part in parts}
    for kind in (EMBEDDING, HEAD):
        if parts and kind not in kinds:
            raise PartoptError(
                f"the model has no {kind}, and {trainer.name} asks for one",
                f"say which layers it is: `map=NAME={kind}`",
                ANSWER_IS_NO,
                code="target-cannot-say",
                target=trainer.name,
            )
    users: dict[str, list[int]] = {}
    for i, layer in enumerate(layers):
        for parameter in layer.shared_parameters:
            users.setdefault(parameter.name, []).append(i)
    inside = {i for own in users.values() for i in range(own[0] + 1, own[-1] + 1)}
    if not trainer.says.ties and len(layers) - len(inside) < trainer.says.least_stages:
        name, own = max(users.items(), key=lambda item: item[1][-1] - item[1][0])
        raise PartoptError(
            f"{trainer.name} has what layers share in one stage: {layers[own[0]].name} and "
            f"{layers[own[-1]].name} share {name}, which leaves no pipeline",
            "profile the model without tied parameters, or choose another trainer",
            ANSWER_IS_NO,
            code="target-cannot-say",
            target=trainer.name,
        )


def _places(job: Job, trainer: Trainer, parts: Sequence[Part]) -> list[str]:
    """The layers that a stage may begin with, by name, of those that the job allows."""
    names = [layer.name for layer in job.profile.layers]
    may = [names[i] for i in may_begin(parts, trainer.says.cuts)]
    patterns = job.cut_at or ["*"]
    kept = [n for n in may if any(fnmatch.fnmatchcase(n, pattern) for pattern in patterns)]
    return [glob.escape(name) for name in kept or may[:1]]


def _as_said(plan: Plan, trainer: Trainer, parts: Sequence[Part], job: Job) -> Plan | None:
    """The plan, or as the trainer would run it; None where it cannot say it either way.

    It would have the ranks of a stage next to each other, at the schedule's own warm-up.
    """
    if not any(find_faults(plan, trainer, parts)):
        return plan
    if len({stage.replicas for stage in plan.stages}) > 1 or plan.copies > 1:
        return None
    problem, d = problem_from_plan(plan, job.profile), plan.stages[0].replicas
    held = list(dict.fromkeys(tuple(stage.ranks) for stage in plan.stages))
    firsts = [d * held.index(tuple(stage.ranks)) for stage in plan.stages]
    stages = [
        replace(stage, ranks=range(first, first + d))
        for stage, first in zip(
            partition_of(plan, problem.recompute_per_stage).stages, firsts, strict=True
        )
    ]
    family = CONTIGUOUS if plan.family == NESTED else plan.family
    with suppress(PartoptError):
        said = simulate_plan(price(Partition(family, stages), problem, plan.planner))
        if not any(find_faults(said, trainer, parts)):
            return _with_bound_of(plan, said, problem)
    return None


def _with_bound_of(plan: Plan, changed: Plan, problem: Problem) -> Plan:
    """`changed` with what is proved of plans like `plan`, where anything is."""
    if plan.certificate is None:
        return changed
    return certify_simulated(changed, plan.certificate.lower_bound_s, problem)
