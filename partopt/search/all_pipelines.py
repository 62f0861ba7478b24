"""All pipelines of a small problem, the simulator's word on each that nothing less rules out.

`partopt.planners.optimal.pipelines` builds them stage by stage, and executes them without
contention at ranges of warm-ups. What may still be faster than the best plan known, at one warm-up,
is simulated. Where the work suffices, the best plan of all is known, and nothing is left to prove.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from partopt.cost.problem import Partition, Problem
from partopt.cost.tolerances import MET, SUM
from partopt.documents.plan import Plan
from partopt.errors import PartoptError
from partopt.planners.optimal import drop_useless_recompute
from partopt.planners.optimal.pipelines import Pipelines, Point, pipelines_of
from partopt.schedules import order, schedule
from partopt.schedules.layout import Layout
from partopt.search.evaluate import Evaluator
from partopt.search.moves import frozen
from partopt.search.warmup import WarmupTrials
from partopt.simulator.engine import simulate
from partopt.simulator.restate import layout_of
from partopt.simulator.work import Work, work_of

SIMULATIONS = {"quick": 0, "normal": 5_000, "thorough": 30_000}  # by effort
WORK = {"quick": 0, "normal": 50_000_000, "thorough": 500_000_000}  # steps and actions, likewise
Warmups = tuple[int, ...] | None  # None where the schedule says them
# of the gap, ruled out one after the other -> of the simulations and of the work until then
_SHARES = {0.25: 0.5, 0.5: 0.75, 1.0: 1.0}


class Found(NamedTuple):
    """A plan that is faster than what was known, if there is one, and what no plan goes below."""

    lower_s: float  # of an iteration
    best: tuple[Partition, Warmups] | None = None


class Simulator:
    """Simulates points of the pipelines of a problem, the first `left` of them.

    `best` is the last that was below `least_s` seconds, which it then took.
    """

    def __init__(self, problem: Problem, least_s: float, left: int) -> None:
        self.problem, self.least_s, self.left = problem, least_s, left
        self.best: tuple[Partition, Warmups] | None = None
        self._known: dict[tuple[Partition, Warmups], float] = {}
        self._evaluator, self._bounds = Evaluator(problem), problem.boundaries()
        self._entry = schedule(problem.schedule)
        self._laid = lru_cache(maxsize=1)(self._lay)  # points of one partition come in a row

    def __call__(self, point: Point) -> float:
        """Seconds of an iteration, infinite where no plan is asked for that runs so.

        NaN where no more are simulated.
        """
        if self.left <= 0:
            return math.nan
        partition = frozen(point.partition.on_layers(self._bounds))
        if self.problem.stages not in (None, len(partition.stages)):
            return math.inf
        warmups = point.warmups if self._entry.takes_warmup else None
        if (partition, warmups) not in self._known:
            self.left -= 1
            self._known[partition, warmups] = self._simulate(partition, warmups)
        return self._known[partition, warmups]

    def _simulate(self, partition: Partition, warmups: Warmups) -> float:
        plan, layout, work = self._laid(partition)
        try:
            actions = order(plan.schedule, replace(layout, warmup=warmups or layout.warmup))
            seconds = float(simulate(actions, work).makespan)
        except PartoptError:
            return math.inf
        if seconds >= self.least_s:
            return seconds
        trial = WarmupTrials(plan).at(warmups)
        if trial is None or not trial.fits:
            return math.inf
        self.best, self.least_s = (partition, warmups), seconds
        return seconds

    def _lay(self, partition: Partition) -> tuple[Plan, Layout, Work]:
        plan = self._evaluator.plan_of(partition)
        return plan, layout_of(plan), work_of(plan, self._entry.recomputes)


def best_below(problem: Problem, lower_s: float, value_s: float) -> Found:
    """The best plan below `value_s` seconds an iteration, where the work suffices to find it.

    `lower_s` is a bound; a part of the gap is ruled out first, then more of it.
    """
    every = _all_of(problem)
    simulations, work = SIMULATIONS[problem.effort], WORK[problem.effort]
    if every is None or not simulations or value_s <= lower_s * (1 + MET):
        return Found(lower_s)
    simulator = Simulator(problem, value_s * (1 - MET / 10), 0)
    done = 0.0
    for share, until in _SHARES.items():
        problem.progress("simulating all pipelines", round(done * simulations), simulations)
        simulator.left += round((until - done) * simulations)
        done, T = until, lower_s + share * (simulator.least_s - lower_s)
        answer = every.least(T, simulator, round(done * work))
        if not answer.complete:
            break
        lower_s = min(T, answer.seconds) * (1 - SUM)
        if answer.seconds < math.inf:
            break
    return Found(lower_s, simulator.best)


def none_within(problem: Problem, seconds: float) -> bool:
    """Whether it is found that no plan takes so many seconds an iteration or less."""
    every = _all_of(problem)
    if every is None:
        return False
    simulator = Simulator(problem, seconds, SIMULATIONS["thorough"])
    answer = every.least(seconds, simulator, WORK["thorough"])
    return answer.complete and answer.seconds == math.inf


def _all_of(problem: Problem) -> Pipelines | None:
    return pipelines_of(drop_useless_recompute(problem.coarsen()))
