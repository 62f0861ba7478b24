"""Ranks as evenly spaced runs: those of a stage on a million devices are a few."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain, combinations, starmap
from typing import overload

import numpy as np
from numpy.typing import NDArray

FEW = 64  # ranks in which runs are not looked for


class Ranks(Sequence[int]):
    """Ranks in an order, one run after the other; two are equal where their runs are."""

    def __init__(self, runs: Sequence[range]) -> None:
        self.runs, self._length = tuple(runs), sum(map(len, runs))

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(self.runs)

    def __contains__(self, rank: object) -> bool:
        return any(rank in run for run in self.runs)

    @overload
    def __getitem__(self, place: int) -> int: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[int]: ...
    def __getitem__(self, place: int | slice) -> int | Sequence[int]:
        if isinstance(place, slice):
            return tuple(self)[place]
        place += self._length * (place < 0)
        for run in self.runs if place >= 0 else ():
            if place < len(run):
                return run[place]
            place -= len(run)
        raise IndexError(place)

    def __hash__(self) -> int:
        return hash(self.runs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ranks) and self.runs == other.runs

    def __repr__(self) -> str:
        return f"Ranks({list(self.runs)})"


def runs_of(ranks: Sequence[int]) -> Sequence[range]:
    """The runs of ranks in their order; single ones of a few that are not known to be spaced."""
    if isinstance(ranks, range):
        return (ranks,) if ranks else ()
    if isinstance(ranks, Ranks):
        return ranks.runs
    if len(ranks) <= FEW:
        return [range(rank, rank + 1) for rank in ranks]
    at = np.array(ranks)
    turns = np.flatnonzero(np.diff(at, 2)) + 2
    begins, ends = np.append(0, turns), np.append(turns, len(at))
    steps = np.where(ends - begins > 1, at[np.minimum(begins + 1, len(at) - 1)] - at[begins], 1)
    if (steps <= 0).any():
        return [range(rank, rank + 1) for rank in ranks]
    runs = zip(at[begins].tolist(), (at[ends - 1] + steps).tolist(), steps.tolist(), strict=True)
    return [range(*run) for run in runs]


def join(runs: Iterable[range]) -> Sequence[int]:
    """Ranks of runs one after the other; what goes on with the one before is one run."""
    joined: list[range] = []
    for run in runs:
        last = joined[-1] if joined else run
        if joined and run.step == last.step and run[0] == last[-1] + last.step:
            joined[-1] = range(last[0], run[-1] + run.step, run.step)
        else:
            joined.append(run)
    return joined[0] if len(joined) == 1 else Ranks(joined)


def copies_of(ranks: Sequence[int], first: int, copies: int, stride: int) -> Sequence[int]:
    """Ranks so many times, the copies `stride` apart; the first by as many copies from `ranks`."""
    start, end, runs = first * stride, (first + copies) * stride, runs_of(ranks)
    if len(ranks) == 1 and copies > 1:
        return range(ranks[0] + start, ranks[0] + end, stride)
    if len(runs) == 1 and len(ranks) * runs[0].step == stride:
        return range(ranks[0] + start, ranks[0] + end, runs[0].step)
    return join(
        range(run.start + by, run.stop + by, run.step)
        for by in range(start, end, stride)
        for run in runs
    )


def array_of(ranks: Sequence[int]) -> NDArray[np.int64]:
    """Ranks as an array."""
    if not isinstance(ranks, (range, Ranks)):
        return np.array(ranks, dtype=np.int64)
    return np.concatenate([np.arange(run.start, run.stop, run.step) for run in runs_of(ranks)])


def held_in(runs: Collection[range], size: int) -> dict[range, int]:
    """The groups of `size` numbers in which those of some runs lie, and how many any one holds.

    The groups are given as runs that do not overlap; all groups of a run hold equally many.
    """
    held = Counter[range]()
    for run in runs:
        for groups, many in _held_in(run, size):
            held[groups] += many
    few = len(held) ** 2 <= sum(map(len, held))  # else it is as quick to count one by one
    if size == 1 or (few and not any(starmap(may_share, combinations(held, 2)))):
        return held
    counts = Counter[int]()
    for groups, many in held.items():
        counts.update(dict.fromkeys(groups, many))
    return {range(group, group + 1): many for group, many in counts.items()}


def may_share(one: range, other: range) -> bool:
    """Whether two runs may have a number in common."""
    apart = one[-1] < other[0] or other[-1] < one[0]
    return not apart and (one[0] - other[0]) % math.gcd(one.step, other.step) == 0


def _held_in(run: range, size: int) -> Iterator[tuple[range, int]]:
    """`held_in` of one run; its ends may hold less than what lies between."""
    first, last, step = run[0] // size, run[-1] // size, run.step
    if first == last:
        yield range(first, first + 1), len(run)
    elif step % size == 0:
        yield range(first, last + 1, step // size), 1
    elif size % step:
        for group, many in Counter(rank // size for rank in run).items():
            yield range(group, group + 1), many
    else:
        full, begin, end = size // step, first, last + 1
        head = (size - 1 - run[0] % size) // step + 1
        tail = run[-1] % size // step + 1
        if head < full:
            yield range(first, first + 1), head
            begin += 1
        if tail < full:
            yield range(last, last + 1), tail
            end -= 1
        if begin < end:
            yield range(begin, end), full
