"""The plan of `optimal`: those of the dynamic program and of others, improved in the simulator."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace
from math import inf

from partopt.cost.plan import price
from partopt.cost.problem import Partition, Problem
from partopt.documents.plan import Plan
from partopt.planners import optimal
from partopt.planners.costs import StageCosts
from partopt.planners.layouts import Places, Shape, shape_of
from partopt.search.annealing import anneal, valid
from partopt.search.judge import Found, Judge
from partopt.search.variants import Variant
from partopt.search.warmup import simulate_at_warmup, simulate_with_best_warmup

BUDGET = {"quick": 500.0, "normal": 1800.0, "thorough": 25_000.0}  # as `Judge.spent` counts
LARGE = 3.6  # times as much for the program over ranks, whose plans have many stages
STARTS = 0.2  # of the budget, for the plans of the dynamic program
RANKED = 0.6  # of that of the program over ranks
ROUNDS = (12, 4, 1)  # plans that are annealed in each round; all rounds have the same budget
PACED = (2, 3, 0)  # numbers of warm-ups at which plans of the program over ranks are tried
FINE = 1000  # ranges of layers, between which the cuts of the best plan are chosen again
HOPED = 0.1  # above what is to be beaten: a start that is slower is not annealed
NEARLY = 1e-3  # above the bound: nearer, nothing better is looked for


def best_plan(variant: Variant, others: Iterable[Partition], lower_s: float, beat_s: float) -> Plan:
    """The best simulated plan of a variant, of the dynamic program or `others`, improved.

    No plan is below `lower_s` seconds of a microbatch, and none is looked for where none is below
    `beat_s`. Raises PartoptError where no plan fits by the formulas.
    """
    problem, cells = variant.problem, variant.coarse[1]
    problem.progress("dynamic program", 0, 1)
    starts = variant.starts
    if not starts:
        raise optimal.nothing_fits(problem)
    if lower_s >= beat_s:
        return simulate_with_best_warmup(_priced(starts[0].partition().on_layers(cells), problem))
    search = _Search(Judge(variant.costs), max(lower_s, 0.0) * (1 + NEARLY), problem)
    search.try_starts(starts)
    search.try_others(others, cells)
    if search.best_s < beat_s * (1 + HOPED):
        search.anneal()
    if not search.found:
        plans = (_priced(s.partition().on_layers(cells), problem) for s in starts[:3])
        return min(map(simulate_with_best_warmup, plans), key=lambda plan: plan.peak_memory_bytes)
    best, judge = search.found[0], search.judge
    if cells != problem.boundaries():
        best, judge, cells = _recut_finely(best, problem, cells)
    plan = _priced(best.shape.partition().on_layers(cells), problem)
    if not judge.entry.takes_warmup:
        return simulate_with_best_warmup(plan)
    own = simulate_at_warmup(plan, judge.warmups(best.shape, best.way, best.more))
    if search.ranked:
        return own
    return max(
        (own, simulate_with_best_warmup(plan)),
        key=lambda each: (each.fits, each.predicted.samples_per_s),
    )


def _priced(partition: Partition, problem: Problem) -> Plan:
    return price(partition, problem, "optimal")


def _recut_finely(
    rough: Found, problem: Problem, cells: list[int]
) -> tuple[Found, Judge, list[int]]:
    """The plan of a coarse chain, with better cuts between up to `FINE` ranges of layers if any."""
    stated, bounds = optimal.coarsen(problem, FINE, cells)
    judge = Judge(StageCosts(stated))
    shape = rough.shape.on_cells(cells, bounds)
    tried = [shape, optimal.recut(judge.costs, shape)]
    found = [
        rough._replace(shape=each, seconds=judge.seconds(each, rough.way, rough.more))
        for each in tried
        if each is not None
    ]
    return min(found, key=lambda each: each.seconds), judge, bounds


class _Search:
    """The plans of one problem that were found, the fastest first."""

    def __init__(self, judge: Judge, enough_s: float, problem: Problem) -> None:
        self.judge, self.enough_s, self.progress = judge, enough_s, problem.progress
        self.ranked = optimal.over_ranks(problem)
        self.budget = BUDGET[problem.effort] * (LARGE if self.ranked else 1)
        self.found: list[Found] = []

    @property
    def best_s(self) -> float:
        """Seconds of the fastest plan."""
        return self.found[0].seconds if self.found else inf

    def try_starts(self, starts: Iterable[Shape]) -> None:
        """Simulate plans that may be the fastest; of each layout and number of stages the best."""
        best: dict[tuple[object, Places], Found] = {}
        judge, limit = self.judge, (RANKED if self.ranked else STARTS) * self.budget
        for shape in starts:
            best_s = min((each.seconds for each in best.values()), default=inf)
            if judge.spent > (limit if best_s < inf else self.budget) or best_s <= self.enough_s:
                break
            if judge.costs.slowest_s(shape) < best_s:
                key = (shape if self.ranked else shape.stages), shape.places
                own = judge.best(shape, PACED if self.ranked else ())
                best[key] = min(best.get(key, own), own, key=lambda each: each.seconds)
        self.keep(best.values())

    def try_others(self, others: Iterable[Partition], cells: list[int]) -> None:
        """Simulate the plans of other planners that cut where this chain may be cut."""
        judge, devices = self.judge, self.judge.problem.topology.devices
        number = {cell: k for k, cell in enumerate(cells)}
        found = []
        for partition in others:
            if all(stage.stop in number for stage in partition.stages):
                rough = [
                    replace(own, start=number[own.start], stop=number[own.stop])
                    for own in partition.stages
                ]
                shape = shape_of(replace(partition, stages=rough), devices)
                if not judge.costs.chooses_recompute:
                    shape = replace(shape, recompute=(None,) * shape.stages)
                if valid(shape, judge.costs) and judge.costs.slowest_s(shape) < self.best_s:
                    found.append(judge.best(shape))
        self.keep(found)

    def anneal(self) -> None:
        """Anneal the best plans, ever fewer of them."""
        rounds = ROUNDS[-2:] if self.ranked else ROUNDS
        left, rng = self.budget - self.judge.spent, random.Random(0)
        for number, many in enumerate(rounds):
            starts, self.found = self.found, self.found[many:]
            for done, each in enumerate(starts[:many]):
                total = len(rounds) * many
                self.progress("annealing", number * many + done, total)
                share = left / len(rounds) / many
                self.keep([anneal(each, self.judge, rng, share, self.enough_s)])

    def keep(self, found: Iterable[Found]) -> None:
        """Add plans that fit to those found."""
        fitting = [each for each in found if each.seconds < inf]
        self.found = sorted([*self.found, *fitting], key=lambda each: each.seconds)
