"""Sums and maxima over ranges of layers.

What layers share counts once in a sum, for a range that holds any of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

# N        layers
# [i, j)   a range of layers, 0 <= i <= j <= N


class Group(NamedTuple):
    """`size` units shared by the layers `members`.

    A tied parameter, or a tensor that two layers both keep for their backward.
    """

    members: Sequence[int]
    size: float
    names: Sequence[str] = ()


class RangeSum:
    """`sums(i, j)` = the `values` of the layers in [i, j) plus every group that they touch, once.

    A group is added to all its members and taken back once for every pair of neighbouring
    members in the range, so that a range is a difference of two prefix sums less the pairs that lie
    in it.
    """

    def __init__(
        self, values: Sequence[float] | NDArray[np.float64], groups: Sequence[Group] = ()
    ) -> None:
        totals = np.array(values, dtype=np.float64)
        pairs: list[tuple[int, int, float]] = []
        self.groups = [group._replace(members=sorted(set(group.members))) for group in groups]
        for members, size, _ in self.groups:
            totals[members] += size
            pairs += [(first, last, size) for first, last in pairwise(members)]
        self.layers = len(totals)
        self._prefix = np.concatenate([[0.0], np.cumsum(totals)])
        self._first = np.array([pair[0] for pair in pairs], dtype=np.int64)
        self._last = np.array([pair[1] for pair in pairs], dtype=np.int64)
        self._size = np.array([pair[2] for pair in pairs], dtype=np.float64)

    @property
    def alone(self) -> NDArray[np.float64]:
        """The sum over every layer alone, shape (N,)."""
        return np.diff(self._prefix)

    def __call__(self, i: int, j: int) -> float:
        """The sum over [i, j), looked up where the table was made."""
        if "table" in self.__dict__:
            return float(self.table[i, j])
        inside = (self._first >= i) & (self._last < j)
        return float(self._prefix[j] - self._prefix[i] - self._size[inside].sum())

    def row(self, i: int, stop: int) -> NDArray[np.float64]:
        """The sums over [i, j) for j from i to `stop`, shape (stop+1-i,)."""
        inside = (self._first >= i) & (self._last < stop)
        ends = self._last[inside] + 1 - i
        shared = np.bincount(ends, weights=self._size[inside], minlength=stop + 1 - i)
        sums: NDArray[np.float64] = self._prefix[i : stop + 1] - self._prefix[i]
        return sums - np.cumsum(shared)

    def over(self, boundaries: Sequence[int]) -> RangeSum:
        """The same sums between `boundaries` only: `over(b)(i, j)` = the sum over [b[i], b[j]).

        A piece is a member of a group as often as the group has members in it.
        """
        coarse = RangeSum([])
        coarse.layers = len(boundaries) - 1
        position = np.array(boundaries)
        coarse._prefix = self._prefix[position]
        coarse._first = np.searchsorted(position, self._first, side="right") - 1
        coarse._last = np.searchsorted(position, self._last, side="right") - 1
        coarse._size = self._size
        pieces = [
            np.searchsorted(position, group.members, side="right") - 1 for group in self.groups
        ]
        coarse.groups = [
            group._replace(members=members.tolist())
            for group, members in zip(self.groups, pieces, strict=True)
        ]
        return coarse

    @cached_property
    def table(self) -> NDArray[np.float64]:
        """`table[i, j]` = the sum over [i, j) for all i <= j, else zero; shape (N+1, N+1)."""
        shared = np.zeros((self.layers + 1, self.layers + 1))
        np.add.at(shared, (self._first, self._last + 1), self._size)
        shared = np.cumsum(np.cumsum(shared[::-1], axis=0)[::-1], axis=1)
        return np.triu(self._prefix[None, :] - self._prefix[:, None] - shared)


class RangeMax:
    """`most(i, j)` = the largest of the `values` of the layers in [i, j), none of them negative.

    With `sums` a layer counts less what those behind it add to the sum, as they are done with it
    before: `values[l] - (sums(i, j) - sums(i, l + 1))` of layer l.
    """

    def __init__(
        self,
        values: Sequence[float] | NDArray[np.float64],
        sums: RangeSum | None = None,
        boundaries: Sequence[int] | NDArray[np.int64] | None = None,
    ) -> None:
        self.values = np.array(values, dtype=np.float64)
        self.sums = sums or RangeSum(np.zeros(len(self.values)))
        self._at = np.arange(len(self.values) + 1) if boundaries is None else np.array(boundaries)

    def __call__(self, i: int, j: int) -> float:
        """The largest over [i, j), 0 for none; looked up where the table was made."""
        if "table" in self.__dict__:
            return float(self.table[i, j])
        return float(self._row(self._at[i], self._at[j])[-1])

    @cached_property
    def alone(self) -> RangeMax:
        """The same maxima without the sums: values count whole."""
        return RangeMax(self.values, boundaries=self._at)

    def over(self, boundaries: Sequence[int]) -> RangeMax:
        """The same maxima between `boundaries` only, as `RangeSum.over`."""
        return RangeMax(self.values, self.sums, self._at[list(boundaries)])

    @cached_property
    def table(self) -> NDArray[np.float64]:
        """`table[i, j]` = the largest over [i, j), 0 for j <= i; shape (N+1, N+1)."""
        table = np.zeros((len(self._at), len(self._at)))
        for i, start in enumerate(self._at[:-1]):
            table[i, i:] = self._row(start, self._at[-1])[self._at[i:] - start]
        return table

    def _row(self, start: int, stop: int) -> NDArray[np.float64]:
        """The largest over the layers [start, j), for every j up to `stop`."""
        sums = self.sums.row(start, stop)
        peaks = np.maximum.accumulate(sums[1:] + self.values[start:stop])
        return np.append(0.0, peaks - sums[1:])
