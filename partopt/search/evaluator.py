"""Plans of one problem, judged by the simulator at the warm-ups that their schedule may have."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import inf
from typing import NamedTuple

from partopt.planners.costs import StageCosts
from partopt.planners.layouts import Shape
from partopt.search.simulations import KnownSeconds, Simulations
from partopt.search.warmup import WAYS, Stages


class Found(NamedTuple):
    """A plan and its warm-up, with the seconds of a microbatch; infinite where it does not fit.

    `way` is a number of `WAYS`; of every stage `more` says by how much its warm-up differs.
    """

    seconds: float
    shape: Shape
    way: int = 0
    more: tuple[int, ...] = ()


class Judge:
    """Simulates plans at warm-ups, none twice."""

    def __init__(self, costs: StageCosts) -> None:
        self.costs, self.problem, self.entry = costs, costs.problem, costs.entry
        self._known = KnownSeconds[tuple[Shape, tuple[int, ...] | None]](
            Simulations(self.problem), lambda key: (key[0].partition(), key[1])
        )

    @property
    def spent(self) -> float:
        """What simulations took, as `Simulations.spent` counts."""
        return self._known.spent

    @property
    def ways(self) -> range:
        """The numbers of the warm-ups that plans may have."""
        return range(len(WAYS) if self.entry.takes_warmup else 1)

    def best(self, shape: Shape, ways: Sequence[int] = (), allowed_s: float = inf) -> Found:
        """A plan at the best of some warm-ups, by default of all.

        Its seconds are `allowed_s` where they are seen to be no less.
        """
        best = Found(allowed_s, shape)
        for way in ways or self.ways:
            seconds = self.seconds(shape, way, allowed_s=best.seconds)
            if seconds < best.seconds:
                best = Found(seconds, shape, way)
        return best

    def seconds(
        self, shape: Shape, way: int = 0, more: tuple[int, ...] = (), allowed_s: float = inf
    ) -> float:
        """Seconds of a microbatch at one warm-up, or `allowed_s` where they are seen to be more."""
        warmups = self.warmups(shape, way, more) if self.entry.takes_warmup else None
        return self._known.seconds((shape, warmups), allowed_s)

    def warmups(self, shape: Shape, way: int, more: Sequence[int] = ()) -> tuple[int, ...]:
        """Forwards of every stage before its first backward."""
        return self.stages(shape).warmups(WAYS[way], more)

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
