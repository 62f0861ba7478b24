"""The best plan that a trainer can say.

The job is restricted to what the trainer can: where stages begin, replicas, schedules,
recomputation. What planners still decide otherwise, ranks in another order or a deeper warm-up, is
put as the trainer has it, and simulated so.
"""

from __future__ import annotations

import fnmatch
import glob
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from msgspec import structs

from partopt.cost.pricing import price
from partopt.cost.problem import (
    CONTIGUOUS,
    FREE,
    NESTED,
    Partition,
    Problem,
    Progress,
    ignore_progress,
    partition_of,
    problem_from_plan,
)
from partopt.documents import Note
from partopt.documents.engine import PARTOPT
from partopt.documents.plan import Plan
from partopt.documents.profile import Profile
from partopt.documents.transformer import Transformer
from partopt.errors import ANSWER_IS_NO, PartoptError, found_until_then
from partopt.job import Job
from partopt.options import AUTO, CHOSEN_BY_AUTO, MANUAL
from partopt.schedules import SCHEDULES
from partopt.schedules.placement import LOOPED
from partopt.search.bound import certify_simulated
from partopt.search.cuts import move_cuts
from partopt.search.effort import SearchParams
from partopt.search.recomputed_blocks import recompute_less
from partopt.search.rows import order_of, search_rows
from partopt.search.solve import Result, as_fixed, solve_profile
from partopt.search.variants import Within
from partopt.simulator.execution import simulate_plan
from partopt.trainer_plans.levers import with_levers
from partopt.trainer_plans.sizing import find_fewer
from partopt.trainer_plans.transformers import as_planned, search_layouts, with_modelled
from partopt.trainers import TRAINERS
from partopt.trainers.parts import EMBEDDING, HEAD, Part, block_bounds, find_parts
from partopt.trainers.says import find_faults, may_begin
from partopt.trainers.trainer import ANYWHERE, Trainer
from partopt.transformer.layouts import Found

_STARTS = 4  # plans whose cuts are moved, the best
# planners whose plans the simulator changes; what others decide is theirs only as it is
_SEARCHED = ("optimal", "grid")


def solve(
    job: Job,
    progress: Progress = ignore_progress,
    *,
    rules: Sequence[str] = (),
    levers: bool = True,
) -> Result:
    """The best plan of `job`, simulated: of its trainer, the best that this can say.

    What the job leaves open is chosen, as `solve_profile` does it. `rules` are those of
    `export_plan`; the alternatives are what else was found that the trainer can say. Of a
    transformer all layouts are estimated in closed form, and the fastest simulated; the plan says
    what else would be faster, without `levers` not.
    `progress(what, done, total)` is called now and then. Raises PartoptError where the job asks for
    what the trainer cannot do, and with the reasons where no plan that it can say was found;
    Interrupted with the result until then.
    """
    if isinstance(job.model, Profile) and job.trainer == PARTOPT:
        return solve_profile(job, progress)
    job = job_for(job, job.trainer, rules)
    if isinstance(job.model, Transformer):

        def finish(plan: Plan, found: Found) -> Plan:
            asked = as_planned(job, plan)
            plan = with_levers(asked, plan, found)
            return with_modelled(plan, fewer=find_fewer(asked, found))

        return search_layouts(job, progress, finish if levers else None)[0]
    trainer = TRAINERS.lookup(job.trainer)
    return solve_within(job, trainer, _parts_of(job, trainer, rules), progress)


def job_for(job: Job, to: str, rules: Sequence[str] = ()) -> Job:
    """The job for the trainer `to`: with its engine, of which the job's facts replace some.

    `rules` are those of `export_plan`, for blocks that it makes again. Of a transformer the trainer
    alone is set. Raises PartoptError where the job asks for what the trainer cannot do.
    """
    trainer = TRAINERS.lookup(to)
    if isinstance(job.model, Transformer):
        if rules:
            what = f"`map`: {job.model.name} is a transformer's configuration, not a profile"
            raise PartoptError(what, "leave `map` out", code="unused-option", option="map")
        return job.with_(trainer=to, facts=trainer.spell_recipe(job.facts, job.model.name))
    _check_asked(job, trainer)
    parts = _parts_of(job, trainer, rules) if trainer.engine.recomputes_blocks else []
    bounds = block_bounds(parts) if parts else None
    return job.with_(trainer=to, engine=trainer.engine, block_bounds=bounds)


def _parts_of(job: Job, trainer: Trainer, rules: Sequence[str]) -> list[Part]:
    names = [layer.name for layer in job.profile.layers]
    return [] if trainer.says.cuts == ANYWHERE else find_parts(names, rules)


def schedule_for(
    trainers: Sequence[str], options: Mapping[str, Any], several: bool = True
) -> str | None:
    """The schedule of a job with these `options` that all `trainers` run.

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
    """`solve` of a trainer, to which the layers of the profile are `parts`."""
    _check_model(job, trainer, parts)
    job, within = restrict(job, trainer, parts)
    notes = [*job.notes] if trainer.trains else [*job.notes, _inference(trainer)]
    said, plans = _Said(job, trainer, parts, progress), list[Plan]()
    with found_until_then(lambda found: _ranked(plans or said.put_all(found or ()), job, notes)):
        found, told = _search(job, within, progress)
        notes += [note for note in told if trainer.trains and note not in notes]
        plans += said.put_all(found)
        firsts: dict[object, int] = {}  # by number of stages, the best
        for place, plan in enumerate(plans):
            firsts.setdefault((plan.schedule, len(plan.stages)), place)
        improve = said.improve if job.planner_name is None else said.recompute_fewer
        for place in list(firsts.values())[:_STARTS]:
            plans[place] = improve(plans[place])
    if not plans:
        faults = dict.fromkeys(f for plan in found for f in find_faults(plan, trainer, parts))
        raise PartoptError(
            f"no plan was found that {trainer.name} can say: {'; '.join(faults)}",
            "give other devices or another number of microbatches, or choose the schedule",
            ANSWER_IS_NO,
            code="no-plan",
            target=trainer.name,
        )
    return _ranked(plans, job, notes)


def _ranked(plans: Sequence[Plan], job: Job, notes: Sequence[Note]) -> Result:
    """The best of the plans, and others. PartoptError where none has the layout that is fixed."""
    distinct: dict[object, Plan] = {}  # of equal stages the first, or of every schedule
    for plan in sorted(plans, key=order_of):
        stages = tuple((stage.start, tuple(stage.ranks), stage.recompute) for stage in plan.stages)
        distinct.setdefault(plan.schedule if job.schedule == AUTO else stages, plan)
    best, *slower = as_fixed(list(distinct.values()))
    return Result(best, tuple(slower), tuple(notes), (best,))


def _inference(trainer: Trainer) -> Note:
    text = (
        f"{trainer.name} runs forwards alone: the stages are balanced for training, whose "
        "schedule, times and memory the page shows"
    )
    return Note(code="plan-of-training", text=text)


@dataclass(frozen=True)
class _Said:
    """Plans of a job, changed to what a trainer can say, whose layers are `parts`."""

    job: Job
    trainer: Trainer
    parts: Sequence[Part]
    progress: Progress

    def put_all(self, plans: Iterable[Plan]) -> list[Plan]:
        """Those that the trainer can say, as it would run them; the best first."""
        able = [said for plan in plans if (said := self._put(plan)) is not None]
        return sorted(able, key=order_of)

    def _put(self, plan: Plan) -> Plan | None:
        """The plan, or as the trainer would run it; None where it cannot say it either way.

        It would have the ranks of a stage next to each other, at the warm-up of its schedule.
        """
        if self._can_say(plan):
            return plan
        if len({stage.replicas for stage in plan.stages}) > 1 or plan.copies > 1:
            return None
        problem, d = problem_from_plan(plan, self.job.profile), plan.stages[0].replicas
        held = list(dict.fromkeys(tuple(stage.ranks) for stage in plan.stages))
        stages = [
            replace(stage, ranks=range(d * place, d * place + d))
            for stage in partition_of(plan, problem.recompute_per_stage).stages
            for place in [held.index(tuple(stage.ranks))]
        ]
        family = CONTIGUOUS if plan.family == NESTED else plan.family
        with suppress(PartoptError):
            said = simulate_plan(price(Partition(family, stages), problem, plan.planner))
            return _with_bound_of(plan, said, problem) if self._can_say(said) else None
        return None

    def improve(self, plan: Plan) -> Plan:
        """With fewer blocks made again, and cuts moved in the simulator, where that helps."""
        plan = self.recompute_fewer(plan)
        problem, start = problem_from_plan(plan, self.job.profile), plan
        problem = problem.with_(progress=self.progress)
        if plan.planner not in _SEARCHED:
            start = structs.replace(plan, planner=_SEARCHED[-1], certificate=None)
            problem = problem.with_(stages=None, replication=FREE, costs=None)
        moved = move_cuts(start, problem, SearchParams.at(self.job.effort))
        if not self._can_say(moved) or order_of(moved) >= order_of(plan):
            return plan
        return self.recompute_fewer(_with_bound_of(start, moved, problem))

    def recompute_fewer(self, plan: Plan) -> Plan:
        """With as few blocks made again as fit, where the trainer says how many and the job not."""
        job, says = self.job, self.trainer.says.recomputed
        if (
            job.recompute not in (None, "auto")
            or says == "all"
            or not plan.engine.recomputes_blocks
        ):
            return plan
        return recompute_less(plan, problem_from_plan(plan, job.profile), alike=says == "first")

    def _can_say(self, plan: Plan) -> bool:
        return not any(find_faults(plan, self.trainer, self.parts))


def _with_bound_of(plan: Plan, changed: Plan, problem: Problem) -> Plan:
    """`changed` with what is proved of plans like `plan`, where anything is."""
    if plan.certificate is None:
        return changed
    return certify_simulated(changed, plan.certificate.lower_bound_s, problem)


def _search(job: Job, within: Within, progress: Progress) -> tuple[list[Plan], Sequence[Note]]:
    """All plans that are found within what the trainer can, and notes; Interrupted with plans."""
    if job.planner_name is None:
        with found_until_then(lambda rows: [plan for row in rows or () for plan in row.every]):
            rows = search_rows(job, within, progress)
            return [plan for row in rows for plan in row.every], ()
    results = list[Result]()
    with found_until_then(lambda last: [result.plan for result in (*results, last) if result]):
        _plan_by_planner(job, within, progress, results)
    notes = [note for result in results for note in result.notes]
    return [result.plan for result in results], notes


def _plan_by_planner(job: Job, within: Within, progress: Progress, found: list[Result]) -> None:
    """Add what its planner finds; all stages recompute, or none, where they have to be alike."""
    modes = ["never", "always"] if within.alike and job.recompute == "auto" else [job.recompute]
    refusals: dict[str, PartoptError] = {}
    for mode in modes:
        try:
            found.append(solve_profile(job.with_(recompute=mode), progress))
        except PartoptError as error:
            refusals[error.message] = error
    if len(refusals) == len(modes):
        raise PartoptError.together(refusals.values())


def restrict(job: Job, trainer: Trainer, parts: Sequence[Part]) -> tuple[Job, Within]:
    """The job within what the trainer can say, and what plans may be beyond what it says.

    Raises PartoptError where the job asks for what the trainer cannot do.
    """
    _check_asked(job, trainer)
    says = trainer.says
    within = Within(
        schedules=None if trainer.schedules is None else list(trainer.schedules),
        equal=says.replicas == "equal",
        alike=says.recomputed != "each",
        least_stages=says.least_stages,
    )
    if job.planner_name == MANUAL:
        return job, within
    changes: dict[str, Any] = {}
    if says.cuts != ANYWHERE:
        changes["cut_at"] = _places(job, trainer, parts)
    if not says.ties:
        changes["tied"] = "together"
    if says.replicas == "one" and job.layout.dp is None:
        changes["layout"] = structs.replace(job.layout, dp=1)
    elif says.replicas == "equal" and job.planner_name is not None and job.replication == FREE:
        changes["replication"] = "uniform"
    return job.with_(**changes), within


def _check_asked(job: Job, trainer: Trainer) -> None:
    """Refuse options that the trainer has nothing for."""
    modes: list[object] = [job.recompute]
    if trainer.engine.recompute == ("none",):
        modes = ["never", None]
    elif job.first is not None and trainer.says.recomputed == "all":
        modes = ["always", "never"]
    for option, able in (
        ("schedule", list(trainer.schedules or [job.schedule])),
        ("shard", [None, *trainer.engine.shard]),
        ("recompute", modes),
    ):
        asked, has = getattr(job, option), ", ".join(str(value) for value in able if value)
        if asked not in able and asked != AUTO:
            raise PartoptError(
                f"`{option}={asked}`: {trainer.name} has {has}",
                f"choose `{option}={next(value for value in able if value)}`",
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
    inside = {i for using in users.values() for i in range(using[0] + 1, using[-1] + 1)}
    if not trainer.says.ties and len(layers) - len(inside) < trainer.says.least_stages:
        name, using = max(users.items(), key=lambda item: item[1][-1] - item[1][0])
        raise PartoptError(
            f"{trainer.name} has what layers share in one stage: {layers[using[0]].name} and "
            f"{layers[using[-1]].name} share {name}, which leaves no pipeline",
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
