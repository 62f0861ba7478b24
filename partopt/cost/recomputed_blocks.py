"""Stages that make their first blocks again, one by one, in the backward.

Such a block keeps its input from the forward on. The backward of a stage goes through the layers
from the last to the first: each frees its stash, a block's stash is made again before that. What
comes before the first block, and behind the last, is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from partopt.cost.ranges import RangeMax, RangeSum

# [i, j)   the layers of a stage
# [p, q)   those of them that are made again
# stash    what layers keep for their backward
# T        what layers take beside the stash while their backward runs


class Remade(NamedTuple):
    """What making blocks again means for a stage; numbers, or arrays of many stages.

    `again_s` are the forwards that run once more; `stash_bytes` is kept of a microbatch from its
    forward on, `split_stash_bytes` more between the two parts of a backward; `transient_bytes` is
    taken beside the stash while a backward in one part runs.
    """

    again_s: Any
    stash_bytes: Any
    split_stash_bytes: Any
    transient_bytes: Any


class Blocks:
    """The blocks of a chain, between `bounds`; layers outside them are never made again.

    `forward_s` are seconds of the layers, shape (N,), `inputs` bytes that enter a layer, shape
    (N,), `stash` and `transient` the chain's.
    """

    def __init__(
        self,
        bounds: Sequence[int],
        forward_s: NDArray[np.float64],
        inputs: NDArray[np.float64],
        stash: RangeSum,
        transient: RangeMax,
    ) -> None:
        layers = np.arange(len(forward_s))
        block = np.searchsorted(bounds, layers, side="right") - 1  # of every layer
        inside = (layers >= bounds[0]) & (layers < bounds[-1])
        first = np.where(inside, np.array(bounds)[block], layers)
        entering = np.where(inside & (first == layers), inputs, 0.0)
        self.bounds, self.stash, self.transient = np.array(bounds), stash, transient
        self._again = np.concatenate([[0.0], np.cumsum(np.where(inside, forward_s, 0.0))])
        self._inputs = np.concatenate([[0.0], np.cumsum(entering)])
        # while a block is made again and goes back, beside the inputs of those before it
        alone = [stash(int(b), layer + 1) for layer, b in enumerate(first)]
        self._made = RangeMax(np.array(alone) + transient.values, RangeSum(entering))
        self._at = np.arange(len(forward_s) + 1)

    def over(self, boundaries: Sequence[int]) -> Blocks:
        """The same blocks for a chain whose layers are the ranges between `boundaries`."""
        coarse = object.__new__(Blocks)
        coarse.__dict__ |= self.__dict__ | {"_at": self._at[list(boundaries)]}
        return coarse

    @property
    def again_prefix(self) -> NDArray[np.float64]:
        """Forward seconds of the blocks before a cut, shape (N+1,)."""
        return self._again[self._at]

    def span(self, i: Any, j: Any, first: int | None) -> tuple[Any, Any]:
        """The layers [p, q) that stages [i, j) make again: of the `first` blocks, None of all."""
        bounds, last = self.bounds, len(self.bounds) - 1
        p = np.minimum(np.maximum(i, bounds[0]), j)
        number = np.minimum(np.searchsorted(bounds, p, side="right") - 1, last)
        end = bounds[last if first is None else np.minimum(number + first, last)]
        return p, np.maximum(p, np.minimum(end, j))

    def count(self, i: int, j: int, first: int | None = None) -> int:
        """How many blocks the stage [i, j) has at least a part of, of its `first` ones."""
        p, q = self.span(self._at[i], self._at[j], first)
        return int((self.bounds[:-1] < q).sum() - (self.bounds[1:] <= p).sum()) if q > p else 0

    def remade(self, i: Any, j: Any, first: int | None = None) -> Remade:
        """What stages [i, j) compute and hold that make their `first` blocks again, None all."""
        i, j = self._at[i], self._at[j]
        p, q = self.span(i, j, first)
        stash, T = self.stash.table, self.transient.table
        # the input of a stage is in a receive buffer
        inputs = np.where(q > p, self._inputs[q] - self._inputs[np.minimum(p + (p == i), q)], 0.0)
        before, behind = stash[i, p], stash[q, j]
        levels = (T[q, j], self._made.table[p, q] - behind, T[i, p] - behind - inputs)
        return Remade(
            self._again[q] - self._again[p],
            before + inputs + behind,
            np.maximum(0.0, stash[i, j] - before - behind),
            np.maximum.reduce(levels),
        )
