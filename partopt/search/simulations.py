"""The simulations of a search: many plans of one problem, in numbers.

What `partopt.simulator.execution.execute` says of a plan is found without making it: rows of stages
are looked up by their layers and replicas, and where an iteration repeats itself a part of it is
enough.

    S   stages; r   replicas of one
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from partopt.cost.memory import parts_of
from partopt.cost.pricing import sum_layers, tied_exchanges_s
from partopt.cost.problem import Assignment, Partition, Problem
from partopt.errors import PartoptError
from partopt.schedules import ACTION_LIMIT
from partopt.schedules.entry import Counts, Replicas
from partopt.schedules.placement import STRAIGHT
from partopt.simulator.kernel import Run
from partopt.simulator.memory import base_bytes, peaks, stash_steps
from partopt.simulator.runs import NumberedPlan, Runs
from partopt.simulator.work import Links

ACTIONS = 1000  # of a simulation: as many take about as long as beginning one
FEWER = 0.6  # of the microbatches: where more are needed to see how they go on, all are simulated


class Simulations:
    """Simulates plans of one problem.

    `spent` is 1 for every simulation, and 1 for every `ACTIONS` of it.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem, self.spent = problem, 0.0
        key = "links", id(problem.topology), problem.exchange
        links: Links = problem.known.once(key, lambda: Links(problem.exchange_topology))
        self.runs = Runs(problem, problem.limited_topology, problem.kept, links)
        self.entry = self.runs.entry
        self._rows = dict[tuple[object, ...], NDArray[np.float64]]()
        self._counts = lru_cache(maxsize=None)(self._counts_of)
        self._gathers = problem.exchange.gathered + problem.exchange.scattered > 0

    def seconds(
        self,
        partition: Partition,
        warmups: Sequence[int] | None = None,
        allowed_s: float = math.inf,
    ) -> float:
        """Simulated seconds of a microbatch; infinite where the plan does not fit or run.

        `allowed_s` where it is seen on the way that they are no less. `warmups` are forwards of
        every stage before its first backward, by default the schedule's.
        """
        self.spent += 1
        try:
            plan = self._number(partition, warmups)
            run, period_s = self._execute(plan, allowed_s * plan.pipeline.copies)
        except PartoptError:  # the schedule cannot run it
            return math.inf
        if run is not None and run.is_late:
            return allowed_s
        period_s /= plan.pipeline.copies
        if run is None:
            return period_s
        limit = self.problem.memory_bytes
        return period_s if limit is None or self._needs(plan, run) <= limit else math.inf

    def _number(self, partition: Partition, warmups: Sequence[int] | None) -> NumberedPlan:
        """The plan in numbers; PartoptError where its replicas are unequal and may not be."""
        stages = partition.stages
        every = (stage.ranks for stage in stages)
        ranks = tuple(group if isinstance(group, range) else tuple(group) for group in every)
        counts = self._counts(tuple(map(len, ranks)))
        if warmups is not None:
            pairs = zip(warmups, counts, strict=True)
            counts = [Counts(warmup, warmup + 1, usual.begun) for warmup, usual in pairs]
        rows = [self._row(*pair) for pair in zip(stages, ranks, strict=True)]
        tied_s = tied_exchanges_s(partition, self.problem)
        return self.runs.number(self.runs.pipeline(ranks), rows, counts, tied_s)

    def _counts_of(self, replicas: tuple[int, ...]) -> list[Counts]:
        """The counts of every stage at the schedule's warm-up."""
        if self.entry.shape != STRAIGHT:
            return [Counts(0, 1, 1)] * len(replicas)  # the order tells what is in flight
        stage_replicas, M = Replicas(replicas), self.problem.microbatches
        return [self.entry.counts(s, stage_replicas, M) for s in range(len(replicas))]

    def _row(self, stage: Assignment, ranks: Sequence[int]) -> NDArray[np.float64]:
        """The row of a stage, made once."""
        lie = ranks if self._gathers else len(ranks)
        key = stage.start, stage.stop, stage.recompute, lie
        if key not in self._rows:
            self._rows[key] = self.runs.row(sum_layers(stage, self.problem))
        return self._rows[key]

    def _execute(self, plan: NumberedPlan, allowed_s: float) -> tuple[Run | None, float]:
        """The run, None where it deadlocks or is too long, and the seconds of a microbatch.

        A run that is seen to take no less than `allowed_s` is broken off.
        """
        runs, copies, count = self.runs, plan.pipeline.copies, self.runs.first_count(plan)
        if 2 * len(plan.passing) * count > ACTION_LIMIT:
            return None, math.inf
        for fewer in self._fewer(plan):
            run = runs.run(plan, fewer, count, allowed_s)
            steady = None if run.is_late or run.is_stuck else runs.steady(plan, run, fewer)
            left = count - fewer  # which take as long as the cycle that was seen
            if run.is_late or (steady and steady.settled and left % steady.microbatches == 0):
                self.spent += len(run.actions.kind) * copies * count / fewer / ACTIONS
                more_s = left * steady.period_s if steady else 0.0
                return run, (run.makespan_s + more_s) / count
        run, steady = runs.settle(plan, allowed_s=allowed_s)
        if run.is_stuck and not run.is_late:
            return None, math.inf
        self.spent += len(run.actions.kind) * copies / ACTIONS
        return run, steady.period_s if steady else run.makespan_s / count

    def _fewer(self, plan: NumberedPlan) -> Iterator[int]:
        """Numbers of microbatches that may show how an iteration goes on, at most `FEWER` of all.

        They are whole cycles of all replicas fewer.
        """
        M, lcm = self.runs.microbatches(plan), math.lcm(*plan.passing)
        if M is None or not self.entry.repeats:
            return
        enough = 5 * (self.runs.flying(plan, M) + 2 * max(plan.passing)) + 8 * lcm
        for least in (enough, 3 * enough):
            fewer = M - (M - least) // (2 * lcm) * 2 * lcm
            if fewer <= FEWER * M:
                yield fewer

    def _needs(self, plan: NumberedPlan, run: Run) -> int:
        """The most bytes that a device needs.

        By the order, where the formulas approximate what it keeps.
        """
        numbers, entry, whole = plan.numbers, self.entry, plan.numbers.whole > 0
        counts = np.array([count[1:] for count in plan.counts]).T
        parts = parts_of(numbers, whole, (*counts,), plan.replicas, self.problem.kept, entry)
        if not (entry.split or entry.recomputes or entry.shape != STRAIGHT):
            return int((sum(parts.values()) + numbers.transient_bytes).max())
        del parts["activations_bytes"]
        beside = numbers.transient_bytes, numbers.stash_bytes, numbers.split_stash_bytes
        sizes = np.array([sum(parts.values()), *beside]).astype(np.int64)
        throughout, transient, stash, parting = sizes
        _, _, links, groups = plan.pipeline
        given = groups.rank_of, plan.passing, throughout, transient
        base = base_bytes(*given, links.ports.devices)
        stashed = peaks(run.order, stash_steps(run.order, stash, parting, whole))
        return int((base + stashed).max())
