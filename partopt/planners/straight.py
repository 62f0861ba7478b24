"""The best pipeline without replication, exactly, under the physical cost of the topology.

One stage a device, as many stages as help:

    A(q, j) = min over s < j of max( A(q-1, s), side of the cut between ranks q-2 and q-1, C(s, j) )

The cut costs depend on the level at which two neighbouring ranks part. Ties: fewer stages, then the
later cut.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

from partopt.cost.kernels import exchanged_table, tied_of
from partopt.cost.links import network_of, port_rate, wait_s
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
    return Decision(
        partition,
        certify(
            period_s,
            period_s,
            "plans of one device a stage, as the formulas price them",
            proof,
            status,
        ),
    )


def _waits_s(problem: Problem, k: int) -> NDArray[np.float64]:
    """Seconds of a message over each cut when it lies at level k or above, shape (N+1,)."""
    network = network_of(problem.topology)
    waits = np.array([wait_s(network, size, k) for size in problem.chain.a])
    waits[[0, -1]] = 0.0
    return waits


def _fill(problem: Problem, K: int) -> Row:
    """Fill A and its splits, one stage after the other.

    A cut is priced at the level at which its two ranks part.
    """
    topology, N = problem.topology, problem.chain.layers
    sides = range(1, len(topology.levels) + 1)
    cuts = {k: Cuts.of(problem.chain.a / port_rate(k, topology)) for k in sides}
    row = Row.empty(K, N)

    @cache
    def inner_of(before: int, after: int) -> Inner:
        """What stages between cuts at these levels take."""
        shape = (N + 1, N + 1)
        seconds = _stage_table(problem, before, after)
        return Inner.of(seconds, np.ones(shape, np.int32), np.zeros(shape), 1.0)

    for q in range(1, K + 1):
        before = topology.common_level(q - 2, q - 1) if q > 1 else 1
        after = topology.common_level(q - 1, q) if q < topology.devices else 1
        inner = inner_of(before, after) if problem.serial_transfers else inner_of(1, 1)
        if q == 1:
            row.A[1, 1:], row.stages[1] = inner.seconds[0, 1:], 1
        else:
            split_off(1, 0, q, inner, cuts[before], row)
        row.floor[q] = np.minimum.accumulate(row.A[q, ::-1])[::-1]
        problem.progress("straight", q, K)
    return row


def _stage_table(problem: Problem, before: int, after: int) -> NDArray[np.float64]:
    """Seconds per microbatch of one device with layers [s, j), shape (N+1, N+1).

    Compute and the transfers that it waits for, or the exchange of tied gradients if that is
    longer. A synchronous schedule exchanges gradients once an iteration, which paces nothing.
    """
    chain = problem.chain
    prefix = chain.busy_prefix(problem.recompute)
    table = prefix[None, :] - prefix[:, None]
    if problem.serial_transfers:
        table += 2 * _waits_s(problem, before)[:, None] + 2 * _waits_s(problem, after)[None, :]
    if problem.microbatches is None and chain.tied:
        table = np.maximum(table, exchanged_table(tied_of(problem)))
    return np.triu(table)
