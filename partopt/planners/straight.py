"""The best pipeline without replication, exactly, under the physical cost of the topology.

One stage a device, as many stages as help:

    A(q, j) = min over s < j of max( A(q-1, s), side of the cut between ranks q-2 and q-1, C(s, j) )

The cut costs depend on the level at which two neighbouring ranks part. Ties: fewer stages, then the
later cut. Under an asynchronous schedule that is the period.

The iteration of a synchronous schedule is a pass, which all partitions share, plus X + U: X is the
largest all - pass of a stage, U the largest update. With all - pass in the place of side and C, the
recurrence gives the least X of stages whose updates are below a bound. The bound falls from
infinity: given a least X, only a U below `best - X` improves on the best.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from partopt.cost.kernels import exchanged_table, tied_of
from partopt.cost.links import exchange_s, side_s
from partopt.cost.period import objective_s, parts_of_iteration
from partopt.cost.problem import CONTIGUOUS, Decision, Partition, Problem, certify, consecutive
from partopt.documents.topology import Topology
from partopt.planners.placing import stage_count
from partopt.planners.split import Cuts, Inner, Row, split_off
from partopt.schedules import schedule

# N   layers
# M   microbatches of an iteration
# q   stages so far, so that the newest runs on rank q-1
# A   least bottleneck seconds of the first j layers in q stages

Table = NDArray[np.float64]


def plan(problem: Problem) -> Decision:
    """The partition into one-device stages with the least period, or iteration if synchronous.

    Exactly `problem.stages` of them where that is given.
    """
    recurrence = _Recurrence(problem)
    best, best_s = None, math.inf
    bound_s = limit_s = math.inf
    while bound_s > 0 and (boundaries := recurrence.solve(bound_s, limit_s)) is not None:
        partition = Partition(CONTIGUOUS, consecutive(boundaries))
        seconds = objective_s(partition, problem)
        if seconds < best_s:
            best, best_s = partition, seconds
        if problem.microbatches is None:
            break
        passing, rest, _ = parts_of_iteration(partition, problem)
        update = max(float(recurrence.updates[i, j]) for i, j in pairwise(boundaries))
        bound_s, limit_s = min(update, best_s - passing - rest), best_s - passing
    assert best is not None, "without a bound there is a partition"
    status, proof = (
        "optimal without replication",
        "the recurrence tries every cut on consecutive ranks",
    )
    return Decision(best, certify(best_s, best_s, status, proof))


class _Recurrence:
    """The recurrence of a problem, to be solved for several bounds on the updates."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.K = problem, stage_count(problem)
        self.updates = _update_table(problem)
        self._stages = cache(partial(_stage_table, problem))
        N, sides = problem.chain.layers, range(1, len(problem.topology.levels) + 1)
        # of a synchronous schedule the stages on both sides of a cut count it
        alone = problem.microbatches is None
        self._cuts = {
            k: Cuts.of(_at_cuts(side_s, problem, k) if alone else np.zeros(N + 1)) for k in sides
        }
        self._by_level = problem.serial_transfers or not alone  # what a stage takes

    def solve(self, bound_s: float, limit_s: float) -> list[int] | None:
        """The boundaries of the partition with the least bottleneck, and updates below `bound_s`.

        None where that bottleneck is not below `limit_s`.
        """
        row, N = self._fill(self.updates < bound_s, limit_s), self.problem.chain.layers
        counts = [self.K] if self.problem.stages is not None else range(1, self.K + 1)
        q = min(counts, key=lambda count: row.A[count, N])
        if row.A[q, N] == math.inf:
            return None
        boundaries = [N]
        for count in range(q, 0, -1):
            boundaries.insert(0, int(row.split[count, boundaries[0]]))
        return boundaries

    def _fill(self, allowed: NDArray[np.bool_], limit_s: float) -> Row:
        """Fill A below `limit_s` and its splits, of `allowed` stages, one after the other.

        Cuts are priced at the level at which their two ranks part.
        """
        problem, N = self.problem, self.problem.chain.layers
        row = Row.empty(self.K, N)

        @cache
        def inner_of(before: int, after: int) -> Inner:
            """What stages between cuts at these levels take."""
            seconds = np.where(allowed, self._stages(before, after), np.inf)
            return Inner.of(seconds, np.ones(seconds.shape, np.int32), np.zeros_like(seconds), 1.0)

        for q in range(1, self.K + 1):
            before, after = self._levels(q)
            inner = inner_of(before, after) if self._by_level else inner_of(1, 1)
            row.A[q] = limit_s
            if q == 1:
                row.A[1, 1:] = np.minimum(limit_s, inner.seconds[0, 1:])
                row.stages[1] = 1
            else:
                split_off(1, 0, q, inner, self._cuts[before], row)
            row.A[q, row.A[q] >= limit_s] = np.inf
            row.floor[q] = np.minimum.accumulate(row.A[q, ::-1])[::-1]
            problem.progress("straight", q, self.K)
        return row

    def _levels(self, q: int) -> tuple[int, int]:
        """The levels of the cuts before and after the stage on rank q-1; 1 where none counts."""
        topology = self.problem.topology
        before = topology.common_level(q - 2, q - 1) if q > 1 else 1
        after = topology.common_level(q - 1, q) if q < topology.devices else 1
        return before, after


def _at_cuts(
    cost_s: Callable[[float, range, int, Topology], float], problem: Problem, k: int
) -> Table:
    """What each cut costs either of its devices when it lies at level k, shape (N+1,)."""
    return np.array([cost_s(size, range(1), k, problem.topology) for size in problem.chain.a])


def _stage_table(problem: Problem, before: int, after: int) -> Table:
    """Seconds that a stage [s, j) between cuts at these levels needs, shape (N+1, N+1).

    Asynchronous: per microbatch, for compute and the transfers that it waits for, or the exchange
    of tied gradients if that is longer. Synchronous: for all microbatches, less those in which it
    passes one on.
    """
    chain, M = problem.chain, problem.microbatches
    busy = _between(chain.busy_prefix(problem.recompute))
    if problem.serial_transfers:
        busy += _at_cuts(exchange_s, problem, before)[:, None]
        busy += _at_cuts(exchange_s, problem, after)[None, :]
    if M is None:
        return np.triu(np.maximum(busy, _tied_table(problem)))
    entry = schedule(problem.schedule)
    if entry.one_at_a_time:
        return _update_table(problem)
    sides = np.maximum(
        _at_cuts(side_s, problem, before)[:, None], _at_cuts(side_s, problem, after)[None, :]
    )
    passed = _between(chain.busy_prefix(problem.recompute and not entry.recomputes))
    return np.triu(M * np.maximum(busy, sides) - passed)


def _update_table(problem: Problem) -> Table:
    """Seconds of a stage [s, j) after its last backward, shape (N+1, N+1).

    The exchange of tied gradients, and its share of the optimizer step; zeros if asynchronous.
    """
    if problem.microbatches is None:
        return np.zeros(2 * (problem.chain.layers + 1,))
    weights = problem.chain.parameter_bytes.table()
    total = weights[0, -1]
    step = weights / total * problem.chain.optimizer_s if total else weights
    return np.triu(step + _tied_table(problem))


def _tied_table(problem: Problem) -> Table:
    """Seconds for a stage [s, j) to exchange tied gradients with others, shape (N+1, N+1)."""
    N = problem.chain.layers
    return exchanged_table(tied_of(problem)) if problem.chain.tied else np.zeros((N + 1, N + 1))


def _between(prefix: Table) -> Table:
    """The sum over [s, j) of what `prefix` adds up, shape (N+1, N+1)."""
    return np.asarray(prefix[None, :] - prefix[:, None])
