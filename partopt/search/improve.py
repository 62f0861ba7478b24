"""The best of some plans, improved in the simulator by steps from one to the next."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import islice
from math import inf
from typing import Any, Generic, Protocol, TypeVar

from partopt.cost.pricing import price
from partopt.cost.problem import Partition, Problem, share_of
from partopt.documents.plan import Plan
from partopt.planners import optimal
from partopt.planners.costs import StageCosts
from partopt.planners.grids import ROOMY, GridPlan
from partopt.planners.layouts import Shape, shape_of
from partopt.search import cuts, steps
from partopt.search.annealing import anneal
from partopt.search.bound import certify_simulated, proved_s
from partopt.search.effort import LocalParams, SearchParams
from partopt.search.evaluator import (
    Candidate,
    CutEvaluator,
    Cuts,
    Evaluator,
    PlacedStages,
    PlanEvaluator,
)
from partopt.search.ranking import TIE
from partopt.search.variants import Variant, in_turn
from partopt.search.warmup import simulate_at_warmup, simulate_with_best_warmup
from partopt.simulator.execution import simulate_plan

REACH = 1.3  # times the best estimate: a grid beyond is not simulated
NEARLY = 1e-3  # above the bound: nearer, nothing better is looked for
GAINED = 2e-3  # of the time: a search that brings less ends
GRID = "grid"  # the planner that plans of grids name


class Staged(Protocol):
    """A plan on its way, of so many stages."""

    @property
    def stages(self) -> int:
        """S."""


T = TypeVar("T", bound=Staged)


class LocalSearch(Generic[T]):
    """Plans that are simulated as they are, and the best of them annealed.

    It goes on from one effort to the next. `starts` are the plans with which it begins, the most
    promising first; of every `kind` the best are kept. It ends at a plan of `enough_s` seconds.
    """

    def __init__(
        self,
        evaluator: Evaluator[T],
        neighbour: Callable[[T, random.Random], T | None],
        kind: Callable[[T], Hashable],
        enough_s: float = 0.0,
    ) -> None:
        self.evaluator, self.neighbour, self.enough_s = evaluator, neighbour, enough_s
        self.kind = kind
        self.starts: Iterator[T] = iter(())
        self.found: list[tuple[float, T]] = []  # seconds and plans that fit, the fastest first
        self._kinds: dict[Hashable, list[tuple[float, T]]] = {}
        self._spent, self._rng = 0.0, random.Random(0)  # for starts; for steps

    @property
    def best_s(self) -> float:
        """Seconds of the fastest plan."""
        return self.found[0][0] if self.found else inf

    def search_further(self, params: LocalParams, hoped_s: float = inf) -> None:
        """Search until the budget is spent in all; nothing is annealed above `hoped_s`."""
        self.try_starts(params)
        if self.best_s < hoped_s:
            self.anneal(params.budget - self.evaluator.spent, params)

    def try_starts(self, params: LocalParams) -> None:
        """Simulate the starts until their share of the budget is spent."""
        report_progress = share_of(self.evaluator.problem.progress, "simulating starts", 0, 1)
        while self.best_s > self.enough_s:
            limit = params.budget * (params.starts if self.found else 1.0)
            before = self.evaluator.spent
            report_progress(min(1.0, self._spent / limit))
            if self._spent > limit or (start := next(self.starts, None)) is None:
                break
            self.keep(start, params.of_kind, max(params.rounds))
            self._spent += self.evaluator.spent - before

    def simplest(self, complexity: Callable[[T], Any]) -> T | None:
        """The simplest plan that is as good as the fastest; None where that is no simpler."""
        kept = [pair for pairs in (self.found, *self._kinds.values()) for pair in pairs]
        good = [plan for seconds, plan in kept if (1 - TIE) * seconds <= self.best_s]
        found = min(good, key=complexity, default=None)
        if found is None or complexity(found) >= complexity(self.found[0][1]):
            return None
        return found

    def keep(self, start: T, of_kind: int, of_all: int) -> None:
        """Keep a start that is one of the best, so many of its kind and of all."""
        alike = self._kinds.setdefault(self.kind(start), [])
        full = len(alike) == of_kind
        allowed_s = min(
            alike[-1][0] if full else inf,
            self.found[of_all - 1][0] if len(self.found) >= of_all else inf,
        )
        found = self.evaluator.best(start, allowed_s)
        if found[0] < allowed_s:
            if full and (last := alike.pop()) in self.found:
                self.found.remove(last)
            for kept in (alike, self.found):
                kept.append(found)
                kept.sort(key=_seconds)

    def anneal(self, budget: float, params: LocalParams) -> None:
        """Anneal the best plans, ever fewer of them."""
        rounds, progress = params.rounds, self.evaluator.problem.progress
        for number, many in enumerate(rounds):
            share, total = budget / len(rounds) / many, len(rounds) * many
            for place, (_, plan) in enumerate(self.found[:many]):
                self.found[place] = anneal(
                    plan,
                    self._propose,
                    self.evaluator,
                    params.annealing.of_stages(plan.stages),
                    share,
                    self.enough_s,
                    share_of(progress, "annealing", number * many + place, total),
                )
            self.found.sort(key=_seconds)

    def _propose(self, now: T) -> tuple[float, T | None]:
        return self._rng.random(), self.neighbour(now, self._rng)


def _seconds(found: tuple[float, object]) -> float:
    return found[0]


class Improvement:
    """The search for the best plan of one variant by the planner `optimal`.

    It begins with the plans of the dynamic program and with `others`; none is below `lower_s`
    seconds of a microbatch. Raises PartoptError where no plan fits by the formulas.
    """

    def __init__(
        self, variant: Variant, others: Iterable[Partition], lower_s: float, params: SearchParams
    ) -> None:
        problem, self.params = variant.problem, params
        problem.progress("dynamic program", 0, 1)
        self.problem, self.cells, self.starts = problem, variant.coarse[1], variant.starts
        if not self.starts:
            raise optimal.nothing_fits(problem)
        self.evaluator, self.lower_s, self._stages = PlanEvaluator(variant.costs), lower_s, 0
        self.search = LocalSearch(
            self.evaluator,
            lambda now, rng: steps.neighbour(now, self.evaluator, rng),
            lambda plan: (plan.stages, plan.shape.places),
            enough_s=max(lower_s, 0.0) * (1 + NEARLY),
        )
        self.search.starts = self._promising(others)

    def _promising(self, others: Iterable[Partition]) -> Iterator[Candidate]:
        """The plans that may be the fastest, those that are estimated to be so first.

        On many devices those of this variant and others are in turn, in their own orders.
        """
        costs = self.evaluator.costs
        more = dict.fromkeys(self._shapes_of(others))
        if optimal.are_many(self.problem):
            shapes = in_turn(self.starts, sorted(more, key=costs.estimate_s))
        else:
            shapes = sorted(dict.fromkeys([*self.starts, *more]), key=costs.estimate_s)
        for shape in shapes:
            if costs.slowest_s(shape) < self.search.best_s:
                yield Candidate(shape)

    def begin_with(self, others: Iterable[Partition]) -> None:
        """Keep the stages of other searches that are better than what was found."""
        params = self.params.plans
        for candidate in map(Candidate, self._shapes_of(others)):
            best_s = self.search.best_s
            is_open = self.evaluator.lower_bound_s(candidate, best_s) < best_s
            if is_open and self.evaluator.best(candidate, best_s)[0] < best_s:
                self.search.keep(candidate, params.of_kind, max(params.rounds))

    def _shapes_of(self, others: Iterable[Partition]) -> Iterator[Shape]:
        """Plans of others that cut where this chain may be cut, and with better cuts."""
        costs, devices = self.evaluator.costs, self.problem.topology.devices
        for partition in others:
            if {stage.stop for stage in partition.stages} <= set(self.cells):
                shape = shape_of(partition.on_cells(self.cells), devices)
                if not costs.chooses_recompute:
                    shape = replace(shape, recompute=(None,) * shape.stages)
                if steps.valid(shape, costs):
                    yield from filter(None, (shape, optimal.recut(costs, shape)))

    def best_plan(self, params: SearchParams, time_to_beat_s: float) -> Plan:
        """The best simulated plan at an effort.

        None is looked for where none is below `time_to_beat_s`.
        """
        problem, cells, self.params = self.problem, self.cells, params
        if self.lower_s < time_to_beat_s:
            for stage in params.stages[self._stages :]:
                self._search_further(stage, time_to_beat_s * (1 + stage.hoped))
                self._stages += 1
        if self.search.found:
            return self._best()
        many = 3 if self.lower_s < time_to_beat_s else 1
        every = (_price(s.partition().on_layers(cells), problem) for s in self.starts[:many])
        plans = [simulate_with_best_warmup(priced, params, problem.progress) for priced in every]
        return self._certify(min(plans, key=lambda plan: plan.peak_memory_bytes))

    def _search_further(self, params: SearchParams, hoped_s: float) -> None:
        """Search a stage further; on many devices as long as there is something to be won."""
        if not optimal.are_many(self.problem):
            self.search.search_further(params.plans, hoped_s)
            return
        plans = params.plans
        self.search.try_starts(replace(plans, budget=params.many * plans.budget))
        for _ in range(params.slices) if self.search.best_s < hoped_s else ():
            before_s = self.search.best_s
            self.search.anneal(params.slice * plans.budget, plans)
            if self.search.best_s > before_s * (1 - GAINED):
                break

    def plan_so_far(self) -> Plan | None:
        """The best plan that was found, also in a search that is interrupted."""
        return self._best() if self.search.found else None

    def simpler_plan(self) -> Plan | None:
        """A simulated plan as good as the best, of fewer stages or equal replicas; None without."""
        found = self.search.simplest(_complexity)
        return None if found is None else self._certify(self._plan_of(found))

    def _best(self) -> Plan:
        _, best = self.search.found[0]
        return self._certify(self._plan_of(best))

    def _certify(self, plan: Plan) -> Plan:
        """A plan that was found, with the bound."""
        return certify_simulated(plan, self._proved_s, self.problem)

    @cached_property
    def _proved_s(self) -> float:
        """What no plan is below that the proof speaks of, which may share state otherwise."""
        return proved_s(self.problem, self.lower_s) * (self.problem.microbatches or 1)

    def _plan_of(self, best: Candidate) -> Plan:
        """The plan of one that was found, cut between all layers, simulated."""
        problem, cells, evaluator = self.problem, self.cells, self.evaluator
        problem.progress("simulating the best", 0, 2)
        if cells != problem.boundaries():
            best, evaluator, cells = _recut_finely(best, problem, cells, self.params.fine)
        problem.progress("simulating the best", 1, 2)
        plan = _price(best.shape.partition().on_layers(cells), problem)
        return simulate_at_warmup(plan, evaluator.warmups(best))


def _complexity(plan: Candidate) -> tuple[int, bool, bool]:
    """What comes first in `partopt.search.ranking.complexity` of plans of one problem."""
    shape = plan.shape
    return shape.stages, len(set(map(len, shape.ranks))) > 1, any(shape.recompute)


def _price(partition: Partition, problem: Problem) -> Plan:
    return price(partition, problem, "optimal")


def _recut_finely(
    rough: Candidate, problem: Problem, cells: list[int], most: int
) -> tuple[Candidate, PlanEvaluator, list[int]]:
    """The plan of a coarse chain, with better cuts between up to `most` ranges of layers if any."""
    stated, bounds = optimal.coarsen(problem, most, cells)
    evaluator = PlanEvaluator(StageCosts(stated))
    shape = rough.shape.on_cells(cells, bounds)
    shapes = [shape, optimal.recut(evaluator.costs, shape)]
    tried = [rough._replace(shape=other) for other in shapes if other is not None]
    return min(tried, key=evaluator.seconds), evaluator, bounds


class GridSearch:
    """The search for the best plan on grids of a variant, whose cuts it moves."""

    def __init__(self, variant: Variant, estimates: Sequence[GridPlan]) -> None:
        self.problem, (stated, self.cells) = variant.plain, variant.coarse
        self.estimates, self._stages = estimates, 0
        self.grids: dict[PlacedStages, GridPlan] = {}
        self.evaluator = CutEvaluator(stated)
        self.search = LocalSearch(self.evaluator, cuts.neighbour, lambda plan: GRID)
        self.search.starts = self._fitting()

    def _fitting(self) -> Iterator[Cuts]:
        """The grids, as they are cut for the memory, as long as one may be the best."""
        for plan in self.estimates:
            if self.search.found and plan.estimate_s > REACH * self.estimates[0].estimate_s:
                return
            placed = PlacedStages(plan.partition, self.evaluator.problem)
            self.grids[placed] = plan
            ways = [Cuts(placed, other.bounds) for other in plan.within(ROOMY)]
            fitting = (way for way in ways if len(ways) == 1 or self.evaluator.seconds(way) < inf)
            yield from islice(fitting, 1)

    def best_plan(self, params: SearchParams, time_to_beat_s: float = inf) -> Plan | None:
        """The best simulated plan at an effort; None where none of them fits."""
        for stage in params.stages[self._stages :]:
            self.search.search_further(stage.grids)
            self._stages += 1
        return self.plan_so_far()

    def plan_so_far(self) -> Plan | None:
        """The best simulated plan that was found; None where none of them fits."""
        return self._plan_of(self.search.found[0][1]) if self.search.found else None

    def simpler_plan(self) -> Plan | None:
        """A simulated plan as good as the best, of fewer stages; None without."""
        found = self.search.simplest(lambda plan: plan.stages)
        return None if found is None else self._plan_of(found)

    def _plan_of(self, best: Cuts) -> Plan:
        stated = self.problem.with_(chunks=self.grids[best.placed].grid.v)
        return simulate_plan(price(best.partition().on_layers(self.cells), stated, GRID))
