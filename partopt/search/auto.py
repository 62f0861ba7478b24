"""The fastest plan of a job under any synchronous schedule.

What is chosen is the schedule, how many stages lie on a device, pipelines side by side, samples of
a microbatch, and the stages that recompute.

1. Schedules with several stages on a device: grids, in the order of their estimates.
2. Schedules with one: plans of the dynamic program, in the order of their slowest stage.
3. The best of each are annealed in the simulator; on few devices that of the best schedule is
   searched for as where its name is given, too.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice, product
from math import inf

from partopt.cost.plan import price
from partopt.cost.problem import (
    CONTIGUOUS,
    NONE,
    Partition,
    Problem,
    Progress,
    consecutive,
    ignore_progress,
)
from partopt.documents.engine import Layout
from partopt.documents.plan import Plan
from partopt.errors import PartoptError
from partopt.job import Job
from partopt.planners import optimal
from partopt.planners.costs import StageCosts
from partopt.planners.layouts import Shape, layouts_of
from partopt.schedules import SCHEDULES
from partopt.schedules.layout import STRAIGHT
from partopt.search.annealing import anneal
from partopt.search.bound import certify_simulated, lower_bound_s
from partopt.search.contest import OPTIMAL, plan_alone
from partopt.search.cuts import anneal_cuts
from partopt.search.grids import Gridded, gridded
from partopt.search.judge import Found, Judge
from partopt.search.sizes import order_of
from partopt.search.warmup import simulate_at_warmup, simulate_with_best_warmup
from partopt.simulator.execution import simulate_plan

ANY = "1f1b"  # the schedule under which problems are stated, before each is tried
PARTS = (ANY, "gpipe")  # of eager 1F1B, which has every warm-up of theirs
# of grids, of plans of the program, of annealing: as `Judge.spent` counts
GRIDS, CHAINS, ANNEALED = 1500.0, 1500.0, 2200.0
ROUNDS = (10, 3)  # plans that are annealed in each round
NEAR = 1.3  # of the best: a grid that is estimated at more is not simulated
MARGIN = 1.02  # of the best: a plan of the program whose slowest stage takes more is not either
ROOMY = 1.05  # of the limit: what is estimated to need more memory is not
UNFILLED = 1.04  # how much slower plans are that lack room for all that fills the pipeline
FEW, PLACES, ALIKE = 16, 64, 8  # devices, or places, with any replicas; with equal ones; these
KEPT = 12  # plans of the program, of each problem
IN_VAIN = 3  # plans of one problem that do not fit, after which no more are tried


def search_schedules(job: Job, progress: Progress = ignore_progress) -> list[Plan]:
    """The best simulated plan of `job` under every synchronous schedule that may be best.

    Fastest first, those that fit before those that do not. Every measured microbatch size is tried,
    with and without recomputation, unless the job says which. A plan that does not fit is among
    them where a schedule has none that does.
    """
    problems = state_problems(job, progress)
    return best_by_schedule(problems, job.recompute in (None, "auto"))


def best_by_schedule(problems: Sequence[Problem], chooses_recompute: bool = False) -> list[Plan]:
    """`search_schedules` of problems that differ in microbatch size and recomputation."""
    search = _Search(problems[0].progress)
    search.try_grids(problems)
    search.try_chains(list(_straight(problems, chooses_recompute)))
    search.anneal()
    plans = [*search.plans(), *search.searched_alone()]
    plans += search.roomiest({plan.schedule for plan in plans})
    if not plans:  # not even on one device
        alone = Partition(CONTIGUOUS, consecutive([0, problems[0].chain.layers]))
        plans = [simulate_plan(price(alone, problem, "grid")) for problem in problems]
    best: dict[str, Plan] = {}
    for plan in sorted(plans, key=order_of):
        best.setdefault(plan.schedule, plan)
    return list(best.values())


def state_problems(job: Job, progress: Progress = ignore_progress) -> list[Problem]:
    """The problems of a job at each microbatch size, with and without recomputation.

    PartoptError where none of them can be stated.
    """
    sizes = job.sizes or [measured.microbatch_size for measured in job.profile.measured()]
    modes = ["never", "always"] if job.recompute in (None, "auto") else [job.recompute]
    problems, refusals = [], []
    for size, mode in product(sizes, modes):
        try:
            # degrees are for the schedules that are tried
            own = {"schedule": ANY, "microbatch_size": size, "recompute": mode, "layout": Layout()}
            stated, fixed = job.with_(**own).problem, job.layout
            problems.append(stated.with_(progress=progress, any_schedule=True, layout=fixed))
        except PartoptError as error:
            refusals.append(error)
    if not problems:
        raise PartoptError.together({error.message: error for error in refusals}.values())
    return problems


def _straight(problems: Sequence[Problem], chooses: bool) -> Iterator[Problem]:
    """The problems of schedules with one stage a device; of `PARTS` those of one stage alone.

    With `chooses` stages choose to recompute.
    """
    for problem, entry in product(problems, SCHEDULES.values()):
        fixed, alone = problem.request.layout, entry.name in PARTS
        if entry.shape != STRAIGHT or entry.one_at_a_time or not entry.tried_by_auto:
            continue
        if fixed.chunks not in (None, 1) or (alone and fixed.pp not in (None, 1)):
            continue
        own = problem.with_(schedule=entry.name, stages=1 if alone else fixed.pp)
        if fixed.dp is not None:
            own = own.with_(replication=NONE if fixed.dp == 1 else "uniform")
        if not chooses or own.memory_bytes is None:
            yield own
        elif not own.recompute_by_default:  # plans that recompute everywhere are among these
            yield own.with_(recompute="auto")


@dataclass(frozen=True, eq=False)
class _Candidate:
    """A simulated plan: seconds of a sample, and what no change of it is likely to go below."""

    problem: Problem  # on the whole chain
    seconds: float
    least_s: float
    cells: list[int]
    found: Found | None = None  # with its judge
    judge: Judge | None = None
    grid: Gridded | None = None

    @property
    def kind(self) -> object:
        """What a change of it keeps."""
        problem = self.problem
        own = problem.schedule, problem.chain.microbatch_size, problem.request.recompute
        few = problem.topology.devices <= FEW
        if self.found is None:
            assert self.grid is not None
            return (*own, len(self.grid.bounds)) if few else own
        shape = self.found.shape
        if few or not SCHEDULES[problem.schedule].uneven:
            return *own, shape.stages, shape.places
        return *own, shape.stages == 1

    @property
    def may_change(self) -> bool:
        """Whether it has cuts."""
        return self.found is None or self.found.shape.stages > 1

    def annealed(self, rng: random.Random, budget: float) -> _Candidate:
        """The best that steps from it lead to."""
        b = self.problem.chain.microbatch_size
        if self.grid is not None:
            bounds = anneal_cuts(self.grid.bounds, self.grid.cuts, rng, budget)
            seconds = self.grid.cuts.seconds(bounds) / b
            return replace(self, grid=replace(self.grid, bounds=bounds), seconds=seconds)
        assert self.found is not None and self.judge is not None
        found = anneal(self.found, self.judge, rng, budget, 0.0)
        return replace(self, found=found, seconds=found.seconds / b)

    def plan(self) -> Plan:
        """The simulated plan."""
        problem = self.problem
        if self.grid is not None:
            partition = self.grid.cuts.cut(self.grid.bounds).on_layers(self.cells)
            own = problem.with_(chunks=self.grid.grid.v)
            return simulate_plan(price(partition, own, "grid"))
        assert self.found is not None and self.judge is not None
        found, judge = self.found, self.judge
        plan = price(found.shape.partition().on_layers(self.cells), problem, "optimal")
        plans = [simulate_with_best_warmup(plan)]
        if judge.entry.takes_warmup:
            warmups = judge.warmups(found.shape, found.way, found.more)
            plans.append(simulate_at_warmup(plan, warmups))
        best = min(plans, key=order_of)
        return certify_simulated(best, lower_bound_s(problem) * (best.microbatches or 1), problem)


class _Search:
    """Candidates of all schedules."""

    def __init__(self, progress: Progress) -> None:
        self.progress, self.rng = progress, random.Random(0)
        self.pool: list[_Candidate] = []
        self.grids: list[tuple[Gridded, Problem, list[int]]] = []

    @property
    def best_s(self) -> float:
        """Seconds of a sample of the fastest."""
        return min((each.seconds for each in self.pool), default=inf)

    def try_grids(self, problems: Sequence[Problem]) -> None:
        """Simulate the grids that may be fastest, and the best estimate of each schedule."""
        for problem in problems:
            stated, cells = optimal.coarsen(problem)
            self.grids += [(each, problem, cells) for each in gridded([stated])]
        self.grids.sort(key=lambda each: each[0].estimate_s)
        spent, seen = 0.0, set[str]()
        for done, (each, problem, cells) in enumerate(self.grids):
            name = each.problem.schedule
            far = spent > GRIDS or each.estimate_s > NEAR * self.best_s
            if far and name in seen:
                continue
            own = each.within(ROOMY)
            if own is None or (own.estimate_s > NEAR * self.best_s and name in seen):
                continue
            self.progress("simulating schedules", done, len(self.grids))
            seconds = own.cuts.seconds(own.bounds) / problem.chain.microbatch_size
            spent += own.cuts.spent
            if seconds < inf:
                seen.add(name)
                stated = problem.with_(schedule=name)
                least_s = own.estimate_s / NEAR
                self.pool.append(_Candidate(stated, seconds, least_s, cells, grid=own))

    def try_chains(self, problems: Sequence[Problem]) -> None:
        """Simulate the plans of the dynamic program that may be fastest."""
        least: dict[Judge, float] = {}
        chains: list[tuple[float, int, Shape, Judge, Problem, list[int]]] = []
        for done, problem in enumerate(problems):
            self.progress("optimal plans", done, len(problems))
            chain, P = problem.chain, problem.topology.devices
            work_s = float(chain.busy_prefix(problem.all_recompute)[-1])
            computing_s = work_s / P / chain.microbatch_size
            if computing_s >= self.best_s:
                continue
            stated, cells = optimal.coarsen(problem)
            judge = Judge(StageCosts(stated))
            for value_s, shape in programs(judge.costs):
                own_s = value_s / chain.microbatch_size
                least_s = judge.costs.slowest_s(shape) / chain.microbatch_size
                least[judge] = min(least_s, least.get(judge, inf))
                chains.append((own_s, len(chains), shape, judge, problem, cells))
        spent, in_vain = 0.0, dict[Judge, int]()
        seen = set[str]()
        for value_s, _, shape, judge, problem, cells in sorted(chains, key=lambda each: each[:2]):
            name = problem.schedule
            if in_vain.get(judge, 0) >= IN_VAIN:
                continue
            if name in seen and (spent > CHAINS or value_s > MARGIN * self.best_s):
                continue
            before, b = judge.spent, problem.chain.microbatch_size
            found = judge.best(shape, (0,))
            if judge.entry.takes_warmup and found.seconds / b > MARGIN * value_s:
                found = min(found, judge.best(shape, (1, 2, 4)), key=lambda each: each.seconds)
            spent += judge.spent - before
            if found.seconds == inf:
                in_vain[judge] = in_vain.get(judge, 0) + 1
                continue
            seen.add(name)
            in_vain[judge] = -len(chains)
            seconds = found.seconds / b
            stated = problem.with_(stages=problem.request.layout.pp)
            self.pool.append(_Candidate(stated, seconds, least[judge], cells, found, judge))

    def anneal(self) -> None:
        """Anneal the best of each kind that may become the fastest, ever fewer of them."""
        for many in ROUNDS:
            best: dict[object, _Candidate] = {}
            for each in sorted(self.pool, key=lambda own: own.seconds):
                best.setdefault(each.kind, each)
            able = [own for own in best.values() if own.may_change and own.least_s < self.best_s]
            share = ANNEALED / len(ROUNDS) / max(2, len(able[:many]))
            for done, each in enumerate(able[:many]):
                self.progress("annealing", done, len(able[:many]))
                self.pool.append(each.annealed(self.rng, share))

    def plans(self) -> Iterator[Plan]:
        """The best plan of each schedule."""
        best: dict[str, _Candidate] = {}
        for each in sorted([*self.pool, *self._under_parts()], key=lambda own: own.seconds):
            best.setdefault(each.problem.schedule, each)
        for each in best.values():
            yield each.plan()

    def searched_alone(self) -> Iterator[Plan]:
        """On few devices, the plan of the fastest one's schedule as where that alone is named."""
        able = [own for own in self.pool if own.found and own.may_change]
        best = min(able, key=lambda own: own.seconds, default=None)
        if best is None or best.seconds > MARGIN * self.best_s:
            return
        if best.problem.topology.devices <= FEW:
            with suppress(PartoptError):
                yield plan_alone(OPTIMAL, best.problem.recompute_alike())[0]

    def _under_parts(self) -> Iterable[_Candidate]:
        """The best plans of eager 1F1B under the schedules whose warm-up is one of those."""
        eager = [own for own in self.pool if own.judge and own.judge.entry.takes_warmup]
        eager.sort(key=lambda own: own.seconds)
        for name, each in product(PARTS, eager[: ROUNDS[-1]]):
            assert each.judge is not None and each.found is not None
            stated = each.judge.problem.with_(schedule=name)
            judge, shape = Judge(StageCosts(stated)), each.found.shape
            seconds = judge.seconds(shape)
            if seconds < inf:
                problem, found = each.problem.with_(schedule=name), Found(seconds, shape)
                own_s = seconds / stated.chain.microbatch_size
                yield _Candidate(problem, own_s, 0.0, each.cells, found, judge)

    def roomiest(self, found: set[str]) -> Iterator[Plan]:
        """Of every schedule that is not `found` the grid that needs least memory."""
        seen = set(found)
        for each, problem, cells in sorted(self.grids, key=lambda own: own[0].needs_bytes.max()):
            name = each.problem.schedule
            if name not in seen:
                seen.add(name)
                stated = problem.with_(schedule=name)
                yield _Candidate(stated, inf, inf, cells, grid=each).plan()


def programs(costs: StageCosts) -> list[tuple[float, Shape]]:
    """Plans of the dynamic program, with the seconds a microbatch of their slowest stage.

    Of few devices they are those of `optimal`. Else they have any replicas on layouts of few
    places; up to `ALIKE` where ranks are in their order; equal ones on others. Those without room
    for all that fills the devices behind a stage count as a little slower.
    """
    entry, N, topology = costs.entry, costs.N, costs.problem.topology
    if topology.devices <= FEW:
        plans = (own for own in optimal.plans(costs) if own.stages > 1 or entry.data_parallel)
        return [(costs.estimate_s(shape), shape) for shape in islice(plans, KEPT)]
    found: dict[Shape, float] = {}
    for places in layouts_of(topology, PLACES):
        U, alike = len(places), len({len(place) for place in places}) == 1
        few = U <= FEW and alike
        if few and not costs.even:
            asked: list[Sequence[int]] = [range(1, U + 1)]
        else:
            asked = [[r] for r in range(1, min(U, ALIKE) + 1) if alike]
            if not costs.even and list(places) == [(rank,) for rank in range(U)]:
                asked.append(range(1, min(U, ALIKE) + 1))
        if costs.problem.request.layout.dp is not None:
            r, rest = divmod(costs.problem.request.layout.dp, len(places[0]))
            asked = [[r]] if alike and rest == 0 and 0 < r <= U else []
        for sizes, full in product(asked, (False, True) if costs.short and few else (costs.short,)):
            numbers = range(1, min(N, U // sizes[0], optimal.STAGES) + 1)
            allowed = [S for S in numbers if costs.problem.request.stages in (None, S)]
            allowed = [S for S in allowed if S > 1 or entry.data_parallel]
            if not allowed:
                continue
            for shape in optimal.slowest_fastest(costs, places, sizes, allowed, full):
                factor = 1 if full or not costs.short else UNFILLED
                found[shape] = min(factor, found.get(shape, inf))
    least_s = {shape: factor * costs.slowest_s(shape) for shape, factor in found.items()}
    kept: list[tuple[float, Shape]] = []
    for shape in sorted(found, key=lambda own: least_s[own]):
        if len(kept) == KEPT and kept[-1][0] <= least_s[shape]:
            break
        kept.append((found[shape] * costs.estimate_s(shape), shape))
        kept = sorted(kept, key=lambda own: own[0])[:KEPT]
    return kept
