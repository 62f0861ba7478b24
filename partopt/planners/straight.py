"""The best pipeline without replication, exactly, under the physical cost of the topology.

One stage a device, as many stages as help:

    A(q, j) = min over s < j of max( A(q-1, s), side of the cut between ranks q-2 and q-1, C(s, j) )

The cut costs depend on the level at which two neighbouring ranks part. Ties: fewer stages, then the
later cut. Under an asynchronous schedule that is the period.

The iteration of a synchronous schedule is a pass, which all partitions share, plus X + U: X is the
largest all - pass of a stage, U the largest update. With all - pass in the place of side and C, the
recurrence gives the least X of stages whose updates are below a bound. The bound falls from
infinity: given a least X, only a U below `best - X` is better than the best.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
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
    best, best_s, bound_s = None, math.inf, math.inf
    updates = _update_table(problem)
    while (boundaries := _least_bottleneck(problem, updates, bound_s)) is not None:
        partition = Partition(CONTIGUOUS, consecutive(boundaries))
        seconds = objective_s(partition, problem)
        if seconds < best_s:
            best, best_s = partition, seconds
        if problem.microbatches is None:
            break
        passing, rest, _ = parts_of_iteration(partition, problem)
        update = max(float(updates[i, j]) for i, j in pairwise(boundaries))
        bound_s = min(update, best_s - passing - rest)
    assert best is not None, "without a bound there is a partition"
    status, proof = (
        "optimal without replication",
        "the recurrence tries every cut on consecutive ranks",
    )
    return Decision(best, certify(best_s, best_s, status, proof))


def _least_bottleneck(problem: Problem, updates: Table, bound_s: float) -> list[int] | None:
    """The boundaries of the partition with the least bottleneck, and updates below `bound_s`."""
    K, N = stage_count(problem), problem.chain.layers
    row = _fill(problem, K, np.where(updates < bound_s, 0.0, np.inf))
    counts = [K] if problem.stages is not None else range(1, K + 1)
    q = min(counts, key=lambda count: row.A[count, N])
    if row.A[q, N] == np.inf:
        return None
    boundaries = [N]
    for count in range(q, 0, -1):
        boundaries.insert(0, int(row.split[count, boundaries[0]]))
    return boundaries


def _at_cuts(
    cost_s: Callable[[float, range, int, Topology], float], problem: Problem, k: int
) -> Table:
    """What each cut costs either of its devices when it lies at level k, shape (N+1,)."""
    return np.array([cost_s(size, range(1), k, problem.topology) for size in problem.chain.a])


def _fill(problem: Problem, K: int, least: Table) -> Row:
    """Fill A and its splits, one stage after the other; no stage takes less than `least`.

    A cut is priced at the level at which its two ranks part: by itself, or of a synchronous
    schedule with the stages on both sides.
    """
    topology, N = problem.topology, problem.chain.layers
    asynchronous = problem.microbatches is None
    sides = range(1, len(topology.levels) + 1)
    costs = {k: _at_cuts(side_s, problem, k) if asynchronous else np.zeros(N + 1) for k in sides}
    cuts = {k: Cuts.of(costs[k]) for k in sides}
    depends_on_level = problem.serial_transfers or not asynchronous
    row = Row.empty(K, N)

    @cache
    def inner_of(before: int, after: int) -> Inner:
        """What stages between cuts at these levels take."""
        seconds = np.maximum(_stage_table(problem, before, after), least)
        return Inner.of(seconds, np.ones(least.shape, np.int32), np.zeros(least.shape), 1.0)

    for q in range(1, K + 1):
        before = topology.common_level(q - 2, q - 1) if q > 1 else 1
        after = topology.common_level(q - 1, q) if q < topology.devices else 1
        inner = inner_of(before, after) if depends_on_level else inner_of(1, 1)
        if q == 1:
            row.A[1, 1:], row.stages[1] = inner.seconds[0, 1:], 1
        else:
            split_off(1, 0, q, inner, cuts[before], row)
        row.floor[q] = np.minimum.accumulate(row.A[q, ::-1])[::-1]
        problem.progress("straight", q, K)
    return row


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

    The exchange of tied gradients, and its share of the optimizer step.
    """
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
