"""A search for the synchronous schedule of a job.

It chooses how many stages lie on a device, pipelines side by side, samples in a microbatch, and
whether to recompute.

Every grid of d pipelines of p devices is balanced and estimated by closed forms
(`partopt.search.candidates`), and the most promising are simulated first. What cannot be faster
than the best found so far is left out. Then the optimal planner looks for unequal replicas, and a
local search moves cuts (`partopt.search.climb`).
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from heapq import heapify, heappop, heappush

from partopt.cost.price import price
from partopt.cost.problem import Problem, Progress, ignore_progress, partition_of
from partopt.documents.plan import Plan
from partopt.errors import ANSWER_IS_NO, PartoptError
from partopt.job import Job
from partopt.schedules import order, schedule
from partopt.search import contest
from partopt.search.bound import certify_simulated
from partopt.search.candidates import Candidate, candidates
from partopt.search.climb import climb
from partopt.search.sizes import order_of, samples_per_s_at_most
from partopt.search.warmup import simulate_with_best_warmup
from partopt.simulator.execution import execute
from partopt.simulator.memory import base_memory_bytes, peak_memory_bytes
from partopt.simulator.prediction import simulate_plan
from partopt.simulator.restate import layout_of

# simulated to find the best plan under one schedule, as `effort_of` counts; more only where the
# best of all may be found
BUDGET = 1_000_000
LIMIT = 12_000_000  # simulated in all
REPLANNED = 1  # of many schedules and sizes those that the optimal planner is to plan
FEW = 16  # devices up to which it plans them all
ROOMY = 100  # grids that are simulated where nothing fits, those that need least memory
_RECOUNT = 100  # reports after which what is left to do is counted again
_ROUNDING = 1e-9
_ANY = "1f1b"  # the schedule under which problems are stated, before each is tried


def search_schedules(job: Job, progress: Progress = ignore_progress) -> list[Plan]:
    """The best simulated plan of `job` under every synchronous schedule that can run it.

    Fastest first, those that fit before those that do not. Every measured microbatch size is tried,
    with and without recomputation, unless the job says which. PartoptError where nothing can run.
    """
    problems = state_problems(job, progress)
    per_stage = job.recompute in (None, "auto")
    search = search_grids(problems)
    plans = replan(search.best(), problems, per_stage)
    return climb(plans, search.simulated, problems, per_stage)


def state_problems(job: Job, progress: Progress = ignore_progress) -> list[Problem]:
    """The problems of a job at each microbatch size, with and without recomputation.

    PartoptError where none of them can be stated.
    """
    sizes = job.sizes or [measured.microbatch_size for measured in job.profile.measured()]
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


def best_by_schedule(problems: Sequence[Problem]) -> list[Plan]:
    """The best simulated plan under every schedule, of grids; in the order of `search_schedules`.

    `problems` differ in their microbatch size and recomputation. Under a schedule that is slow the
    best may not be found, where that would take long.
    """
    return search_grids(problems).best()


def search_grids(problems: Sequence[Problem]) -> _Search:
    """The search for the best grids, ended. PartoptError where no schedule can run any."""
    search = _Search([(each.floor_s, each) for each in candidates(problems)])
    search.run()
    if not search.found:
        raise PartoptError(
            "no schedule can run this",
            "give more microbatches, or fewer devices",
            ANSWER_IS_NO,
            code="no-schedule",
        )
    return search


class _Search:
    """Candidates in the order of what is known of their times, and the best plans found."""

    def __init__(self, known: Sequence[tuple[float, Candidate]]) -> None:
        # seconds a sample, a number to break ties, and a candidate; whether they are its estimate
        self.queue = [
            (seconds, number, each, False) for number, (seconds, each) in enumerate(known)
        ]
        heapify(self.queue)
        self.numbers = itertools.count(len(self.queue))
        self.all = [each for _, each in known]
        self.found: dict[str, Plan] = {}
        # by schedule, seconds a sample of what was found and fits
        self.reached_s: dict[str, float] = {}
        self.simulated: list[Plan] = []
        self.spent: Counter[str] = Counter()
        # by schedule, the first that cannot fit as far as the formulas tell
        self.fallback: dict[str, Candidate] = {}
        self.left = 0  # candidates that may yet be simulated
        self.told = 0  # reports of progress

    def best(self) -> list[Plan]:
        """The best plans of each schedule in their order."""
        return sorted(self.found.values(), key=order_of)

    def run(self) -> None:
        """Simulate what may be faster than what was found."""
        while self.queue:
            seconds, number, candidate, estimated = heappop(self.queue)
            known_s = candidate.least_s if estimated else seconds
            if self._is_hopeless(candidate.problem.schedule, known_s):
                continue
            if not estimated:
                heappush(self.queue, (candidate.estimate_s, number, candidate, True))
                continue
            self._tell(candidate.problem.progress)
            self._simulate(candidate)
        if not any(plan.fits for plan in self.found.values()):
            self._look_for_room()
        for name in sorted(self.fallback.keys() - self.found.keys()):
            each = self.fallback[name]
            self._take(simulate_plan(price(each.partition, each.problem, "grid")))

    def _is_hopeless(self, name: str, least_s: float) -> bool:
        """Whether what takes `least_s` a sample is not faster than the best that it may replace."""
        if name not in self.found:
            return False
        if self.spent[name] > BUDGET:
            return least_s >= min(self.reached_s.values()) or self.spent.total() > LIMIT
        return least_s >= self.reached_s[name]

    def _take(self, plan: Plan) -> None:
        """Take down a simulated plan, and that it is the best of its schedule where it is."""
        best = self.found.get(plan.schedule)
        self.simulated.append(plan)
        if best is None or order_of(plan) < order_of(best):
            self.found[plan.schedule] = plan
            least_s = (1 - _ROUNDING) / plan.predicted.samples_per_s
            self.reached_s[plan.schedule] = least_s if plan.fits else math.inf

    def _simulate(self, candidate: Candidate) -> None:
        """Simulate a candidate that may fit, and queue other cuts of it where it does not."""
        name = candidate.problem.schedule
        best, fits = self.found.get(name), False
        if not candidate.may_fit:
            self.fallback.setdefault(name, candidate)
        else:
            plan = price(candidate.partition, candidate.problem, "grid")
            self.spent[name] += candidate.effort
            if best is None or _may_fit(plan, exactly=not best.fits):
                seconds = execute(plan).makespan_s / candidate.samples
                if self._is_hopeless(name, seconds):
                    return
                plan = simulate_plan(plan)
                fits = plan.fits
                self._take(plan)
        other = None if fits else candidate.within_memory()
        if other is not None:
            heappush(self.queue, (other.estimate_s, next(self.numbers), other, True))

    def _look_for_room(self) -> None:
        """Simulate the candidates that need least memory, where nothing that fits was found."""
        roomy = sorted(self.all, key=lambda each: each.needs_bytes)[:ROOMY]
        for candidate in roomy:
            for each in (candidate, candidate.within_memory()):
                if each is not None:
                    self._simulate(replace(each, for_memory=True))

    def _tell(self, progress: Progress) -> None:
        """Report how many were simulated, of these and those that may yet be."""
        done = len(self.simulated)
        if self.told % _RECOUNT == 0:
            self.left = sum(
                not self._is_hopeless(each.problem.schedule, known_s)
                for known_s, _, each, _ in self.queue
            )
        self.told, self.left = self.told + 1, max(0, self.left - 1)
        progress("simulating schedules", done, done + 1 + self.left)


def replan(
    plans: Sequence[Plan], problems: Sequence[Problem], recompute_per_stage: bool
) -> list[Plan]:
    """`plans` in their order; the optimal planner's in place of those with one stage a device.

    Where it is faster. It has any replicas that the schedule can have, and with
    `recompute_per_stage` chooses the stages that recompute. On few devices it plans under every
    schedule at every microbatch size; on many for the first few of `plans`, at theirs.
    """
    found = {plan.schedule: plan for plan in plans}
    stated = list(_to_replan(plans, problems, recompute_per_stage))
    for done, problem in enumerate(stated):
        problem.progress("optimal plans", done, len(stated))
        best = min(found.values(), key=order_of)
        if best.fits and samples_per_s_at_most(problem) <= best.predicted.samples_per_s:
            continue
        with suppress(PartoptError):
            beat_s = problem.chain.microbatch_size / best.predicted.samples_per_s
            quiet = replace(problem, progress=ignore_progress)
            own, _ = contest.plan_alone("optimal", quiet, beat_s if best.fits else math.inf)
            for each in [own, *_at_any_warmup(own, problem, found)]:
                if len(each.stages) > 1 or schedule(each.schedule).data_parallel:
                    found[each.schedule] = min(found[each.schedule], each, key=order_of)
    return sorted(found.values(), key=order_of)


def _at_any_warmup(own: Plan, problem: Problem, names: Iterable[str]) -> Iterator[Plan]:
    """The plan under the others of these schedules that are the same but for their warm-ups."""
    if own.certificate is None or not schedule(own.schedule).takes_warmup:
        return
    for name in names:
        stated = replace(problem, schedule=name)
        if name != own.schedule and _kind(stated) == _kind(problem):
            partition = partition_of(own, problem.recompute_per_stage)
            other = simulate_with_best_warmup(price(partition, stated, own.planner))
            # the bound holds for any warm-up
            yield certify_simulated(other, own.certificate.lower_bound_s, stated)


def _to_replan(
    plans: Sequence[Plan], problems: Sequence[Problem], recompute_per_stage: bool
) -> Iterator[Problem]:
    """The problems that the optimal planner is to plan.

    Of schedules that are the same but for their warm-ups, which are chosen, the first stands for
    all.
    """
    first: dict[object, Plan] = {}
    for plan in plans:
        if schedule(plan.schedule).kernel is not None:
            first.setdefault(_kind(replace(problems[0], schedule=plan.schedule)), plan)
    straight = list(first.values())
    few = problems[0].topology.devices <= FEW
    for plan in straight if few else straight[:REPLANNED]:
        for problem in problems:
            if not few and problem.chain.microbatch_size != plan.microbatch_size:
                continue
            own = replace(problem, schedule=plan.schedule)
            if not recompute_per_stage or own.memory_bytes is None:
                yield own
            elif not own.recompute:  # plans that recompute everywhere are among these
                yield replace(own, recompute_per_stage=True)


def _kind(problem: Problem) -> object:
    """What is the same under schedules that differ in nothing but their warm-ups."""
    if not schedule(problem.schedule).takes_warmup:
        return problem.schedule
    return problem.serial_transfers


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
