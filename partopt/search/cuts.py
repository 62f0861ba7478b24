"""What partitions cannot go below, by closed forms that take microseconds; where to cut by them.

A search over partitions changes the replicas of a stage or two at a time; with the cuts where they
were, few such steps gain anything.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from partopt.cost.collectives import exposed
from partopt.cost.flight import in_flight, weight_versions
from partopt.cost.links import port_rate
from partopt.cost.memory import memory_table
from partopt.cost.problem import CONTIGUOUS, Partition, Problem
from partopt.schedules import schedule
from partopt.search.traffic import Traffic

# S, s     stages, and which one; r its replicas
# n        ranges that no stage may split; tables over the boundaries between them, [i, j]
# M        microbatches of an iteration
# C        compute seconds of a stage for one microbatch

LOOSE = 1.15  # times the least bottleneck: up to there less traffic is looked for
LIMIT = 160  # ranges: above, the tables take too long

Floats = NDArray[np.float64]


class Rates(NamedTuple):
    """What a stage on certain ranks has: devices, and seconds a byte of its exchanges.

    `before` and `after` are for what crosses its cuts, `slope` for its parameters; `latency` is
    that of an all-reduce. Its neighbours part from it at `levels`, 0 for none.
    """

    r: int
    levels: tuple[int, int]
    before: float
    after: float
    slope: float
    latency: float


class Table(NamedTuple):
    """Seconds of a stage [i, j): per microbatch, and those for which it keeps a single bus busy.

    `work` ends with the last microbatch of an iteration, and `gradients` are exchanged then.
    """

    seconds: Floats
    bus: Floats
    work: Floats
    gradients: Floats


class Tables:
    """Seconds of the stages of a problem, tabulated over all ranges of layers.

    They are per microbatch, and none that the simulator can go below: those of its devices, its
    ports and its all-reduces, of which a synchronous iteration has one, between the layers before
    the stage.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem, self.bounds = problem, problem.boundaries()
        self.able = len(self.bounds) <= LIMIT
        if not self.able:
            return
        chain, self.ranges = problem.chain, problem.coarsen().chain
        self.place = {bound: index for index, bound in enumerate(self.bounds)}
        self.compute = [
            (prefix[None, :] - prefix[:, None])
            for prefix in (chain.busy_prefix(again)[self.bounds] for again in (False, True))
        ]
        self.trained, self.a = self.ranges.trained_bytes.table, self.ranges.traffic
        self.forward = np.array([chain.forward_s(0, bound) for bound in self.bounds])
        self.backward = self.compute[0][0] - self.forward
        appear = chain.gradients_prefix(schedule(problem.schedule).split)[self.bounds]
        self.last = appear[None, :] - appear[:, None]  # of each range, while gradients appear
        levels = problem.topology.levels
        self.split = schedule(problem.schedule).split
        self.one_level, self.traffic = len(levels) == 1, Traffic(problem)
        # seconds in which a single bus carries a byte of a cut both ways; 0 where there is none
        self.bus = 1 / port_rate(1, problem.topology) if levels[0].bus and self.one_level else 0
        self._hold = lru_cache(maxsize=None)(self._hold_of)
        self._rates = lru_cache(maxsize=None)(self._rates_of)
        self._table = lru_cache(maxsize=None)(self._table_of)
        self._fits = lru_cache(maxsize=None)(self._fits_of)
        self.cuts = lru_cache(maxsize=None)(self._cuts)

    def bound_s(self, partition: Partition, beat_s: float = math.inf) -> float:
        """What the simulator does not go below.

        A bound that is no less than `beat_s` need not be the largest that is known.
        """
        stages, problem = partition.stages, self.problem
        tables = self._stages(
            tuple(stage.ranks for stage in stages),
            tuple(problem.recomputes(stage) for stage in stages),
            partition.family == CONTIGUOUS,
        )
        at = [(self.place[stage.start], self.place[stage.stop]) for stage in stages]
        most = max(table.seconds[each] for table, each in zip(tables, at, strict=True))
        if problem.microbatches is not None:
            passed_s = self.traffic.passed_s(partition)
            most = max(most, *map(self._iteration_s, tables, at, passed_s))
        busiest_s = 0.0 if most >= beat_s else self.traffic.busiest_s(partition)
        return max(float(most), busiest_s)

    def _iteration_s(self, table: Table, at: tuple[int, int], passed_s: float) -> float:
        """Seconds of an iteration by its microbatches, for a stage that messages take so long to.

        Its first replica works through its microbatches after the first has come, and its gradients
        go back.
        """
        back = 0.0 if self.split else self.backward[at[0]] + passed_s
        M = self.problem.microbatches or 1
        return float((passed_s + table.work[at] + max(table.gradients[at], back)) / M)

    def _stages(
        self, ranks: Sequence[Sequence[int]], recompute: Sequence[bool], consecutive: bool
    ) -> list[Table]:
        """The table of each stage."""
        problem, common = self.problem, self.problem.topology.common_level
        parting = [
            common(one[-1], other[0]) if consecutive else 0 for one, other in pairwise(ranks)
        ]
        held = [1] * len(ranks)
        if problem.memory_bytes is not None and not schedule(problem.schedule).takes_warmup:
            replicas = [len(own) for own in ranks]
            held = [
                in_flight(problem.schedule, s, replicas, problem.microbatches)
                for s in range(len(ranks))
            ]
        return [
            self._table(self._rates(own, *levels), held[s], recompute[s])
            for s, (own, levels) in enumerate(zip(ranks, pairwise([0, *parting, 0]), strict=True))
        ]

    def _cuts(self, ranks: Sequence[range], recompute: Sequence[bool]) -> list[list[int]]:
        """Boundaries of stages on these ranks, from 0 to N: those of the least bottleneck.

        On a single bus also those of the least traffic whose bottleneck is `LOOSE` times that. None
        where none fits.
        """
        tables = self._stages(ranks, recompute, consecutive=True)
        seconds = [table.seconds for table in tables]
        most_s, cuts = _least(seconds, np.maximum)
        if most_s == math.inf:
            return []
        found = [cuts]
        if self.bus:
            loose = [
                np.where(table.seconds <= LOOSE * most_s, table.bus, np.inf) for table in tables
            ]
            found.append(_least(loose, np.add)[1])
        return [[self.bounds[cut] for cut in cuts] for cuts in found]

    def _rates_of(self, own: Sequence[int], before: int, after: int) -> Rates:
        """The rates of a stage whose neighbours part from it at these levels, 0 for none."""
        reduced = self.problem.allreduce_over(own)
        return Rates(
            len(own),
            (before, after),
            self._side(own, before),
            self._side(own, after),
            reduced.slope,
            reduced.latency_s,
        )

    def _hold_of(self, k: int) -> Floats:
        """Seconds for which a message over each boundary holds its devices, which part at level k.

        Or above it; 0 for k = 0. Shape (n+1,).
        """
        network, count = self.problem.network, self.problem.messages[self.bounds]
        if k == 0 or not self.problem.messages_hold:
            return np.zeros(len(self.a))
        each = [
            count * network.hold[level] + network.waited[level] + self.a * network.hold_byte[level]
            for level in range(k - 1, len(network.hold))
        ]
        least: Floats = np.min(each, axis=0)
        return np.where(np.isfinite(least), least, 0.0)

    def _side(self, own: Sequence[int], k: int) -> float:
        """Seconds in which the ports of a stage carry a byte to a neighbour that parts at level k.

        Some messages may cross further levels: all ports from there on are taken to share them.
        """
        topology, rate = self.problem.topology, 0.0
        for level in range(k, len(topology.levels) + 1) if k else ():
            tier = topology.levels[level - 1]
            size = topology.group_size(level - (0 if tier.bus else 1))
            ports = len({rank // size for rank in own})
            rate += ports * port_rate(level, topology)
        return 1 / rate if rate else 0.0

    def _table_of(self, rates: Rates, held: int, recompute: bool) -> Table:
        """The table of a stage; infinite where i >= j, or it has no room."""
        problem, r, M = self.problem, rates.r, self.problem.microbatches
        compute, rounds = self.compute[recompute], r if M is None else M
        gradients = rates.slope * self.trained + rates.latency
        gradients = exposed(gradients, self.trained, self.last, problem.early_bytes)
        before, after = rates.before * self.a[:, None], rates.after * self.a[None, :]
        carried = np.maximum(before, after)
        if self.one_level:  # a port sends gradients back, activations on, and its ring
            carried = before + after + rates.slope * self.trained / rounds
        first, last = (self._hold(level) for level in rates.levels)
        held_s = compute + 2 * (first[:, None] + last[None, :])
        work = compute
        if M is None:
            together = compute + gradients if problem.blocking_allreduce else gradients
            busy = np.maximum(held_s, together) / r
        else:
            back = np.zeros(1) if self.split else self.backward[:, None]
            # its first message is before its work, and its last one behind it
            inside = np.maximum(-(-M // r) * compute, -(-M // r) * held_s - 2 * first[:, None])
            work = self.forward[:, None] + inside
            busy = (work + np.maximum(gradients, back)) / M
        seconds = np.where(self._fits(held, r, recompute), np.maximum(busy, carried), np.inf)
        bus = self.bus * self.a[:, None] + rates.slope * self.trained / rounds
        return Table(seconds, bus, work, gradients)

    def _fits_of(self, held: int, r: int, recompute: bool) -> NDArray[np.bool_]:
        """Where a stage [i, j) with r replicas has room with `held` microbatches in flight."""
        problem = self.problem
        limit = math.inf if problem.memory_bytes is None else problem.memory_bytes
        versions = weight_versions(problem.schedule, held)
        needs = memory_table(self.ranges, held, versions, problem.kept, r, recompute, self.split)
        return np.asarray((needs < math.inf) & (needs <= limit))


def _least(tables: Sequence[Floats], add: np.ufunc) -> tuple[float, list[int]]:
    """The least of what stages [i, j) `add` up to, one of each table in turn, and the boundaries.

    They are numbered from 0 to n; the seconds are infinite where there are none.
    """
    n = len(tables[0]) - 1
    best, choices = np.full(n + 1, np.inf), []
    best[0] = 0.0
    for table in tables:
        reached = add(best[:, None], table)
        choices.append(reached.argmin(axis=0))
        best = reached.min(axis=0)
    cuts = [n]
    for choice in reversed(choices):
        cuts.append(int(choice[cuts[-1]]))
    return float(best[n]), cuts[::-1]
