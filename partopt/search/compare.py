"""Planners side by side, all judged by one simulator."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from partopt.cost.plan import price
from partopt.cost.problem import Problem, Progress, ignore_progress, partition_of
from partopt.documents import Note
from partopt.documents.plan import Plan
from partopt.documents.tables import Comparison
from partopt.errors import PartoptError
from partopt.job import Job
from partopt.search import contest
from partopt.search.rows import Search
from partopt.search.sizes import search_sizes
from partopt.search.tables import comparison_of
from partopt.search.variants import ANY, variants_of
from partopt.search.warmup import simulate_at_warmup, simulate_with_best_warmup


def compare(
    job: Job,
    planners: Sequence[str] = (),
    plans: Mapping[str, Plan] | None = None,
    progress: Progress = ignore_progress,
    restricted: Mapping[str, Callable[[Job, Progress], Plan]] | None = None,
) -> tuple[Comparison, list[Note]]:
    """The plans of `planners`, by default all that can plan for `job`, and `plans` beside them.

    `plans` are by the names under which they appear; each is priced and simulated again for the
    job, at its own warm-up where it was made for the same schedule and microbatches. `restricted`
    are ways to plan within what a trainer can say, by name: rows say what that costs. All are at
    one microbatch size, at which the fastest of the planners' is fastest, unless the job says
    which. The second value holds the notes. Raises PartoptError for a planner that would ignore an
    option, and for a plan of another model or of more devices.
    """
    for name in planners:
        contest.check_planner(name, job.problem)

    if planners:

        def find(each: Job, tell: Progress, beat_s: float) -> contest.Plans:
            return _compete(planners, each.problem.with_(progress=tell), beat_s)

        by_size = search_sizes(job, progress, find, lambda found: found.best)
        size, (found, own) = next(iter(by_size.items()))
        problem = job.with_(microbatch_size=size).problem
    else:
        row = Search(variants_of(job, job.schedule, ANY, progress), None).best_row(job.effort)
        problem, found, own = row.problem, dict(row.plans), list(row.notes)
    stated = job.with_(microbatch_size=problem.chain.microbatch_size)
    notes = [*job.notes, *own]
    for name, plan in (plans or {}).items():
        found[name] = _price_again(name, plan, stated)
        notes += _notes_of(name, plan, problem)
    base = found.get("data_parallel") or _data_parallel(problem)
    kept = {name: find_within(stated, progress) for name, find_within in (restricted or {}).items()}
    return comparison_of(found | kept, base, list(kept)), notes


def _compete(planners: Sequence[str], problem: Problem, beat_s: float) -> contest.Plans:
    """The plans of `planners`, and notes."""
    found: dict[str, Plan] = {}
    notes: list[Note] = []
    for name in planners:
        found[name], own = contest.plan_alone(name, problem, beat_s)
        notes += own
    return contest.Plans(found, notes)


def _data_parallel(problem: Problem) -> Plan | None:
    """The data-parallel plan behind speed-ups; None under a schedule that cannot have one."""
    with suppress(PartoptError):
        return contest.plan_alone("data_parallel", problem)[0]
    return None


def _price_again(name: str, plan: Plan, job: Job) -> Plan:
    """The stages of a plan, priced and simulated for this job, on the plan's own engine."""
    of_other = {"trainer": plan.trainer, "engine": plan.engine}
    problem = job.with_(**(of_other if plan.trainer != job.trainer else {})).problem
    devices = problem.topology.devices
    if [module for stage in plan.stages for module in stage.modules] != problem.chain.names:
        raise PartoptError(
            f"{name}: a plan of {plan.profile.name}, whose layers are not those of "
            f"{problem.profile.model.name}",
            "plan it again",
            code="other-layers",
        )
    if plan.world_size > devices:
        raise PartoptError(
            f"{name}: a plan for {plan.topology.devices} devices; the topology has {devices}",
            "choose its topology",
            code="other-devices",
        )
    partition = partition_of(plan, problem.recompute_per_stage)
    priced = price(partition, problem, plan.planner)
    if (plan.schedule, plan.microbatches) != (problem.schedule, problem.microbatches):
        return simulate_with_best_warmup(priced)
    return simulate_at_warmup(priced, [stage.warmup for stage in plan.stages])


def _notes_of(name: str, plan: Plan, problem: Problem) -> list[Note]:
    if plan.schedule == problem.schedule:
        return []
    text = f"{name} was made for {plan.schedule} and is priced for `schedule={problem.schedule}`"
    return [Note(code="other-schedule", text=text)]
