"""What the findings need to know of an execution."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from partopt.documents.plan import Plan
from partopt.documents.topology import Level
from partopt.simulator.change import Change
from partopt.simulator.execution import Execution
from partopt.simulator.ports import ports_of

NOTICED = 0.05  # of the time: smaller shares are within measurement error
BUSY = 0.9  # of the time of a port: above, a late message delays those behind it


@dataclass(frozen=True, eq=False)
class Case:
    """An execution, and the rank, the levels and the shares of time that findings are about."""

    execution: Execution

    @property
    def plan(self) -> Plan:
        """The plan that was executed."""
        return self.execution.plan

    @property
    def window_s(self) -> float:
        """Seconds of the iteration or, asynchronous, of one cycle of the steady state."""
        return self.execution.end_s - self.execution.start_s

    @cached_property
    def stretch(self) -> float:
        """Seconds per microbatch over those that the slowest device computes, at least 1.

        Whatever waits for a port could go faster by this factor.
        """
        return max(1.0, self.execution.period_s / self.plan.slowest_device_s)

    @cached_property
    def rank(self) -> int:
        """The working rank that waits least for others to compute.

        What delays this rank delays all ranks.
        """
        ranks = sorted(self.plan.stages_by_rank())
        return ranks[int(np.argmin(self.execution.shares.idle_s[ranks]))]

    @property
    def transfer_share(self) -> float:
        """Share of the time for which that rank waits for messages."""
        return float(self.execution.shares.transfer_s[self.rank]) / self.window_s

    @cached_property
    def overloaded(self) -> list[tuple[Level, float]]:
        """The cluster's levels with a port that is busy nearly all of the time, and the share."""
        levels = self.execution.work.topology.own_levels
        shares = [use.transfer_share + use.allreduce_share for use in self.execution.level_use]
        return [(level, share) for level, share in zip(levels, shares, strict=True) if share > BUSY]

    @cached_property
    def slowest_level(self) -> Level:
        """The cluster's level on which messages spend most of the time."""
        sent, topology = self.execution.timeline.transfers, self.execution.work.topology
        crossed = ports_of(topology).levels_between(sent.source, sent.destination)
        seconds = np.bincount(crossed - 1, sent.end - sent.start, minlength=len(topology.levels))
        return topology.own_levels[int(seconds.argmax())]


@dataclass(frozen=True)
class Point:
    """What a finding rests on, and the changes that may help, in the order of preference.

    `value` is in `unit`. One that is made `for_its_change` is nothing to point at without.
    """

    code: str
    severity: Literal["fault", "loss", "risk"]
    value: float
    unit: str
    text: str
    changes: Sequence[Change] = ()
    for_its_change: bool = False
