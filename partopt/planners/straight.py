"""The best pipeline without replication: a stage a device, as many stages as help, exactly, under
the physical cost of the topology.

    A(q, j) = min over s < j of max( A(q-1, s), side of the cut between ranks q-2 and q-1, C(s, j) )
The cut costs depend on the level at which two neighbouring ranks part. Ties: fewer stages, then the
later cut.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
from numpy.typing import NDArray

from partopt.cost.kernels import exchanged_table, tied_of
from partopt.cost.links import exchange_s, side_s
from partopt.cost.problem import CONTIGUOUS, Decision, Partition, Problem, certify, consecutive
from partopt.documents.topology import Topology
from partopt.planners.placing import stage_count
from partopt.planners.split import jumps, split_off

# N   layers
# q   stages so far, so that the newest runs on rank q-1
# A   least bottleneck seconds of the first j layers in q stages, shape (K+1, N+1)


def plan(problem: Problem) -> Decision:
    """The partition into one-device stages with the least period; exactly `problem.stages` of them
    where that is given.
    """
    K, N = stage_count(problem), problem.chain.layers
    sides = {k: _at_cuts(side_s, problem, k) for k in range(1, len(problem.topology.levels) + 1)}
    A = np.full((K + 1, N + 1), np.inf)
    split = np.zeros((K + 1, N + 1), np.int32)
    _fill(problem, sides, A, split)
    counts = [K] if problem.stages is not None else range(1, K + 1)
    q = min(counts, key=lambda count: A[count, N])
    boundaries = [N]
    for count in range(q, 0, -1):
        boundaries.insert(0, int(split[count, boundaries[0]]))
    status, proof = (
        "the least steady period without replication",
        "the recurrence tries every cut on consecutive ranks",
    )
    period_s = float(A[q, N])
    partition = Partition(CONTIGUOUS, consecutive(boundaries))
    return Decision(partition, certify(period_s, period_s, status, proof))


def _at_cuts(
    cost_s: Callable[[float, range, int, Topology], float], problem: Problem, k: int
) -> NDArray[np.float64]:
    """What each cut costs either of its devices when it lies at level k, shape (N+1,)."""
    return np.array([cost_s(size, range(1), k, problem.topology) for size in problem.chain.a])


def _fill(
    problem: Problem,
    sides: dict[int, NDArray[np.float64]],
    A: NDArray[np.float64],
    split: NDArray[np.int32],
) -> None:
    """Fill A and its splits, row by row; a cut is priced at the level at which its two ranks
    part.
    """
    topology, shape = problem.topology, A.shape
    ones = np.ones((shape[1], shape[1]), np.int32)
    none = np.zeros((shape[1], shape[1]))
    floor, stages, last = np.empty(shape), np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    jump = {k: jumps(cuts) for k, cuts in sides.items()}

    @cache
    def tables(before: int, after: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Seconds of a stage between cuts at these levels, and their minimum over all earlier
        starts.
        """
        inner = _stage_table(problem, before, after)
        return inner, np.minimum.accumulate(inner, axis=0)

    for q in range(1, shape[0]):
        before = topology.common_level(q - 2, q - 1) if q > 1 else 1
        after = topology.common_level(q - 1, q) if q < topology.devices else 1
        inner, inner_floor = tables(before, after) if problem.serial_transfers else tables(1, 1)
        if q == 1:
            A[1, 1:], stages[1] = inner[0, 1:], 1
        else:
            split_off(
                1,
                0,
                q,
                inner,
                inner_floor,
                ones,
                none,
                sides[before],
                jump[before],
                1.0,
                A,
                floor,
                stages,
                split,
                last,
            )
        floor[q] = np.minimum.accumulate(A[q, ::-1])[::-1]
        problem.progress("straight", q, shape[0] - 1)


def _stage_table(problem: Problem, before: int, after: int) -> NDArray[np.float64]:
    """Seconds per microbatch of one device with layers [s, j): compute and the transfers that it
    waits for, or tied gradients.

    Shape (N+1, N+1). A synchronous schedule exchanges gradients once an iteration, which paces
    nothing.
    """
    chain = problem.chain
    prefix = chain.busy_prefix(problem.recompute)
    table = prefix[None, :] - prefix[:, None]
    if problem.serial_transfers:
        table += (
            _at_cuts(exchange_s, problem, before)[:, None]
            + _at_cuts(exchange_s, problem, after)[None, :]
        )
    if problem.microbatches is None and chain.tied:
        table = np.maximum(table, exchanged_table(tied_of(problem)))
    return np.triu(table)
