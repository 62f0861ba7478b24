"""The plan of `optimal`: those of the dynamic program and of others, improved in the simulator."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace
from math import inf

from partopt.cost.pricing import price
from partopt.cost.problem import Partition, Problem, share_of
from partopt.documents.plan import Plan
from partopt.planners import optimal
from partopt.planners.costs import StageCosts
from partopt.planners.layouts import Places, shape_of
from partopt.search.bound import certify_simulated
from partopt.search.effort import SearchParams
from partopt.search.evaluator import Candidate, PlanEvaluator
from partopt.search.steps import anneal_plans, valid
from partopt.search.variants import Variant
from partopt.search.warmup import simulate_at_warmup, simulate_with_best_warmup

NEARLY = 1e-3  # above the bound: nearer, nothing better is looked for


class Improvement:
    """The search for the best plan of one variant, which goes on from one effort to the next.

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
        self.evaluator, self.others = PlanEvaluator(variant.costs), list(others)
        self.lower_s, self.enough_s = lower_s, max(lower_s, 0.0) * (1 + NEARLY)
        self.found: list[Candidate] = []  # the fastest first
        self._rng, self._stages = random.Random(0), 0
        # starts that were looked at, what that took, and the best of every kind
        self._tried, self._spent = 0, 0.0
        self._of_kind: dict[tuple[int, Places], Candidate] = {}

    def best_plan(self, params: SearchParams, time_to_beat_s: float) -> Plan:
        """The best simulated plan at an effort.

        None is looked for where none is below `time_to_beat_s`.
        """
        problem, cells, self.params = self.problem, self.cells, params
        if self.lower_s < time_to_beat_s:
            for stage in params.stages[self._stages :]:
                self._search_further(stage, time_to_beat_s)
        if self.found:
            return self._certify(self._plan_of(self.found[0]))
        many = 3 if self.lower_s < time_to_beat_s else 1
        every = (_price(s.partition().on_layers(cells), problem) for s in self.starts[:many])
        plans = [simulate_with_best_warmup(priced, params, problem.progress) for priced in every]
        return self._certify(min(plans, key=lambda plan: plan.peak_memory_bytes))

    def plan_so_far(self) -> Plan | None:
        """The best plan that was found, also in a search that is interrupted."""
        found = [plan for plan in (*self.found, *self._of_kind.values()) if plan.seconds < inf]
        if not found:
            return None
        return self._certify(self._plan_of(min(found, key=lambda plan: plan.seconds)))

    def _certify(self, plan: Plan) -> Plan:
        """A plan that was found, with the bound."""
        lower_s = self.lower_s * (self.problem.microbatches or 1)
        return certify_simulated(plan, lower_s, self.problem)

    def _plan_of(self, best: Candidate) -> Plan:
        """The plan of one that was found, cut between all layers, simulated."""
        problem, cells, evaluator = self.problem, self.cells, self.evaluator
        problem.progress("simulating the best", 0, 2)
        if cells != problem.boundaries():
            best, evaluator, cells = _recut_finely(best, problem, cells, self.params.fine)
        problem.progress("simulating the best", 1, 2)
        plan = _price(best.shape.partition().on_layers(cells), problem)
        if not evaluator.entry.takes_warmup:
            return simulate_with_best_warmup(plan, self.params, problem.progress)
        return max(
            simulate_at_warmup(plan, evaluator.warmups(best)),
            simulate_with_best_warmup(plan, self.params, problem.progress),
            key=lambda other: (other.fits, other.predicted.samples_per_s),
        )

    @property
    def best_s(self) -> float:
        """Seconds of the fastest plan."""
        return self.found[0].seconds if self.found else inf

    def _search_further(self, params: SearchParams, time_to_beat_s: float) -> None:
        """Search until the budget is spent in all."""
        self._try_starts(params)
        if not self._stages:
            self._try_others()
        if self.best_s < time_to_beat_s * (1 + params.hoped):
            self._anneal(params.budget - self.evaluator.spent, params)
        self._stages += 1

    def _try_starts(self, params: SearchParams) -> None:
        """Simulate plans that may be the fastest; of every layout and number of stages the best."""
        evaluator, budget = self.evaluator, params.budget
        best_s, before = self.best_s, evaluator.spent
        better: dict[tuple[int, Places], Candidate] = {}
        for shape in self.starts[self._tried :]:
            spent = self._spent + evaluator.spent - before
            limit = params.starts * budget if best_s < inf else budget
            if spent > limit or best_s <= self.enough_s:
                break
            self._tried += 1
            self.problem.progress("simulating starts", self._tried, len(self.starts))
            if evaluator.costs.slowest_s(shape) < best_s:
                key = shape.stages, shape.places
                allowed_s = self._of_kind[key].seconds if key in self._of_kind else inf
                best = evaluator.best(shape, allowed_s)
                if best.seconds < allowed_s:
                    self._of_kind[key] = better[key] = best
                best_s = min(best_s, best.seconds)
        self._spent += evaluator.spent - before
        self._keep(better.values())

    def _try_others(self) -> None:
        """As `_try_starts`, of plans of others that cut where this chain may be cut."""
        costs, devices, found = self.evaluator.costs, self.problem.topology.devices, []
        for partition in self.others:
            if not {stage.stop for stage in partition.stages} <= set(self.cells):
                continue
            shape = shape_of(partition.on_cells(self.cells), devices)
            if not costs.chooses_recompute:
                shape = replace(shape, recompute=(None,) * shape.stages)
            if valid(shape, costs):
                found += [
                    self.evaluator.best(other)
                    for other in dict.fromkeys([shape, optimal.recut(costs, shape)])
                    if other is not None and costs.slowest_s(other) < self.best_s
                ]
        best: dict[tuple[int, Places], Candidate] = {}
        for plan in sorted(found, key=lambda plan: plan.seconds):
            best.setdefault((plan.shape.stages, plan.shape.places), plan)
        self._keep(best.values())

    def _anneal(self, budget: float, params: SearchParams) -> None:
        """Anneal the best plans, ever fewer of them."""
        rounds = params.rounds
        for number, many in enumerate(rounds):
            share, total = budget / len(rounds) / many, len(rounds) * many
            for done, plan in enumerate(self.found[:many]):
                part = number * many + done
                report_progress = share_of(self.problem.progress, "annealing", part, total)
                limits = params.annealing, share, self.enough_s, report_progress
                self.found[done] = anneal_plans(plan, self.evaluator, self._rng, *limits)
            self.found.sort(key=lambda plan: plan.seconds)

    def _keep(self, found: Iterable[Candidate]) -> None:
        """Add plans that fit to those found."""
        fitting = [plan for plan in found if plan.seconds < inf]
        self.found = sorted([*self.found, *fitting], key=lambda plan: plan.seconds)


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
