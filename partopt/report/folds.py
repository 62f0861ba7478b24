"""Repeated blocks of a long list, so that a page shows each once."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_LONGEST = 64  # elements of a block


class Fold(NamedTuple):
    """`times` blocks of `length` elements each, alike, from `start` on."""

    start: int
    length: int
    times: int

    @property
    def block(self) -> range:
        """The elements of the first block."""
        return range(self.start, self.start + self.length)

    @property
    def stop(self) -> int:
        """Where the next fold starts."""
        return self.start + self.length * self.times


def fold(keys: Sequence[Hashable], least_saved: int = 1) -> list[Fold]:
    """The list as folds, in order: from every place the repetition that leaves out most elements.

    Elements are alike where their `keys` are equal. Elements in a row that repeat nothing, or whose
    repetition leaves out fewer than `least_saved`, are one block that is there once. Of repetitions
    that leave out as many the one of the shortest block is taken.
    """
    numbers: dict[Hashable, int] = {}
    ids = np.array([numbers.setdefault(key, len(numbers)) for key in keys], dtype=np.int64)
    times = np.ones(len(ids), dtype=np.int64)
    length = np.ones(len(ids), dtype=np.int64)
    longest = min(_LONGEST, len(ids) // 2) if len(numbers) < len(ids) else 0
    for p in range(1, longest + 1):
        same = ids[p:] == ids[:-p]
        if not same.any():
            continue
        repeated = _run_lengths(same) // p + 1
        places = np.flatnonzero((repeated - 1) * p >= least_saved)
        better = places[(repeated[places] - 1) * p > ((times - 1) * length)[places]]
        times[better], length[better] = repeated[better], p
    folds: list[Fold] = []
    place, repeats = 0, np.flatnonzero(times > 1)
    while place < len(ids):
        at = int(np.searchsorted(repeats, place))
        start = int(repeats[at]) if at < len(repeats) else len(ids)
        if place < start:
            folds.append(Fold(place, start - place, 1))
        if start < len(ids):
            folds.append(Fold(start, int(length[start]), int(times[start])))
        place = folds[-1].stop
    return folds


def _run_lengths(same: NDArray[np.bool_]) -> NDArray[np.int64]:
    """For every place, of how many elements from there on all are true."""
    places = np.arange(len(same))
    ends = np.where(same, len(same), places)
    return np.asarray(np.minimum.accumulate(ends[::-1])[::-1] - places, dtype=np.int64)
