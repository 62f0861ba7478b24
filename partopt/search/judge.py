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
from partopt.search.warmup import fits_by_order
from partopt.simulator.execution import execute
from partopt.simulator.prediction import check_actions

# A warm-up of all stages: (factor, more) is `factor` times the replicas behind a stage and so many
# more, over its own replicas; ("pace", factor) is what is in flight at so many times the shortest
# period that the memory allows.
Way = tuple[float | str, float]
WAYS: tuple[Way, ...] = (
    (1, 0),
    (2, 0),
    ("pace", 1.0),
    ("pace", 1.2),
    (1, 1),
    (1, 2),
    (1.5, 0),
    (3, 0),
    (4, 0),
    (6, 0),
)
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
        self._stage = lru_cache(maxsize=None)(counted_stage)

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
            execution = execute(plan if warmups is None else under(plan, warmups=warmups))
        except PartoptError:  # it deadlocks, or is too long to simulate
            return math.inf
        self.spent += len(execution.order.kind) / ACTIONS
        return execution.period_s if fits_by_order(execution) else math.inf

    # ---- warm-ups -----------------------------------------------------------------------------

    def warmups(self, shape: Shape, way: int, more: Sequence[int] = ()) -> tuple[int, ...]:
        """Forwards of each stage before its first backward.

        They are no more than fit, nor than the stage before takes in.
        """
        (factor, extra), M = WAYS[way], self.problem.microbatches
        replicas, room = [len(own) for own in shape.ranks], self._room(shape)
        held: list[int] = []
        if factor == "pace":
            held = self._at_pace(shape, replicas, room, extra)
        found: list[int] = []
        for s, r in enumerate(replicas):
            behind = sum(replicas[s + 1 :])
            if isinstance(factor, str):
                own = held[s] - 1
            else:
                own = int((factor * behind + r - 1 + extra) // r)
            own = min(own + (more[s] if more and behind else 0), room[s] - 1)
            if M is not None:
                own = min(own, -(-M // r) - 1)
            if s and M is not None:
                own = min(own, (found[-1] + 1) * replicas[s - 1] // r - 1)
            found.append(max(0, own))
        return tuple(found)

    def _room(self, shape: Shape) -> list[int]:
        """The most microbatches in flight that each stage has room for."""
        stages = zip(shape.ranks, self.costs.recomputes(shape), pairwise(shape.bounds), strict=True)
        return [int(self.costs.room(len(own), again)[cut]) for own, again, cut in stages]

    def _at_pace(
        self, shape: Shape, replicas: Sequence[int], room: Sequence[int], factor: float
    ) -> list[int]:
        """Microbatches in flight at `factor` times the shortest period that the memory allows.

        By Little's law: the period times what a replica holds is how long it holds a microbatch.
        Replicas take turns, so that between two microbatches there are whole periods.
        """
        costs, places = self.costs, shape.places
        modes = costs.recomputes(shape)
        busy = [
            float(costs.C[again][cut])
            for again, cut in zip(modes, pairwise(shape.bounds), strict=True)
        ]
        common = self.problem.topology.common_level
        gaps = [
            common(places[one[1] - 1][0], places[other[0]][0])
            for one, other in pairwise(shape.spans)
        ]
        waits = [float(costs.wait(k)[0, b]) for k, b in zip(gaps, shape.bounds[1:], strict=False)]
        stages = list(zip(replicas, busy, [*waits, 0.0], strict=True))[::-1]

        def held_at(period_s: float) -> list[int]:
            held, away_s = [], 0.0
            for r, own_s, wait_s in stages:
                away_s += own_s + wait_s
                held.append(max(1, math.ceil(away_s / (r * period_s) * (1 - 1e-9))))
                away_s = max(away_s, (held[-1] - 1) * r * period_s + own_s)
            return held[::-1]

        short = max(own / r for own, r in zip(busy, replicas, strict=True))
        enough = sum(busy) + sum(waits)
        for _ in range(20):
            middle = (short + enough) / 2
            fits = all(own <= most for own, most in zip(held_at(middle), room, strict=True))
            short, enough = (short, middle) if fits else (middle, enough)
        return held_at(enough * factor) if enough else [1] * len(replicas)
