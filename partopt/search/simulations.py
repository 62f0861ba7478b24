"""The simulations of a search: of many plans of one problem, what they share is looked up once."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import cast

from msgspec.structs import replace

from partopt.cost.plan import counted_stage, plan_of, tied_exchanges_s
from partopt.cost.problem import Assignment, Partition, Problem
from partopt.documents.plan import Plan
from partopt.documents.stage import Stage
from partopt.errors import PartoptError
from partopt.schedules import schedule
from partopt.schedules.entry import Counts, Replicas
from partopt.schedules.layout import STRAIGHT
from partopt.simulator.execution import Shared, check_actions, execute

ACTIONS = 1000  # of a simulation: as many take about as long as beginning one
ONE = Counts(0, 1, 1)  # of stages whose microbatches in flight the order tells


class Simulations:
    """Simulates plans of one problem.

    `spent` is 1 for each simulation, and 1 for each `ACTIONS` of it.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem, self.entry, self.spent = problem, schedule(problem.schedule), 0.0
        self._shared, self._frame = Shared(), cast(Plan | None, None)
        self._counts = lru_cache(maxsize=None)(self._counts_of)
        self._layers = lru_cache(maxsize=None)(counted_stage)
        self._stage = lru_cache(maxsize=None)(self._place)
        # the formulas approximate what others keep
        self._by_order = self.entry.split or self.entry.recomputes or self.entry.shape != STRAIGHT

    def seconds(self, partition: Partition, warmups: Sequence[int] | None = None) -> float:
        """Simulated seconds of a microbatch; infinite where the plan does not fit or run.

        `warmups` are forwards of each stage before its first backward, by default the schedule's.
        """
        self.spent += 1
        plan = self._plan(partition, warmups)
        try:
            check_actions(plan)
            execution = execute(plan, shared=self._shared)
        except PartoptError:  # it deadlocks, or is too long to simulate
            return math.inf
        self.spent += len(execution.order.kind) / ACTIONS
        limit = self.problem.memory_bytes
        if limit is None:
            return execution.period_s
        if self._by_order:
            most = int(execution.peak_memory_bytes.max())
        else:
            most = max(stage.memory.total_bytes for stage in plan.stages)
        return execution.period_s if most <= limit else math.inf

    def _plan(self, partition: Partition, warmups: Sequence[int] | None) -> Plan:
        """The plan as the simulator looks at it: without sends, all-reduces and formulas."""
        usual = self._counts(tuple(len(own.ranks) for own in partition.stages))
        counts = usual
        if warmups is not None:
            pairs = zip(warmups, usual, strict=True)
            counts = [Counts(own, own + 1, each.begun) for own, each in pairs]
        tied = tied_exchanges_s(partition, self.problem)
        stages = list(map(self._stage, partition.stages, counts, tied))
        if self._frame is None:
            self._frame = plan_of(partition, self.problem, stages, [], "")
        return replace(self._frame, stages=stages)

    def _counts_of(self, replicas: tuple[int, ...]) -> list[Counts]:
        """The counts of each stage at the schedule's own warm-up."""
        if self.entry.shape != STRAIGHT:
            return [ONE] * len(replicas)
        each, M = Replicas(replicas), self.problem.microbatches
        return [self.entry.counts(s, each, M) for s in range(len(replicas))]

    def _place(self, own: Assignment, counts: Counts, tied_s: float) -> Stage:
        """A stage on its ranks; what its layers say is the same on others."""
        alike = dataclasses.replace(own, ranks=range(len(own.ranks)))
        stage = self._layers(alike, counts, self.problem)
        return replace(stage, ranks=list(own.ranks), tied_exchange_s=tied_s)
