"""torchgpipe's automatic balance: block partition by local search.

Bárány and Grinberg, "Block partitions of sequences", 2013.

From any partition into K blocks, as long as the largest block exceeds the smallest by more than the
largest layer, the smallest block that is nearest to the largest one takes a layer from that side.
At the end the two differ by no more than the largest layer. The paper lets blocks be empty, and its
search can cycle on layers of zero cost; here a block keeps its last layer, its neighbour gives
instead, and the search ends with the best partition seen where one comes again, or after a number
of moves.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from partopt.cost.problem import CONTIGUOUS, Decision, Partition, Problem, consecutive
from partopt.planners.placing import stage_count

_MOVES_PER_LAYER = 8  # the search settles in fewer than one move a layer on measured models


def plan(problem: Problem) -> Decision:
    """A balanced partition into K stages, one device a stage."""
    return Decision(
        Partition(CONTIGUOUS, consecutive(balance(problem.cell_costs(), stage_count(problem))))
    )


def balance(costs: Sequence[float] | NDArray[np.float64], K: int) -> list[int]:
    """The K+1 boundaries of a block partition of `costs` (K at most their number)."""
    prefix = np.concatenate([[0.0], np.cumsum(costs)])
    bounds = np.array([len(costs) * k // K for k in range(K + 1)])
    best, least, seen = bounds.copy(), np.inf, set[bytes]()
    for _ in range(_MOVES_PER_LAYER * len(costs) * K):
        if bounds.tobytes() in seen:
            break
        seen.add(bounds.tobytes())
        blocks = np.diff(prefix[bounds])
        spread = blocks.max() - blocks.min()
        if spread < least:
            best, least = bounds.copy(), spread
        if spread <= np.max(costs) or not _move(bounds, blocks):
            break
    return [int(bound) for bound in best]


def _move(bounds: NDArray[np.int64], blocks: NDArray[np.float64]) -> bool:
    """Give the nearest smallest block a layer from the side of the largest, in place.

    Returns False where no block between can give one.
    """
    p = int(blocks.argmax())
    smallest = np.flatnonzero(blocks == blocks.min())
    q = int(smallest[np.abs(smallest - p).argmin()])
    towards = 1 if p > q else -1
    giver = next(
        (h for h in range(q + towards, p + towards, towards) if bounds[h + 1] - bounds[h] > 1), None
    )
    if giver is None:
        return False
    if towards == 1:
        bounds[q + 1 : giver + 1] += 1
    else:
        bounds[giver + 1 : q + 1] -= 1
    return True
