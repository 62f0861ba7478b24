"""Partitions annealed in short runs of the simulator.

Where links are slow, good plans are far above what formulas say, and what formulas say orders them
badly: ports are contended for, and what is in flight waits in queues. The steps of
`partopt.search.moves` end where no single one gains. So here short runs compare (`ShortRuns`), and
simulated annealing (Kirkpatrick, Gelatt and Vecchi, Science 1983) leaves such places. What is best
in short runs is then simulated in full. In a large problem stages are of whole groups of devices,
and steps as long as a group.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from typing import NamedTuple

from partopt.cost.problem import FREE, Partition, Problem
from partopt.schedules import schedule
from partopt.search.evaluate import Evaluator, Value
from partopt.search.moves import Counts, Moves, Shape, shape_of
from partopt.search.short_runs import ShortRuns
from partopt.search.starts import CELLS, LARGE, cheap_starts, size
from partopt.search.steps import Steps

# G   units of the cluster: whole groups of devices, in a small problem single ones
# S   stages of a shape; those of a kind in units
# T   temperature, relative to the period: how much worse a step is that is taken now and then

BUDGET, FINE = 30_000.0, 2_000.0  # of a round, as `Evaluator.spent`; of a small problem
ROUNDS = {"quick": 0, "normal": 1, "thorough": 6}  # each begins with the best so far
_UNITS = 32  # G at most
_LEAST = 8  # groups of a level that is coarse enough to plan in
_SINGLES = 8  # stages of one unit before and behind the large ones of a kind, at most
_SHARES = (1 / 6, 1 / 3, 1 / 2, 2 / 3, 5 / 6)  # of the first of two large stages
_STARTS, _LEFT = 4, 2  # of the kinds; of these after the first half of the work
_HOT, _COLD = 0.02, 0.002  # T at first and at last
_LOOSE = 1.3  # times what is to be beaten: starts may be so much slower
_TURNED = 0.1  # of the steps: another warm-up
# of the work of a short run's thousand actions: to look at a shape by formulas, and by tables
_PROPOSED, _LOOKED_UP = 1.0, 0.05
_AGAIN, _LONGER = 20, 4  # shapes that run again, for so many times as long
_ALIKE = 5  # of these those with the same replicas
_FULL = 3  # of these those simulated in full


def anneal(
    starts: Iterable[Partition], problem: Problem, best: Value, beat_s: float = math.inf
) -> list[tuple[Partition, Value]]:
    """Partitions that may be better than `best` and below `beat_s`, simulated in full.

    They come of `starts` and of starts by closed forms. None where stages choose to recompute, or
    of a large problem under a synchronous schedule, or where all stages have as many replicas.
    """
    moves, rounds, large = Moves(problem), ROUNDS[problem.effort], size(problem) >= LARGE
    coarse = not moves.alike and schedule(problem.schedule).asynchronous
    if problem.recompute_per_stage or (large and not coarse) or not rounds:
        return []
    limit_s = min(beat_s, best.seconds if best.over == 0 else math.inf)
    problem.progress("annealing", 0, 1)
    search, evaluator = _Annealing(moves, large), Evaluator(problem)
    found = [each for each in map(shape_of, starts) if each and moves.allows(each.replicas)]
    for _ in range(rounds):
        found += search.run(found, limit_s, search.spent + (BUDGET if large else FINE))
    return [(each, evaluator.value(each)) for each in search.finalists()]  # at the best warm-up


def with_equal_replicas(problem: Problem) -> Iterator[Problem]:
    """The problem with as many replicas of all stages; none where it has no others.

    There are few such plans, and the best of them may lie far from all that others come to.
    """
    if problem.replication == FREE and schedule(problem.schedule).uneven:
        yield dataclasses.replace(problem, replication="uniform")


class _Place(NamedTuple):
    """A shape and the number of its warm-up, as `ShortRuns` has them."""

    shape: Shape
    way: int

    @property
    def stages(self) -> int:
        """S of the shape."""
        return len(self.shape.replicas)


class _Annealing:
    """Short runs of places; `spent` is the work."""

    def __init__(self, moves: Moves, large: bool) -> None:
        self.moves, self.problem, self.large = moves, moves.problem, large
        self.unit = unit_of(self.problem) if large else 1
        self.steps = Steps(moves, self.unit, fine=not large)
        self.random = self.steps.random
        self.runs = ShortRuns(Evaluator(self.problem))
        self.seconds: dict[_Place, float] = {}
        self.proposals = 0
        self.tabled = not large and moves.tables.able

    @property
    def spent(self) -> float:
        """Short runs, and looking at what did not run."""
        each = _LOOKED_UP if self.tabled else _PROPOSED
        return self.runs.spent + each * self.proposals

    def run(self, starts: Sequence[Shape], limit_s: float, until: float) -> list[Shape]:
        """Anneal the best starts of several numbers of stages, then the best of these.

        What is best then, the fastest first; `until` is what may be spent.
        """
        kinds = self._kinds() if self.large else filter(None, map(shape_of, self.moves.starts()))
        places = self.best_starts([*starts, *kinds], _LOOSE * limit_s)[:_STARTS]
        budget = until - self.spent
        for left in (_STARTS, _LEFT):
            found = (self.anneal(place, budget / 2 / left) for place in places[:left])
            places = sorted(found, key=self.seconds.__getitem__)
        return [place.shape for place in places]

    def finalists(self) -> list[Partition]:
        """The best partitions, by runs several times as long."""
        again: dict[Partition, float] = {}
        alike: Counter[Counts] = Counter()
        for place in sorted(self.seconds, key=self.seconds.__getitem__):
            if len(again) == _AGAIN:
                break
            alike[place.shape.replicas] += 1
            if alike[place.shape.replicas] > _ALIKE:
                continue
            partition = place.shape.partition()
            seconds = self.runs.period_s(partition, place.way, _LONGER)
            again[partition] = min(seconds, again.get(partition, math.inf))
        return heapq.nsmallest(_FULL, again, key=again.__getitem__)

    def best_starts(self, shapes: Sequence[Shape], limit_s: float) -> list[_Place]:
        """For each number of stages the best of the shapes, the fastest first."""
        best: dict[int, _Place] = {}
        for place in (_Place(shape, way) for shape in shapes for way in range(self.runs.likely)):
            self.proposals += 1
            seconds, known = self.tried_s(place, limit_s), best.get(place.stages)
            if seconds < (limit_s if known is None else self.seconds[known]):
                best[place.stages] = place
        return sorted(best.values(), key=self.seconds.__getitem__)

    def _kinds(self) -> Iterator[Shape]:
        """Shapes of all kinds, cut where the slowest stage is fastest by the formulas."""
        coarse = Moves(dataclasses.replace(self.problem, cut_at=cheap_starts(self.problem, CELLS)))
        for units in kinds(self.problem.topology.devices // self.unit):
            S, replicas = len(units), tuple(self.unit * own for own in units)
            if self.moves.allows(replicas):
                for each in coarse.balanced(Shape((), replicas, (0,) * S, (None,) * S)):
                    shape = shape_of(each)
                    assert shape is not None
                    yield shape

    def tried_s(self, place: _Place, beat_s: float) -> float:
        """Seconds per microbatch in a short run; infinite where a bound is not below `beat_s`."""
        if place not in self.seconds:
            partition = place.shape.partition()
            tables = self.moves.tables if self.tabled else self.runs.evaluator
            if tables.bound_s(partition) >= beat_s:
                return math.inf
            self.seconds[place] = self.runs.period_s(partition, place.way)
        return self.seconds[place]

    def anneal(self, place: _Place, budget: float) -> _Place:
        """The best place that steps from this one come to, ever fewer of which lead up."""
        best, begin = place, self.spent
        while self.spent - begin < budget:
            T = _HOT * (_COLD / _HOT) ** ((self.spent - begin) / budget)
            allowed_s = self.seconds[place] * (1 - T * math.log(1 - self.random.random()))
            self.proposals += 1
            other = self.step(place)
            if other is not None and self.tried_s(other, allowed_s) < allowed_s:
                place = other
                best = min(best, place, key=self.seconds.__getitem__)
        return best

    def step(self, place: _Place) -> _Place | None:
        """A place near this one; None where the step leads to none."""
        draw = self.random.random()
        if draw < _TURNED:
            return _Place(place.shape, self.random.randrange(self.runs.ways))
        shape = self.steps.near(place.shape, (draw - _TURNED) / (1 - _TURNED))
        return None if shape is None else _Place(shape, place.way)


def unit_of(problem: Problem) -> int:
    """Devices of a unit: whole groups of a level, so that there are enough units and not many."""
    topology, P = problem.topology, problem.topology.devices
    sizes = [topology.group_size(k) for k in range(len(topology.levels))]
    group = max(size for size in sizes if size == 1 or P // size >= _LEAST)
    return group * -(-P // (group * _UNITS))


def kinds(units: int) -> list[Counts]:
    """Units of each stage: one large stage or two, and stages of one before and behind them."""
    found: dict[Counts, None] = {}
    for before, behind in product(range(_SINGLES + 1), repeat=2):
        left = units - before - behind
        large = [(left,), *((round(share * left), left - round(share * left)) for share in _SHARES)]
        for own in large:
            if min(own) > 0:
                found[(1,) * before + own + (1,) * behind] = None
    return list(found)
