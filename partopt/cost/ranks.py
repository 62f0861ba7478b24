"""The ranks of a stage, in order: a range where they are evenly spaced, which is quick to hash."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def spaced(ranks: NDArray[np.int64]) -> Sequence[int]:
    """Ranks as a range where they ascend evenly, else as a tuple."""
    first = int(ranks[0])
    if len(ranks) == 1:
        return range(first, first + 1)
    steps = np.diff(ranks)
    if (step := int(steps[0])) > 0 and (steps == step).all():
        return range(first, first + step * len(ranks), step)
    return tuple(ranks.tolist())


def join(groups: Sequence[Sequence[int]]) -> Sequence[int]:
    """The ranks of some groups, one after the other."""
    return groups[0] if len(groups) == 1 else spaced(np.concatenate(list(map(array_of, groups))))


def copies_of(ranks: Sequence[int], first: int, copies: int, stride: int) -> Sequence[int]:
    """Ranks so many times, the copies `stride` apart; the first by as many copies from `ranks`."""
    if len(ranks) == 1:
        return range(ranks[0] + first * stride, ranks[0] + (first + copies) * stride, stride)
    return spaced(np.add.outer(np.arange(first, first + copies) * stride, array_of(ranks)).ravel())


def array_of(ranks: Sequence[int]) -> NDArray[np.int64]:
    """Ranks as an array."""
    if isinstance(ranks, range):
        return np.arange(ranks.start, ranks.stop, ranks.step)
    return np.array(ranks, dtype=np.int64)
