"""What a trainer can express of plans of a profile.

The job is restricted to what the trainer can: where stages begin, replicas, schedules,
recomputation. What planners still decide otherwise, ranks in another order or a deeper warm-up, is
put as the trainer has it, and simulated so.
"""

from __future__ import annotations

import fnmatch
import glob
from collections.abc import Iterable, Sequence
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
    partition_of,
    problem_from_plan,
)
from partopt.documents.plan import Plan
from partopt.errors import ANSWER_IS_NO, PartoptError
from partopt.job import Job
from partopt.options import AUTO, MANUAL
from partopt.search.bound import certify_simulated
from partopt.search.cuts import move_cuts
from partopt.search.effort import SearchParams
from partopt.search.ranking import SEARCHED, order_of
from partopt.search.variants import Within
from partopt.simulator.execution import simulate_plan
from partopt.trainers.parts import Part, find_parts, missing_kinds
from partopt.trainers.says import find_faults, may_begin
from partopt.trainers.trainer import ANYWHERE, Trainer


@dataclass(frozen=True)
class Expressible:
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
        """With cuts moved in the simulator, where that helps."""
        problem, start = problem_from_plan(plan, self.job.profile), plan
        problem = problem.with_(progress=self.progress)
        if plan.planner not in SEARCHED:
            start = structs.replace(plan, planner=SEARCHED[-1], certificate=None)
            problem = problem.with_(stages=None, replication=FREE, costs=None)
        moved = move_cuts(start, problem, SearchParams.at(self.job.effort))
        if not self._can_say(moved) or order_of(moved) >= order_of(plan):
            return plan
        return _with_bound_of(start, moved, problem)

    def _can_say(self, plan: Plan) -> bool:
        return not any(find_faults(plan, self.trainer, self.parts))


def _with_bound_of(plan: Plan, changed: Plan, problem: Problem) -> Plan:
    """`changed` with what is proved of plans like `plan`, where anything is."""
    if plan.certificate is None:
        return changed
    return certify_simulated(changed, plan.certificate.lower_bound_s, problem)


def parts_of(job: Job, trainer: Trainer, rules: Sequence[str] = ()) -> list[Part]:
    """What the layers of the job's profile are to the trainer; nothing if it cuts anywhere."""
    names = [layer.name for layer in job.profile.layers]
    return [] if trainer.says.cuts == ANYWHERE else find_parts(names, rules)


def restrict(job: Job, trainer: Trainer, parts: Sequence[Part]) -> tuple[Job, Within]:
    """The job within what the trainer can say, and what plans may be beyond what it says.

    Raises PartoptError where the job asks for what the trainer cannot do.
    """
    check_asked(job, trainer)
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


def check_asked(job: Job, trainer: Trainer) -> None:
    """Raise PartoptError for options that the trainer has nothing for."""
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


def check_model(job: Job, trainer: Trainer, parts: Sequence[Part]) -> None:
    """Raise PartoptError for a model of which the trainer can say no plan, however it is cut.

    It may lack a part, or have no cut between layers that share parameters, where these have to
    stay together.
    """
    layers = job.profile.layers
    for kind in missing_kinds(parts) if parts else ():
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
