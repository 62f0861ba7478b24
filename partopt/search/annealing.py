"""Asynchronous partitions of whole groups of devices, annealed in short runs of the simulator.

Where links are slow and memory is short, good plans are far above what formulas say, and what
formulas say orders them badly: ports are contended for, and what is in flight waits in queues. One
simulation of such a plan takes long, and the steps of `partopt.search.moves` are small. So stages
are of whole groups here and steps as long as a group, short runs compare (`ShortRuns`), and
simulated annealing (Kirkpatrick, Gelatt and Vecchi, Science 1983) leaves the many places where no
single step gains. What is best in short runs is then simulated in full.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from typing import NamedTuple

from partopt.cost.problem import Partition, Problem
from partopt.schedules import schedule
from partopt.search.evaluate import Evaluator, Value
from partopt.search.moves import Counts, Moves, Shape, shape_of
from partopt.search.short_runs import WARMUPS, ShortRuns
from partopt.search.starts import CELLS, cheap_starts

# G   units of the cluster: whole groups of devices
# S   stages of a shape; those of a kind in units
# T   temperature, relative to the period: how much worse a step is that is taken now and then

BUDGET = 30_000.0  # of a round, as `Evaluator.spent`
ROUNDS = {"quick": 0, "normal": 1, "thorough": 6}  # each begins with the best so far
_UNITS = 32  # G at most
_LEAST = 8  # groups of a level that is coarse enough to plan in
_SINGLES = 8  # stages of one unit before and behind the large ones of a kind, at most
_SHARES = (1 / 6, 1 / 3, 1 / 2, 2 / 3, 5 / 6)  # of the first of two large stages
_STARTS, _LEFT = 4, 2  # of the kinds; of these after the first half of the work
_HOT, _COLD = 0.02, 0.002  # T at first and at last
_LOOSE = 1.3  # times what is to be beaten: starts may be so much slower
_TURNED = 0.1  # of the steps: another warm-up
_REACH = 40  # boundaries within which a cut moves
_STEPS = (1, 2, 3, 6, 12)  # boundaries by which it moves, whatever is cut there
_GIVEN = (0.5, 1, 1, 1, 2, 4)  # units that a stage gives to another
_PROPOSED = 1.0  # of the work of a short run's thousand actions: to look at a shape by formulas
_AGAIN, _LONGER = 20, 4  # shapes that run again, for so many times as long
_ALIKE = 5  # of these those with the same replicas
_FULL = 3  # of these those simulated in full


def anneal(
    starts: Iterable[Partition], problem: Problem, best: Value, beat_s: float = math.inf
) -> list[tuple[Partition, Value]]:
    """Partitions that may be better than `best` and below `beat_s`, simulated in full.

    They come of `starts` and of starts by closed forms. None under synchronous schedules, where
    stages choose to recompute, or where all have as many replicas.
    """
    moves, rounds = Moves(problem), ROUNDS[problem.effort]
    told = problem.recompute_per_stage or moves.alike
    if told or not schedule(problem.schedule).asynchronous or not rounds:
        return []
    limit_s = min(beat_s, best.seconds if best.over == 0 else math.inf)
    problem.progress("annealing", 0, 1)
    search, evaluator = _Annealing(moves), Evaluator(problem)
    found = [*filter(None, map(shape_of, starts))]
    for _ in range(rounds):
        found += search.run(found, limit_s, search.spent + BUDGET)
    return [(each, evaluator.value(each)) for each in search.finalists()]  # at the best warm-up


class _Place(NamedTuple):
    """A shape and the number of its warm-up in `WARMUPS`."""

    shape: Shape
    way: int

    @property
    def stages(self) -> int:
        """S of the shape."""
        return len(self.shape.replicas)


class _Annealing:
    """Short runs of places; `spent` is the work."""

    def __init__(self, moves: Moves) -> None:
        self.moves, self.problem, self.bounds = moves, moves.problem, moves.bounds
        self.unit = unit_of(self.problem)
        self.index = {bound: place for place, bound in enumerate(self.bounds)}
        self.runs = ShortRuns(Evaluator(self.problem))
        self.seconds: dict[_Place, float] = {}
        self.proposals = 0
        self.random = random.Random(0)

    @property
    def spent(self) -> float:
        """Short runs, and looking at what did not run."""
        return self.runs.spent + _PROPOSED * self.proposals

    def run(self, starts: Sequence[Shape], limit_s: float, until: float) -> list[Shape]:
        """Anneal the best starts of several numbers of stages, then the best of these.

        What is best then, the fastest first; `until` is what may be spent.
        """
        places = self.best_starts([*starts, *self._kinds()], _LOOSE * limit_s)[:_STARTS]
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
        for place in (_Place(shape, way) for shape in shapes for way in range(len(WARMUPS))):
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
            if self.runs.evaluator.bound_s(partition) >= beat_s:
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
        """A place of as many stages near this one; None where the step leads to none."""
        draw = self.random.random()
        if draw < _TURNED:
            return _Place(place.shape, self.random.randrange(len(WARMUPS)))
        cuts = place.stages > 1 and draw < (1 + _TURNED) / 2
        shape = self._cut(place.shape) if cuts else self._give(place.shape)
        return None if shape is None else _Place(shape, place.way)

    def _cut(self, shape: Shape) -> Shape | None:
        """A cut moved: to where less crosses it than on the way, or by a few boundaries."""
        c = self.random.randrange(1, len(shape.replicas))
        at, sign = self.index[shape.bounds[c]], self.random.choice((-1, 1))
        if self.random.random() < 0.6:
            places = self._cheaper(at, sign)
        else:
            places = [at + sign * self.random.choice(_STEPS)]
        low, high = (self.index[shape.bounds[other]] for other in (c - 1, c + 1))
        places = [place for place in places if low < place < high]
        if not places:
            return None
        cut = self.bounds[self.random.choice(places)]
        return dataclasses.replace(shape, bounds=(*shape.bounds[:c], cut, *shape.bounds[c + 1 :]))

    def _cheaper(self, at: int, sign: int) -> list[int]:
        """The boundaries in a direction over which less is sent than over all before them."""
        least, found, traffic = math.inf, [], self.problem.chain.traffic
        for step in range(1, _REACH):
            place = at + sign * step
            if not 0 < place < len(self.bounds) - 1:
                break
            if traffic[self.bounds[place]] < least:
                least = traffic[self.bounds[place]]
                found.append(place)
        return found

    def _give(self, shape: Shape) -> Shape | None:
        """Units of one stage given to another, or taken from idle devices, or left idle."""
        S, idle = len(shape.replicas), self.moves.P - sum(shape.replicas)
        counts = [*shape.replicas, idle]
        source, to = self.random.sample(range(S + 1), 2)
        given = math.ceil(self.unit * self.random.choice(_GIVEN))
        counts[source] -= given
        counts[to] += given
        replicas = tuple(counts[:S])
        if counts[S] < 0 or not self.moves.allows(replicas):
            return None
        shape = dataclasses.replace(shape, replicas=replicas)
        return dataclasses.replace(shape, idle=self.moves.trim(shape))


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
