"""The pace of asynchronous partitions by short runs, to compare many of them.

Where memory is short, a partition is simulated at up to a dozen warm-ups, each until it settles or
for thousands of microbatches. A few rounds of its largest stage, at the warm-up that is likely to
be near the best, order partitions nearly as that does, in much less time. They are for comparison
alone: the first rounds of a plan are not its steady state.
"""

from __future__ import annotations

import math

from partopt.cost.problem import Partition
from partopt.errors import PartoptError
from partopt.search.evaluate import ACTIONS, Evaluator
from partopt.search.turns import warmups_in_turns
from partopt.search.warmup import WarmupTrials, warmups_that_fit
from partopt.simulator.execution import execute
from partopt.simulator.restate import with_conditions
from partopt.simulator.steady import microbatches_to_tell

WARMUPS = (warmups_that_fit, warmups_in_turns)  # one of them is most often near the best


class ShortRuns:
    """Runs partitions of the problem of an `evaluator`; `spent` is the work, as it counts that."""

    def __init__(self, evaluator: Evaluator) -> None:
        self.evaluator = evaluator
        self.spent = 0.0

    def best_s(self, partition: Partition) -> float:
        """The least of `period_s` at each of `WARMUPS`."""
        return min(self.period_s(partition, way) for way in range(len(WARMUPS)))

    def period_s(self, partition: Partition, way: int, times: int = 1) -> float:
        """Seconds per microbatch, about, at the warm-up of this number in `WARMUPS`.

        They are the mean pace over the second half of as few microbatches as tell it, or of so many
        `times` as many; infinite where the partition does not fit or deadlocks.
        """
        plan = self.evaluator.plan_of(partition)
        self.spent += 1
        most = WarmupTrials(plan).most
        if most is None:
            return math.inf
        own = WARMUPS[way](plan, most)
        replicas = [stage.replicas for stage in plan.stages]
        count = times * microbatches_to_tell((own[0] + 1) * replicas[0], replicas)
        try:
            execution = execute(with_conditions(plan, warmups=own), count)
        except PartoptError:
            return math.inf
        self.spent += len(execution.order.kind) / ACTIONS
        return execution.period_s
