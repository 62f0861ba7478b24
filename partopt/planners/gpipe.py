"""GPipe's partition: K stages with the least variance of their costs, exactly.

Huang et al., NeurIPS 2019, section 2.2.

The mean of K stage costs is fixed, so the least variance is the least sum of squares:
    V(q, j) = min over i < j of V(q-1, i) + cost(i, j)^2
Squares of range sums satisfy the quadrangle inequality, so the best i rises with j, and each row is
filled by divide and conquer in N log N. Ties: the earlier cut.
"""

from __future__ import annotations

import numpy as np

from partopt.cost.compiled import compiled
from partopt.cost.problem import CONTIGUOUS, Decision, Partition, Problem, consecutive
from partopt.planners.placing import stage_count

# N   layers
# K   stages; row q holds the best of q stages
# V   least sum of squared stage costs of the first j layers


def plan(problem: Problem) -> Decision:
    """The contiguous partition into K stages of least variance, one device each."""
    prefix = np.concatenate([[0.0], np.cumsum(problem.cell_costs())])
    return Decision(
        Partition(CONTIGUOUS, consecutive(_boundaries(prefix, stage_count(problem)).tolist()))
    )


@compiled(allocates=True)
def _boundaries(prefix, K):  # type: ignore[no-untyped-def]
    """The K+1 boundaries of the partition, from prefix sums of the costs, shape (N+1,)."""
    N = len(prefix) - 1
    # every other stage needs a layer: row q is of j = q .. N-K+q, best[q, j - q]
    before, row = np.full(N + 1, np.inf), np.full(N + 1, np.inf)
    best = np.zeros((K + 1, N - K + 1), np.int32)
    before[0] = 0.0
    for q in range(1, K + 1):
        row[:] = np.inf
        _fill_row(prefix, before, row, best[q], q, N - K + q)
        before, row = row, before
    boundaries = np.empty(K + 1, np.int32)
    boundaries[K] = N
    for q in range(K, 0, -1):
        boundaries[q - 1] = best[q, boundaries[q] - q]
    return boundaries


@compiled(allocates=True)
def _fill_row(prefix, before, row, best, q, end):  # type: ignore[no-untyped-def]
    """Fill row q up to j = `end` from row q-1, `before`, by divide and conquer.

    The middle j of a range of j's comes first; its best i bounds those of both halves.
    """
    pending = [(q, end, q - 1, end - 1)]
    while len(pending) > 0:
        low, high, first, last = pending.pop()
        if low > high:
            continue
        j = (low + high) // 2
        for i in range(first, min(last, j - 1) + 1):
            cost = prefix[j] - prefix[i]
            squares = before[i] + cost * cost
            if squares < row[j]:
                row[j], best[j - q] = squares, i
        pending.append((low, j - 1, first, best[j - q]))
        pending.append((j + 1, high, best[j - q], last))
