"""Planners side by side, all judged by one simulator."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from msgspec.structs import replace

from partopt.cost.estimate import stage_variance
from partopt.cost.pricing import price
from partopt.cost.problem import Problem, Progress, ignore_progress, partition_of
from partopt.documents import Note
from partopt.documents.plan import Plan
from partopt.documents.tables import Comparison, ComparisonRow
from partopt.errors import PartoptError, found_until_then
from partopt.job import Job
from partopt.search import contest
from partopt.search.effort import SearchParams
from partopt.search.rows import Row, Search, search_planners
from partopt.search.variants import ANY, part_of, variants_of
from partopt.search.warmup import simulate_at_warmup, simulate_with_best_warmup


def compare(
    job: Job,
    planners: Sequence[str] = (),
    plans: Mapping[str, Plan] | None = None,
    progress: Progress = ignore_progress,
    restricted: Mapping[str, Callable[[Job, Progress], Plan]] | None = None,
) -> tuple[Comparison, list[Note]]:
    """The plans of `planners`, by default all that can plan for `job`, and `plans` beside them.

    `plans` are by the names under which they appear; they are priced and simulated again for the
    job, at their warm-ups if they were made for the same schedule and microbatches. `restricted`
    are ways to plan within what a trainer can say, by name: rows say what that costs. All are at
    one microbatch size, at which the fastest of the planners' is fastest, unless the job says
    which. The second value holds the notes. Raises PartoptError for a planner that would ignore an
    option, and for a plan of another model or of more devices; Interrupted with the rows until
    then, and notes.
    """
    found, kept, notes = dict[str, Plan](), dict[str, Plan](), [*job.notes]

    def until_then(row: Row | None) -> Any:
        every = found | kept or (row.plans if row else {})
        base = every.get("data_parallel")
        return (comparison_of(every, base, list(kept)), notes) if every else None

    with found_until_then(until_then):
        row = _search(job, planners, progress)
        found |= row.plans
        notes += row.notes
        problem = row.problem
        stated = job.with_(microbatch_size=problem.chain.microbatch_size)
        for name, plan in (plans or {}).items():
            found[name] = _price_again(name, plan, stated)
            notes += _notes_of(name, plan, problem)
        base = found.get("data_parallel") or _data_parallel(problem, SearchParams.at(job.effort))
        for name, find_within in (restricted or {}).items():
            kept[name] = find_within(stated, part_of(progress, name, 2))
    return comparison_of(found | kept, base, list(kept)), notes


def _search(job: Job, planners: Sequence[str], progress: Progress) -> Row:
    """The plans of `planners`, by default of all, at the best microbatch size."""
    if planners:
        return search_planners(job, planners, progress)
    search = Search(variants_of(job, job.schedule, ANY, progress), None)
    with found_until_then(lambda _: search.row_so_far()):
        return search.best_row(SearchParams.at(job.effort))


def _data_parallel(problem: Problem, params: SearchParams) -> Plan | None:
    """The data-parallel plan behind speed-ups; None under a schedule that cannot have one."""
    with suppress(PartoptError):
        return contest.plan_alone("data_parallel", problem, params)[0]
    return None


def _price_again(name: str, plan: Plan, job: Job) -> Plan:
    """The stages of a plan, priced and simulated for this job, on the plan's engine."""
    if plan.trainer != job.trainer:
        job = job.with_(trainer=plan.trainer, engine=plan.engine)
    problem = job.problem
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
        return simulate_with_best_warmup(priced, SearchParams.at(job.effort))
    return simulate_at_warmup(priced, [stage.warmup for stage in plan.stages])


def _notes_of(name: str, plan: Plan, problem: Problem) -> list[Note]:
    if plan.schedule == problem.schedule:
        return []
    text = f"{name} was made for {plan.schedule} and is priced for `schedule={problem.schedule}`"
    return [Note(code="other-schedule", text=text)]


def comparison_of(
    plans: Mapping[str, Plan], data_parallel: Plan | None, restricted: Sequence[str] = ()
) -> Comparison:
    """The comparison of `plans` of one problem by name, at least one; ties keep their order.

    `data_parallel` is None where the schedule cannot have it. The `restricted` ones say how much
    longer they take than the fastest of all that fits.
    """
    base_s = data_parallel.predicted.period_s if data_parallel else None
    rows = [_comparison_row(name, plan, base_s) for name, plan in plans.items()]
    best_s = min((row.period_s for row in rows if row.fits), default=math.inf)
    rows = [
        replace(row, price=row.period_s / best_s - 1)
        if row.planner in restricted and row.fits
        else row
        for row in rows
    ]
    first = next(iter(plans.values()))
    return Comparison(
        model=first.profile.name,
        layers=first.stages[-1].stop,
        microbatch_size=first.microbatch_size,
        schedule=first.schedule,
        estimated=first.profile.estimated,
        topology=first.topology,
        rows=sorted(rows, key=lambda row: row.period_s),
    )


def _comparison_row(name: str, plan: Plan, base_s: float | None) -> ComparisonRow:
    predicted = plan.predicted
    return ComparisonRow(
        planner=name,
        shape=plan.shape,
        stages=len(plan.stages),
        period_s=predicted.period_s,
        samples_per_s=predicted.samples_per_s,
        figures=predicted.figures,
        speedup_over_one_device=predicted.speedup_over_one_device,
        speedup_over_data_parallel=None if base_s is None else base_s / predicted.period_s,
        peak_memory_bytes=plan.peak_memory_bytes,
        fits=plan.fits,
        stage_variance_s2=stage_variance(plan),
    )
