"""Plans of one problem, judged by the simulator at the warm-ups that their schedule may have."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from partopt.cost.plan import bare_plan, counted_stage, under
from partopt.errors import PartoptError
from partopt.planners.costs import StageCosts
from partopt.planners.layouts import Shape
from partopt.schedules.entry import Replicas
from partopt.search.warmup import WAYS, Stages, fits_by_order
from partopt.simulator.execution import Shared, check_actions, execute

ACTIONS = 1000  # of a simulation: as many take about as long as beginning one


class Found(NamedTuple):
    """A plan and its warm-up, with the seconds of a microbatch; infinite where it does not fit.

    `way` is a number of `WAYS`; of each stage `more` says by how much its warm-up differs.
    """

    seconds: float
    shape: Shape
    way: int = 0
    more: tuple[int, ...] = ()


class Judge:
    """Simulates plans; `spent` is 1 for each simulation, and 1 for each `ACTIONS` of it."""

    def __init__(self, costs: StageCosts) -> None:
        self.costs, self.problem, self.entry = costs, costs.problem, costs.entry
        self.spent = 0.0
        self._known: dict[tuple[Shape, tuple[int, ...] | None], float] = {}
        self._stage, self._shared = lru_cache(maxsize=None)(counted_stage), Shared()

    @property
    def ways(self) -> range:
        """The numbers of the warm-ups that plans may have."""
        return range(len(WAYS) if self.entry.takes_warmup else 1)

    def best(self, shape: Shape, ways: Sequence[int] = ()) -> Found:
        """A plan at the best of some warm-ups, by default of all."""
        tried = (Found(self.seconds(shape, way), shape, way) for way in ways or self.ways)
        return min(tried, key=lambda found: found.seconds)

    def seconds(self, shape: Shape, way: int = 0, more: tuple[int, ...] = ()) -> float:
        """Seconds of a microbatch at one warm-up."""
        warmups = self.warmups(shape, way, more) if self.entry.takes_warmup else None
        if (shape, warmups) not in self._known:
            self._known[shape, warmups] = self._simulate(shape, warmups)
        return self._known[shape, warmups]

    def _simulate(self, shape: Shape, warmups: Sequence[int] | None) -> float:
        self.spent += 1
        replicas, M = Replicas(len(own) for own in shape.ranks), self.problem.microbatches
        counts = [self.entry.counts(s, replicas, M) for s in range(shape.stages)]
        plan = bare_plan(shape.partition(), self.problem, counts, self._stage)
        try:
            check_actions(plan)
            stated = plan if warmups is None else under(plan, warmups=warmups)
            execution = execute(stated, shared=self._shared)
        except PartoptError:  # it deadlocks, or is too long to simulate
            return math.inf
        self.spent += len(execution.order.kind) / ACTIONS
        return execution.period_s if fits_by_order(execution) else math.inf

    def warmups(self, shape: Shape, way: int, more: Sequence[int] = ()) -> tuple[int, ...]:
        """Forwards of each stage before its first backward."""
        return self.stages(shape).warmups(WAYS[way], more)

    def stages(self, shape: Shape) -> Stages:
        """What the warm-ups of a plan depend on."""
        costs, places = self.costs, shape.places
        common = self.problem.topology.common_level
        each = list(zip(shape.ranks, costs.recomputes(shape), pairwise(shape.bounds), strict=True))
        waits_s = [
            float(costs.wait(common(places[one[1] - 1][0], places[other[0]][0]))[0, cut])
            for one, other, cut in zip(shape.spans, shape.spans[1:], shape.bounds[1:], strict=False)
        ]
        return Stages(
            [len(ranks) for ranks in shape.ranks],
            [int(costs.room(len(ranks), again)[cut]) for ranks, again, cut in each],
            [float(costs.C[again][cut]) for _, again, cut in each],
            [*waits_s, 0.0],
            self.problem.microbatches,
        )
