"""The best pipeline without replication, exactly, under the physical cost of the topology.

One stage a device, as many stages as help:

    A(q, j) = min over s < j of max( A(q-1, s), T(q, s, j) )

T is the largest load of stage [s, j) on rank q-1 (`partopt.cost.period.stage_loads`), which depends
on the levels at which that rank parts from its neighbours. Ties: fewer stages, then the later cut.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

from partopt.cost.compiled import compiled
from partopt.cost.kernels import (
    exchanged_table,
    layers_of,
    most_in_flight,
    replica_s,
    stage_cost,
    tied_of,
)
from partopt.cost.links import Network, network_of, wait_s
from partopt.cost.problem import CONTIGUOUS, Decision, Partition, Problem, certify, consecutive
from partopt.planners.placing import stage_count
from partopt.planners.split import Cuts, Inner, Row, split_off

# N   layers
# q   stages so far, so that the newest runs on rank q-1
# A   least bottleneck seconds of the first j layers in q stages


def plan(problem: Problem) -> Decision:
    """The partition into one-device stages with the least period.

    Exactly `problem.stages` of them where that is given.
    """
    K, N = stage_count(problem), problem.chain.layers
    row = _fill(problem, K)
    counts = [K] if problem.stages is not None else range(1, K + 1)
    q = min(counts, key=lambda count: row.A[count, N])
    boundaries = [N]
    for count in range(q, 0, -1):
        boundaries.insert(0, int(row.split[count, boundaries[0]]))
    status, proof = (
        "optimal without replication",
        "the recurrence tries every cut on consecutive ranks",
    )
    period_s = float(row.A[q, N])
    partition = Partition(CONTIGUOUS, consecutive(boundaries))
    return Decision(partition, certify(period_s, period_s, status, proof))


def _fill(problem: Problem, K: int) -> Row:
    """Fill A and its splits, one stage after the other."""
    topology, N = problem.topology, problem.chain.layers
    network, alone = network_of(topology), _alone_s(problem)
    rates = np.where(network.above > 0, network.above, np.inf)  # no ports where no devices part
    row = Row.empty(K, N)

    @cache
    def inner_of(before: int, after: int) -> Inner:
        """What stages between cuts at these levels take."""
        shape = (N + 1, N + 1)
        sides = [problem.chain.a / rates[k - 1] for k in (before, after)]
        ports = np.add.outer(*sides) if before == after else np.maximum.outer(*sides)
        seconds = np.triu(np.maximum(alone, ports))
        if problem.serial_transfers:
            seconds = np.maximum(seconds, _waiting_s(problem, network, before, after))
        return Inner.of(seconds, np.ones(shape, np.int32), np.zeros(shape), 1.0)

    for q in range(1, K + 1):
        before = topology.common_level(q - 2, q - 1) if q > 1 else 1
        after = topology.common_level(q - 1, q) if q < topology.devices else 1
        inner = inner_of(before, after)
        if q == 1:
            row.A[1, 1:], row.stages[1] = inner.seconds[0, 1:], 1
        else:
            split_off(1, 0, q, inner, Cuts.of(problem.chain.a / rates[before - 1]), row)
        row.floor[q] = np.minimum.accumulate(row.A[q, ::-1])[::-1]
        problem.progress("straight", q, K)
    return row


def _alone_s(problem: Problem) -> NDArray[np.float64]:
    """Seconds per microbatch of one device with layers [s, j), its cuts apart, shape (N+1, N+1).

    A synchronous schedule exchanges gradients once an iteration, which paces nothing.
    """
    chain = problem.chain
    prefix = chain.busy_prefix(problem.recompute)
    table = prefix[None, :] - prefix[:, None]
    if problem.microbatches is None and chain.tied:
        exchange = exchanged_table(tied_of(problem))
        table = table + exchange if problem.blocking_allreduce else np.maximum(table, exchange)
    if problem.microbatches is None and problem.memory_bytes is not None:
        _hold(layers_of(problem), int(problem.recompute), table)
    return np.triu(table)


@compiled()
def _hold(layers, mode, table):  # type: ignore[no-untyped-def]
    """Raise the table to what the microbatches that fit allow."""
    N = len(layers.cuts) - 1
    for s in range(N):
        for j in range(s + 1, N + 1):
            stage = stage_cost(layers, s, j, mode)
            F = most_in_flight(layers, stage)
            if F > 0:
                table[s, j] = max(table[s, j], replica_s(stage, F))


def _waiting_s(problem: Problem, network: Network, before: int, after: int) -> NDArray[np.float64]:
    """Seconds per microbatch of one device that waits for its messages, shape (N+1, N+1).

    Its cuts lie at levels `before` and `after`.
    """
    prefix, sizes = problem.chain.busy_prefix(problem.recompute), problem.chain.a
    waits = [np.array([wait_s(network, size, k) for size in sizes]) for k in (before, after)]
    for wait in waits:
        wait[[0, -1]] = 0.0
    return np.triu(prefix[None, :] - prefix[:, None] + 2 * np.add.outer(*waits))
