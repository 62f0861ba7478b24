"""Partitions improved in the simulator, from several starts.

A planner minimises what formulas say, and the simulator knows more: of contention, of how replicas
take turns, of a pipeline that fills. So what planners found are the starts of a search in which the
simulator judges: a partition that is good is changed in one place, and what it is changed to is
simulated in the order of what it may reach, a bound that no simulation is below and what the
simulator added to the bound of the partition that it came of.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from partopt.cost.problem import Partition, Problem
from partopt.search.evaluate import Evaluator, Value
from partopt.search.moves import Moves, frozen
from partopt.search.warmup import Depth

# simulations, a long one counted as several (`partopt.search.evaluate.Evaluator.spent`)
BUDGET = {"quick": 0.0, "normal": 1_000.0, "thorough": 20_000.0}
SAME = 1e-6  # relative: less than this is not gained
_STARTS = 24  # of the starts by closed forms those of least bound, which are simulated first
# of a simulation: the work to bound a stage by tables, and by formulas
_BOUNDED, _PRICED = 0.01, 0.2


class Improved(NamedTuple):
    """A partition, its value, and the work that finding it took."""

    partition: Partition
    value: Value
    spent: float


def improve(
    starts: Iterable[tuple[Partition, Value]],
    problem: Problem,
    lower_bound_s: float,
    budget: float,
    beat_s: float = math.inf,
) -> Improved:
    """The best partition that a search finds from `starts`, whose values are known.

    The search ends when that is as fast as `lower_bound_s` per microbatch, when nothing is left
    that could be faster, and below `beat_s`, or when the `budget` of simulations is spent.
    """
    search = _Search(problem, budget, beat_s)
    for partition, value in starts:
        search.start(frozen(partition), value)
    search.run(lower_bound_s)
    assert search.best is not None
    return Improved(search.best, search.value, search.spent)


class _Search:
    """What is known so far, and what is to be tried: a heap in the order of what is expected."""

    def __init__(self, problem: Problem, budget: float, beat_s: float) -> None:
        self.budget, self.beat_s = budget, beat_s
        self.problem, self.moves, self.evaluator = problem, Moves(problem), Evaluator(problem)
        self.best: Partition | None = None
        self.value = Value(2**63, math.inf)
        self.seen: set[Partition] = set()
        # bytes over the limit, seconds that it takes or may take, a number, and the step
        self.heap: list[tuple[int, float, int, _Step]] = []
        self.steps = 0
        self.bounded = 0.0

    @property
    def spent(self) -> float:
        """Simulations, and the work of bounding what was not simulated."""
        return self.evaluator.spent + self.bounded + _PRICED * self.evaluator.priced

    def run(self, lower_bound_s: float) -> None:
        """Simulate and step on until nothing is left that could be better."""
        if self.budget > 0 and self.best is not None and not self.is_optimal(lower_bound_s):
            bounds_s = {each: self.bound_s(each, self.limit_s) for each in self._starts()}
            starts = sorted(bounds_s, key=bounds_s.__getitem__)
            self.push(starts[:_STARTS], None, self.value)
            self.push(starts[_STARTS:], self.best, self.value)
        while self.heap and self.spent < self.budget and not self.is_optimal(lower_bound_s):
            *_, step = heapq.heappop(self.heap)
            if step.value is not None:
                self.push(self.moves.around(step.partition), step.partition, step.value)
            elif self.bound_s(step.partition, self.limit_s) < self.limit_s:
                value = self.evaluator.value(step.partition, step.depth, self.limit_s)
                self.take(step.partition, value)

    def _starts(self) -> Iterator[Partition]:
        """Starts by closed forms.

        None where stages may choose to recompute, whose search goes on from that without and from
        that with it.
        """
        if not self.problem.recompute_per_stage:
            yield from dict.fromkeys(self.moves.starts())

    def is_optimal(self, lower_bound_s: float) -> bool:
        """Whether nothing can be faster."""
        return self.value.over == 0 and self.value.seconds <= lower_bound_s * (1 + SAME)

    @property
    def limit_s(self) -> float:
        """What a partition must be below to be better, and of use."""
        own_s = self.value.seconds if self.value.over == 0 else math.inf
        return min(own_s * (1 - SAME), self.beat_s)

    def bound_s(self, partition: Partition, beat_s: float = math.inf) -> float:
        """What the simulator does not go below; the formulas of plans where tables are too long.

        A bound that is no less than `beat_s` need not be the largest that is known.
        """
        if self.moves.tables.able:
            return self.moves.tables.bound_s(partition, beat_s)
        return self.evaluator.bound_s(partition)

    def start(self, partition: Partition, value: Value) -> None:
        """Record a partition to begin with."""
        if partition not in self.seen:
            self.seen.add(partition)
            self.take(partition, value)

    def take(self, partition: Partition, value: Value) -> None:
        """Record a value; what is next to the partition is tried when its turn comes."""
        better = value[:2] < self.value[:2]
        if better:
            self.best, self.value = partition, value
        seconds = -math.inf if better else value.seconds  # what is best goes on at once
        self.put(value.over, seconds, _Step(partition, value.depth, value))

    def push(self, others: Iterable[Partition], near: Partition | None, value: Value) -> None:
        """Put partitions in the heap, those that were not there before.

        They are expected to exceed their bounds by as much as what they are `near`, of this value.
        """
        simulated = near is not None and value.over == 0 and value.seconds < math.inf
        gap_s = max(0.0, value.seconds - self.bound_s(near)) if near and simulated else 0.0
        for other in others:
            if other in self.seen:
                continue
            self.seen.add(other)
            if self.moves.tables.able:
                self.bounded += _BOUNDED * len(other.stages)
            if self.spent >= self.budget:
                return
            bound_s = self.bound_s(other, self.limit_s)
            if bound_s < self.limit_s:
                self.put(0, bound_s + gap_s, _Step(other, value.depth, None))

    def put(self, over: int, seconds: float, step: _Step) -> None:
        """Put a step in the heap; of equal ones the first comes first."""
        self.steps += 1
        heapq.heappush(self.heap, (over, seconds, self.steps, step))


class _Step(NamedTuple):
    """A partition to simulate at a warm-up or, where its value is known, to step away from."""

    partition: Partition
    depth: Depth
    value: Value | None
