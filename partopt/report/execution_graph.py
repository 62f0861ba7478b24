"""What every rank does as a graph: computations, messages and collectives, and what each waits for.

There are no times of the network in it: whoever executes it has a network of their own.
"""

from __future__ import annotations

from collections import defaultdict
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from partopt.cost.sharding import exchange_by
from partopt.documents.stage import Flow
from partopt.errors import PartoptError
from partopt.report.rank_nodes import Action, Node, RankNodes
from partopt.schedules import SCHEDULES
from partopt.simulator.execution import Execution
from partopt.simulator.work import action_seconds


class ExecutionGraph:
    """The nodes of every rank of an execution, and the groups of ranks that exchange.

    PartoptError where the ranks of a collective do not do it equally often.
    """

    def __init__(self, execution: Execution) -> None:
        self.execution, self.plan, self.work = execution, execution.plan, execution.work
        self.asynchronous = execution.steady is not None
        self.crossing = self.work.crossing.tolist()
        self.flows: dict[int, list[Flow]] = defaultdict(list)
        for flow in self.plan.communication:
            if flow.stage is not None:
                self.flows[flow.stage].append(flow)
        self._check_rounds()

    def _check_rounds(self) -> None:
        """Raise PartoptError where the ranks of a collective do not do it equally often."""
        for stages in self.holders.values():
            counts = {self.plan.stages[s].replicas for s in stages}
            if self.asynchronous and len(counts) > 1:
                raise PartoptError(
                    "stages with unequal replicas exchange tied parameters: their rounds differ, "
                    "and an execution graph has no exchange for that",
                    "plan with `tied=together` or `replication=uniform`",
                    code="unlike-rounds",
                )
        M = self.execution.microbatches
        for s, flows in self.flows.items():
            r = self.plan.stages[s].replicas
            if M % r and any(flow.per == "microbatch" for flow in flows):
                raise PartoptError(
                    f"the {r} replicas of stage {s} gather parameters for every microbatch, and "
                    f"get unequal numbers of {M}",
                    f"use a multiple of {r} microbatches",
                    code="microbatches-not-divisible",
                    microbatches=M,
                    replicas=r,
                )

    @cached_property
    def holders(self) -> dict[tuple[str, ...], list[int]]:
        """The stages that hold tied parameters, by their names."""
        found: dict[tuple[str, ...], list[int]] = defaultdict(list)
        for s, flows in sorted(self.flows.items()):
            for flow in flows:
                if flow.kind == "tied":
                    found[tuple(flow.parameters)].append(s)
        return dict(found)

    @cached_property
    def groups(self) -> dict[tuple[int, ...], int]:
        """The groups of ranks that exchange, numbered from 1."""
        found = [
            self.members(flow)
            for flows in self.flows.values()
            for flow in flows
            if len(self.members(flow)) > 1
        ]
        return {ranks: number for number, ranks in enumerate(dict.fromkeys(found), start=1)}

    def members(self, flow: Flow) -> tuple[int, ...]:
        """The ranks that take part in a collective."""
        assert flow.stage is not None
        stages = self.holders[tuple(flow.parameters)] if flow.kind == "tied" else [flow.stage]
        return tuple(sorted({rank for s in stages for rank in self.plan.stages[s].ranks}))

    @cached_property
    def actions(self) -> list[Action]:
        """All actions, those of each rank in turn."""
        order, work = self.execution.order, self.work
        seconds = self._seconds[order.kind, order.stage]
        if len(work.scale):
            seconds = seconds * work.scale
        handling = work.handling_s(order)
        if len(handling):
            seconds = seconds + handling
        start = self.execution.timeline.start
        columns = (order.kind, order.stage, order.microbatch, order.joined, start, seconds)
        return [Action(*each) for each in zip(*(each.tolist() for each in columns), strict=True)]

    @cached_property
    def _seconds(self) -> NDArray[np.float64]:
        """Seconds of each kind of action on each stage, without gathers and scatters beside it."""
        exchange = exchange_by(self.plan)
        if not exchange.gathered and not exchange.scattered:
            return self.work.seconds
        entry = SCHEDULES.get(self.plan.schedule)
        apart = entry is not None and entry.recomputes
        columns = [
            action_seconds(stage, self.plan.topology, exchange, apart, gather=0.0, scatter=0.0)
            for stage in self.plan.stages
        ]
        return np.array(columns).T

    def nodes(self, rank: int) -> list[Node]:
        """What a rank does, in the order of the nodes' numbers; none of an idle rank."""
        first, end = self.execution.order.rows[rank : rank + 2].tolist()
        return RankNodes(self, rank, self.actions[first:end]).run()
