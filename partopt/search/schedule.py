"""A search for the synchronous schedule of a job.

It chooses how many stages lie on a device, pipelines side by side, samples in a microbatch, and
whether to recompute.

Every grid of d pipelines of P/d devices is balanced by GPipe's criterion and estimated by closed
forms (`partopt.search.candidates`), and the most promising of each schedule are simulated first.
What cannot be faster than the best found so far under its schedule is left out.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from partopt.cost.price import price
from partopt.cost.problem import Problem, Progress, ignore_progress
from partopt.documents.plan import Plan
from partopt.errors import ANSWER_IS_NO, PartoptError
from partopt.job import Job
from partopt.schedules import order, schedule
from partopt.schedules.layout import STRAIGHT
from partopt.search import contest
from partopt.search.candidates import candidates
from partopt.simulator.memory import base_memory_bytes, peak_memory_bytes
from partopt.simulator.prediction import simulate_plan
from partopt.simulator.restate import layout_of

# simulated in all; the best estimate of each schedule is simulated whatever it takes
ACTION_BUDGET = 4_000_000
REPLANNED = 2  # schedules with one stage a device whose best grid the optimal planner is to beat
_ROUNDING = 1e-9
_ANY = "1f1b"  # the schedule under which problems are stated, before each is tried


def search_schedules(job: Job, progress: Progress = ignore_progress) -> list[Plan]:
    """The best simulated plan of `job` under every synchronous schedule but the naive one.

    Fastest first, those that fit before those that do not. Every measured microbatch size is tried,
    with and without recomputation, unless the job says which. PartoptError where nothing can run.
    """
    problems = state_problems(job, progress)
    return replan(best_by_schedule(problems), problems, job.recompute == "auto")


def state_problems(job: Job, progress: Progress = ignore_progress) -> list[Problem]:
    """The problems of a job at each microbatch size, with and without recomputation.

    PartoptError where none of them can be stated.
    """
    sizes = [job.microbatch_size] if job.microbatch_size else _measured_sizes(job)
    modes = [job.recompute] if job.recompute in ("never", "always") else ["never", "always"]
    problems, refusals = [], []
    for size, mode in itertools.product(sizes, modes):
        try:
            stated = job.with_(schedule=_ANY, microbatch_size=size, recompute=mode).problem
            problems.append(replace(stated, progress=progress, any_schedule=True))
        except PartoptError as error:
            refusals.append(error)
    if not problems:
        raise PartoptError.together({error.message: error for error in refusals}.values())
    return problems


def _measured_sizes(job: Job) -> list[int]:
    return [measurement.microbatch_size for measurement in job.profile.measured()]


def best_by_schedule(problems: Sequence[Problem]) -> list[Plan]:
    """The best simulated plan under every schedule, of grids; in the order of `search_schedules`.

    `problems` differ in their microbatch size and recomputation.
    """
    found: dict[str, Plan] = {}
    spent = 0
    tried = sorted(candidates(problems), key=lambda candidate: candidate.estimate_s)
    for done, candidate in enumerate(tried):
        name = candidate.problem.schedule
        candidate.problem.progress("simulating schedules", done, len(tried))
        best = found.get(name)
        if best is not None and best.fits:
            hopeless = candidate.least_s * best.predicted.samples_per_s >= 1 - _ROUNDING
            if hopeless or spent > ACTION_BUDGET:
                continue
        plan = price(candidate.partition, candidate.problem, "grid")
        if best is not None and not _may_fit(plan, exactly=not best.fits):
            continue
        spent += candidate.actions
        plan = simulate_plan(plan)
        if best is None or _rank(plan) < _rank(best):
            found[name] = plan
    if not found:
        raise PartoptError(
            "no schedule can run this",
            "give more microbatches, or fewer devices",
            ANSWER_IS_NO,
            code="no-schedule",
        )
    return sorted(found.values(), key=_rank)


def _rank(plan: Plan) -> tuple[bool, float]:
    """The order of plans: those that fit first, and of them the fastest."""
    return not plan.fits, -plan.predicted.samples_per_s


def replan(
    plans: Sequence[Plan], problems: Sequence[Problem], recompute_per_stage: bool
) -> list[Plan]:
    """`plans` in their order; the optimal planner's in place of the first few where it is faster.

    Those are the first with one stage a device. It has any replicas, and with `recompute_per_stage`
    chooses the stages that recompute; the microbatch size stays.
    """
    found = list(plans)
    straight = [at for at, plan in enumerate(plans) if schedule(plan.schedule).shape == STRAIGHT]
    for place in straight[:REPLANNED]:
        plan = plans[place]
        problem = replace(
            _problem_of(plan, problems),
            schedule=plan.schedule,
            recompute_per_stage=recompute_per_stage,
        )
        with suppress(PartoptError):
            own, _ = contest.plan_with("optimal", problem)
            found[place] = min(plan, own, key=_rank)
    return sorted(found, key=_rank)


def _problem_of(plan: Plan, problems: Sequence[Problem]) -> Problem:
    """The problem that a grid's plan is for."""
    asked = plan.microbatch_size, plan.stages[0].recompute
    return next(each for each in problems if (each.chain.microbatch_size, each.recompute) == asked)


def _may_fit(plan: Plan, exactly: bool) -> bool:
    """Whether what devices hold throughout fits.

    `exactly`: whether that and what microbatches keep, by their order, fit, which takes a while to
    compute.
    """
    limit = plan.memory_limit_bytes
    if limit is None:
        return True
    if base_memory_bytes(plan).max() > limit:
        return False
    return not exactly or bool(
        peak_memory_bytes(order(plan.schedule, layout_of(plan)), plan).max() <= limit
    )
