"""The ranks of a stage, in order: a range where they are evenly spaced, which is quick to hash."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray


def spaced(ranks: Iterable[int]) -> Sequence[int]:
    """Ranks as a range where they ascend evenly, else as a tuple."""
    given = tuple(ranks)
    step = given[1] - given[0] if len(given) > 1 else 1
    even = range(given[0], given[0] + step * len(given), step) if step > 0 else ()
    return even if tuple(even) == given else given


def copies_of(ranks: Sequence[int], first: int, copies: int, stride: int) -> Sequence[int]:
    """Ranks so many times, the copies `stride` apart; the first by as many copies from `ranks`."""
    by = range(first * stride, (first + copies) * stride, stride)
    return spaced(rank + offset for offset in by for rank in ranks)


def array_of(ranks: Sequence[int]) -> NDArray[np.int64]:
    """Ranks as an array."""
    if isinstance(ranks, range):
        return np.arange(ranks.start, ranks.stop, ranks.step)
    return np.array(ranks, dtype=np.int64)
