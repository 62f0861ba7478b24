"""The pace of partitions by short runs, to compare many of them.

Where memory is short, a partition is simulated at up to a dozen warm-ups, each, asynchronous, until
it settles or for thousands of microbatches. A few rounds of its largest stage, at a warm-up that is
likely to be near the best, order partitions nearly as that does, in much less time; of a
synchronous one they are an iteration. They are for comparison alone: the first rounds of a plan are
not its steady state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

from partopt.cost.problem import Partition
from partopt.documents.plan import Plan
from partopt.errors import PartoptError
from partopt.schedules import schedule
from partopt.search.evaluate import ACTIONS, LIKELY, Evaluator
from partopt.search.turns import warmups_in_turns
from partopt.search.warmup import DEPTHS, Depth, WarmupTrials, warmups_that_fit, warmups_within
from partopt.simulator.execution import execute
from partopt.simulator.restate import with_conditions
from partopt.simulator.steady import microbatches_to_tell

Way = Callable[[Plan, Sequence[int]], Sequence[int] | None]
ASYNCHRONOUS: tuple[Way, ...] = (warmups_that_fit, warmups_in_turns)  # mostly one is near the best


def _warmups_at(plan: Plan, most: Sequence[int], depth: Depth) -> list[int]:
    """The warm-up `depth`, or as deep below it as fits."""
    return warmups_within(most, [stage.replicas for stage in plan.stages], *depth)


def _own(plan: Plan, most: Sequence[int]) -> None:
    """The only warm-up that the schedule has."""


class ShortRuns:
    """Runs partitions of the problem of an `evaluator`; `spent` is the work, as it counts that.

    There are so many `ways` to warm up, of which the first `likely` ones are mostly near the best.
    """

    def __init__(self, evaluator: Evaluator) -> None:
        self.evaluator = evaluator
        self.spent = 0.0
        entry = schedule(evaluator.problem.schedule)
        self.asynchronous = entry.asynchronous
        self._ways: Sequence[Way] = ASYNCHRONOUS
        if not self.asynchronous:
            depths = (LIKELY, *DEPTHS[:3]) if entry.takes_warmup else ()
            self._ways = [partial(_warmups_at, depth=depth) for depth in depths] or [_own]
        self.likely = len(self._ways) if self.asynchronous else 1

    @property
    def ways(self) -> int:
        """How many warm-ups there are to choose from."""
        return len(self._ways)

    def best_s(self, partition: Partition) -> float:
        """The least of `period_s` at each way to warm up."""
        return min(self.period_s(partition, way) for way in range(self.ways))

    def period_s(self, partition: Partition, way: int, times: int = 1) -> float:
        """Seconds per microbatch, about, at the warm-up of this number.

        Asynchronous, they are the mean pace over the second half of as few microbatches as tell it,
        or of so many `times` as many; infinite where the partition does not fit or deadlocks.
        """
        plan = self.evaluator.plan_of(partition)
        self.spent += 1
        trials = WarmupTrials(plan)
        if trials.most is None:
            return math.inf
        own = self._ways[way](plan, trials.most)
        if not self.asynchronous:
            trial = trials.at(own)
            self.spent += trials.actions / ACTIONS
            return trial.period_s if trial is not None and trial.fits else math.inf
        assert own is not None
        replicas = [stage.replicas for stage in plan.stages]
        count = times * microbatches_to_tell((own[0] + 1) * replicas[0], replicas)
        try:
            execution = execute(with_conditions(plan, warmups=own), count)
        except PartoptError:
            return math.inf
        self.spent += len(execution.order.kind) / ACTIONS
        return execution.period_s
