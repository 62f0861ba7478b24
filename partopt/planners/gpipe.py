"""GPipe's partition: K stages with the least variance of their costs, exactly.

Huang et al., NeurIPS 2019, section 2.2.

The mean of K stage costs is fixed, so the least variance is the least sum of squares:
    V(q, j) = min over i < j of V(q-1, i) + cost(i, j)^2
Squares of range sums satisfy the quadrangle inequality, so the best i rises with j, and a row is
filled in N log N steps. Ties: the earlier cut.
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
    """The contiguous partition into K stages of least variance, one device a stage."""
    prefix, K = np.concatenate([[0.0], np.cumsum(problem.cell_costs())]), stage_count(problem)
    # every other stage needs a layer: row q is of j = q .. N-K+q, and its column c of j = q + c
    row, before = np.full((2, len(prefix) - K), np.inf)
    best = np.zeros((K + 1, len(row)), np.int32)
    before[0] = 0.0
    for q in range(1, K + 1):
        fill_row(prefix[q - 1 :], before, row, best[q])
        row, before = before, row
    boundaries = [len(prefix) - 1]
    for q in range(K, 0, -1):
        boundaries.insert(0, q - 1 + int(best[q, boundaries[0] - q]))
    return Decision(Partition(CONTIGUOUS, consecutive(boundaries)))


@compiled()
def fill_row(prefix, before, row, best):
    """Fill row q from row q-1, `before`; `prefix` are the prefix sums from layer q-1 on.

    Every second column comes after those between which it lies: their best i bound its best i.
    """
    step = 1
    while step < len(row):
        step *= 2
    while step > 0:
        for c in range(step - 1, len(row), 2 * step):
            first = best[c - step] if c >= step else 0
            last = best[c + step] if c + step < len(row) else c
            row[c] = np.inf
            for i in range(first, min(last, c) + 1):
                cost = prefix[c + 1] - prefix[i]
                squares = before[i] + cost * cost
                if squares < row[c]:
                    row[c], best[c] = squares, i
        step //= 2
