"""Plans of one problem, evaluated by simulations, none twice."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from dataclasses import replace
from itertools import pairwise
from math import inf
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from partopt.cost.problem import Assignment, Partition, Problem
from partopt.planners.costs import StageCosts
from partopt.planners.layouts import Bounds, Shape
from partopt.search.simulations import Simulations
from partopt.search.warmup import WARMUP_RULES, Stages

T = TypeVar("T")
Warmups = tuple[int, ...] | None  # forwards before the first backward, or the usual ones


class Evaluator(ABC, Generic[T]):
    """Seconds of a microbatch of plans, which are Ts; infinite where one does not fit.

    `spent` counts as `Simulations.spent`, but a plan once, also where it is simulated to its end
    after it was broken off.
    """

    def __init__(self, problem: Problem) -> None:
        self.simulations, self.problem, self.spent = Simulations(problem), problem, 0.0
        self._known = dict[Hashable, tuple[float, float]]()  # seconds, and what was allowed

    @abstractmethod
    def seconds(self, plan: T, allowed_s: float = inf) -> float:
        """The seconds, or `allowed_s` or more where they are seen to be no less than that."""

    @abstractmethod
    def lower_bound_s(self, plan: T, allowed_s: float = inf) -> float:
        """Seconds that no simulation goes below by much, or more than `allowed_s`."""

    def best(self, plan: T, allowed_s: float = inf) -> tuple[float, T]:
        """The seconds of a start at what is chosen for it alone, and the plan.

        They are `allowed_s` where they are no less.
        """
        return min(allowed_s, self.seconds(plan, allowed_s)), plan

    def _once(
        self, key: Hashable, make: Callable[[], Partition], warmups: Warmups, allowed_s: float
    ) -> float:
        """`seconds` of the plan that the key tells from others, whose stages are made if needed."""
        seconds, before_s = self._known.get(key, (-inf, -inf))
        if seconds == before_s < allowed_s:
            spent, is_new = self.simulations.spent, key not in self._known
            seconds = self.simulations.seconds(make(), warmups, allowed_s if is_new else inf)
            self.spent += is_new * (self.simulations.spent - spent)
            self._known[key] = seconds, allowed_s
        return seconds


class Candidate(NamedTuple):
    """Stages on places, and their warm-up.

    `warmup_rule` is a number of `WARMUP_RULES`; by `extra_warmup` the warm-ups of stages differ.
    """

    shape: Shape
    warmup_rule: int = 0
    extra_warmup: tuple[int, ...] = ()

    @property
    def stages(self) -> int:
        """S."""
        return self.shape.stages


class PlanEvaluator(Evaluator[Candidate]):
    """Evaluates any stages on places, at warm-ups that their schedule may have."""

    def __init__(self, costs: StageCosts) -> None:
        super().__init__(costs.problem)
        self.costs, self.entry = costs, costs.entry

    def seconds(self, plan: Candidate, allowed_s: float = inf) -> float:
        """As of any evaluator."""
        warmups = self.warmups(plan) if self.entry.takes_warmup else None
        return self._once((plan.shape, warmups), plan.shape.partition, warmups, allowed_s)

    def lower_bound_s(self, plan: Candidate, allowed_s: float = inf) -> float:
        """What the slowest stage takes; one of `allowed_s` is not compared to others."""
        return self.costs.slowest_s(plan.shape, allowed_s)

    @property
    def warmup_rules(self) -> range:
        """The numbers of the warm-ups that plans may have."""
        return range(len(WARMUP_RULES) if self.entry.takes_warmup else 1)

    def best(self, plan: Candidate, allowed_s: float = inf) -> tuple[float, Candidate]:
        """The plan at the best of the `warmup_rules`."""
        best_s, best = allowed_s, plan
        for rule in self.warmup_rules:
            other = plan._replace(warmup_rule=rule)
            seconds = self.seconds(other, best_s)
            if seconds < best_s:
                best_s, best = seconds, other
        return best_s, best

    def warmups(self, plan: Candidate) -> tuple[int, ...]:
        """Forwards of every stage before its first backward."""
        rule = WARMUP_RULES[plan.warmup_rule]
        return self.stages(plan.shape).warmups(rule, plan.extra_warmup)

    def stages(self, shape: Shape) -> Stages:
        """What the warm-ups of a plan depend on."""
        costs, places = self.costs, shape.places
        common = self.problem.topology.common_level
        recomputed, spans = costs.recomputes(shape), pairwise(shape.bounds)
        stages = list(zip(shape.ranks, recomputed, spans, strict=True))
        waits_s = [
            float(costs.wait(common(places[one[1] - 1][0], places[other[0]][0]))[0, cut])
            for one, other, cut in zip(shape.spans, shape.spans[1:], shape.bounds[1:], strict=False)
        ]
        return Stages(
            [len(ranks) for ranks in shape.ranks],
            [int(costs.room(len(ranks), again)[cut]) for ranks, again, cut in stages],
            [float(costs.C[again][cut]) for _, again, cut in stages],
            [*waits_s, 0.0],
            self.problem.microbatches,
        )


class PlacedStages:
    """The stages of one partition, which keep their ranks wherever they are cut."""

    def __init__(self, partition: Partition, problem: Problem) -> None:
        self.whole, self.M = partition, problem.microbatches or 1
        self.stages = [replace(stage, ranks=tuple(stage.ranks)) for stage in partition.stages]
        devices = sorted({rank for stage in self.stages for rank in stage.ranks})
        number = {rank: k for k, rank in enumerate(devices)}
        # microbatches of every stage on every device, shape (devices, S)
        self.passes = np.zeros((len(devices), len(self.stages)))
        for s, stage in enumerate(self.stages):
            for rank in stage.ranks:
                self.passes[number[rank], s] += self.M // len(stage.ranks)
        recomputed = [problem.recomputes(stage) and not problem.first for stage in self.stages]
        # or less than it is
        self.prefixes = [problem.chain.busy_prefix(again) for again in recomputed]

    def partition(self, bounds: Bounds) -> Partition:
        """The partition between these boundaries."""
        moved = [
            Assignment(start, stop, stage.ranks, stage.recompute)
            for stage, (start, stop) in zip(self.stages, pairwise(bounds), strict=True)
        ]
        return replace(self.whole, stages=moved)

    def busiest_s(self, bounds: Bounds) -> float:
        """Seconds a microbatch for which the busiest device computes."""
        spans = zip(self.prefixes, pairwise(bounds), strict=True)
        seconds = [prefix[stop] - prefix[start] for prefix, (start, stop) in spans]
        return float((self.passes @ seconds).max()) / self.M


class Cuts(NamedTuple):
    """Stages that keep their ranks, between S + 1 boundaries."""

    placed: PlacedStages
    bounds: Bounds

    @property
    def stages(self) -> int:
        """S."""
        return len(self.bounds) - 1

    def partition(self) -> Partition:
        """The stages on their ranks."""
        return self.placed.partition(self.bounds)


class CutEvaluator(Evaluator[Cuts]):
    """Evaluates stages of any ranks, cut anywhere; devices run their schedule's order."""

    def seconds(self, plan: Cuts, allowed_s: float = inf) -> float:
        """As of any evaluator."""
        return self._once(plan, plan.partition, None, allowed_s)

    def lower_bound_s(self, plan: Cuts, allowed_s: float = inf) -> float:
        """Seconds a microbatch for which the busiest device computes."""
        return plan.placed.busiest_s(plan.bounds)
