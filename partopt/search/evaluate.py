"""What the simulator says of a partition, without the documents of a plan.

A search asks this of hundreds of partitions, and pricing a plan takes about as long as simulating
it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from msgspec.structs import replace

from partopt.cost.flight import counts_of
from partopt.cost.iteration import stage_objective_s
from partopt.cost.period import tied_exchange_s, tied_groups
from partopt.cost.price import plan_of, unplaced_stage
from partopt.cost.problem import Partition, Problem, lookup_key
from partopt.documents.plan import Estimate, Plan, Predicted
from partopt.documents.stage import Flow
from partopt.schedules import schedule
from partopt.schedules.entry import Replicas
from partopt.search.warmup import (
    DEPTHS,
    Depth,
    Trial,
    WarmupTrials,
    best_trial,
    warmups,
    warmups_within,
)

NEAR = 1.05  # times what is to be beaten: a partition this good is tried at the formula's warm-up
LIKELY: Depth = (2, 0)  # of all warm-ups the one that is most often near the best
ACTIONS = 1000  # of a simulation: as many take about as long as beginning one


class Value(NamedTuple):
    """How good a partition is: one that fits before one that does not, then the fastest.

    `over` are the bytes by which its fullest device exceeds the limit, 0 where it fits; `seconds`
    are per microbatch, infinite where it was not simulated or cannot run; `depth` is the warm-up.
    """

    over: int
    seconds: float
    depth: Depth = DEPTHS[0]


class Evaluator:
    """Simulates partitions of one problem whose devices have one stage each.

    `spent` is the work: 1 for each simulation, and 1 for each `ACTIONS` of it.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.takes_warmup = schedule(problem.schedule).takes_warmup
        self.spent = 0.0
        self._base = lru_cache(maxsize=None)(unplaced_stage)
        self._stage_s: dict[object, float] = {}

    @property
    def priced(self) -> int:
        """Stages whose formulas were asked for."""
        return len(self._stage_s)

    def bound_s(self, partition: Partition) -> float:
        """What the simulator does not go below, by the formulas: seconds per microbatch."""
        stages = range(len(partition.stages))
        most_s = max(self._stage_bound_s(partition, s) for s in stages)
        return most_s / (self.problem.microbatches or 1)

    def _stage_bound_s(self, partition: Partition, s: int) -> float:
        """What stage s takes; most stages were there in another partition already."""
        stages = partition.stages[max(0, s - 1) : s + 2]
        own = partition.stages[s]
        key = (
            partition.family,
            (own.start, own.stop, own.recompute),
            *(lookup_key(stage.ranks) for stage in stages),
        )
        if key not in self._stage_s:
            self._stage_s[key] = stage_objective_s(partition, s, self.problem)
        return self._stage_s[key]

    def value(
        self, partition: Partition, depth: Depth = DEPTHS[0], beat_s: float = math.inf
    ) -> Value:
        """The value of a partition at its best warm-up.

        Where it is not below `beat_s` at the warm-up `depth`, at least `LIKELY`, or the deepest
        below it that fits, others are not tried.
        """
        plan = self.plan_of(partition)
        trials = WarmupTrials(plan)
        if self._over(plan, trials):
            return Value(self._over(plan, trials), math.inf)
        first = max(depth, LIKELY) if self.takes_warmup and len(trials.replicas) > 1 else DEPTHS[0]
        trial = self._at(trials, first)
        if first != DEPTHS[0] and trial is not None and beat_s <= trial.period_s < NEAR * beat_s:
            usual = self._at(trials, DEPTHS[0])
            trial = usual if usual is not None and usual.fits else trial
        if trial is None or trial.period_s < beat_s:
            trials.plan = replace(plan, predicted=_nothing_but(self.bound_s(partition)))
            trial, first = self._best(trials)
        self.spent += trials.executions + trials.actions / ACTIONS
        if trial is None:
            return Value(0, math.inf)
        over = 0 if trial.fits else max(1, self._over(plan, trials))
        return Value(over, trial.period_s, first)

    def _at(self, trials: WarmupTrials, depth: Depth) -> Trial | None:
        """The trial at the warm-up `depth`, or as deep below it as fits."""
        if trials.most is None or not self.takes_warmup:
            return trials.at(None)
        return trials.at(warmups_within(trials.most, trials.replicas, *depth))

    def _best(self, trials: WarmupTrials) -> tuple[Trial | None, Depth]:
        """The trial at the best warm-up, and the first depth that is no shallower."""
        usual = trials.at(None)
        if not self.takes_warmup:
            return usual, DEPTHS[0]
        best = best_trial(trials, usual)
        if best is None or best is usual:
            return best, DEPTHS[0]
        return best, _depth_of(trials.replicas, best.warmups)

    def _over(self, plan: Plan, trials: WarmupTrials) -> int:
        """Bytes by which the fullest device exceeds the limit at the shallowest warm-up."""
        limit = plan.memory_limit_bytes
        if limit is None or (self.takes_warmup and trials.most is not None):
            return 0
        return max(0, plan.peak_memory_bytes - limit)

    def plan_of(self, partition: Partition) -> Plan:
        """The plan as the simulator looks at it: without names, sends and formulas."""
        problem, M = self.problem, self.problem.microbatches
        replicas = Replicas(len(stage.ranks) for stage in partition.stages)
        stages = []
        for s, stage in enumerate(partition.stages):
            counts = counts_of(problem.schedule, s, replicas, M)
            recompute = problem.recomputes(stage)
            base = self._base(stage.start, stage.stop, recompute, counts, replicas[s], problem)
            tied_s = tied_exchange_s(partition, s, problem)
            stages.append(replace(base, ranks=list(stage.ranks), tied_exchange_s=tied_s))
        return plan_of(
            partition, problem, stages, list(self._tied(partition)), _nothing_but(math.inf), ""
        )

    def _tied(self, partition: Partition) -> Iterator[Flow]:
        """The exchanges of tied gradients, by which a plan under other conditions knows them."""
        for s in range(len(partition.stages)) if self.problem.chain.tied else ():
            for group, holders in tied_groups(partition, s, self.problem):
                yield Flow(
                    kind="tied",
                    stage=s,
                    holders=holders,
                    bytes=round(group.size),
                    per="iteration",
                    level="",
                )


def value_of(plan: Plan) -> Value:
    """The value of a simulated plan."""
    limit = plan.memory_limit_bytes
    over = 0 if limit is None else max(0, plan.peak_memory_bytes - limit)
    own = [stage.warmup for stage in plan.stages]
    found = plan.predicted.formula_period_s is not None
    depth = _depth_of([stage.replicas for stage in plan.stages], own) if found else DEPTHS[0]
    return Value(over, plan.predicted.period_s, depth)


def _depth_of(replicas: Sequence[int], own: Sequence[int]) -> Depth:
    """The first depth that is nowhere shallower than the warm-ups `own`."""
    for depth in DEPTHS:
        wanted = warmups(replicas, *depth)
        if all(w >= first for w, first in zip(wanted, own, strict=True)):
            return depth
    return DEPTHS[-1]


def _nothing_but(bound_s: float) -> Predicted:
    """A prediction that says nothing but what the period does not go below."""
    estimate = Estimate(period_s=bound_s, iteration_s=None, one_device_s=0.0, bound_by="", loads=[])
    return Predicted(
        period_s=bound_s,
        iteration_s=None,
        samples_per_s=0.0,
        bubble=0.0,
        speedup_over_one_device=0.0,
        bound_by="",
        estimate=estimate,
    )
