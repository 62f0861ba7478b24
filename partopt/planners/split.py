"""The search that bottleneck recurrences share: where to split off the last stage.

For every j it finds the minimum over i < s < j of max( A(i..s), cut(s), T(s..j) ). A rises with s
and T falls, but for bumps (exactly m workers can make a longer range cheaper), so both are bounded
from below by monotone envelopes. The search starts where the envelopes cross, goes outward only as
long as they allow an improvement or a tie, and jumps over cuts that do not.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from partopt.cost.compiled import compiled
from partopt.cost.recurrence import stage_s


class Inner(NamedTuple):
    """What a stage or a pipeline over [s, j) takes inside one member.

    Tables of shape (N+1, N+1) over s and j.
    """

    seconds: NDArray[np.float64]
    floor: NDArray[np.float64]  # the minimum of the seconds over all s' <= s
    stages: NDArray[np.int32]
    weights: NDArray[np.float64]  # bytes of parameters of [s, j)
    B: float  # bytes/s at which members exchange them

    @classmethod
    def of(
        cls,
        seconds: NDArray[np.float64],
        stages: NDArray[np.int32],
        weights: NDArray[np.float64],
        B: float,
    ) -> Inner:
        """The tables with their floor."""
        return cls(seconds, np.minimum.accumulate(seconds, axis=0), stages, weights, B)


class Cuts(NamedTuple):
    """What the cuts take."""

    seconds: NDArray[np.float64]  # shape (N+1,)
    # the next s in either direction whose cut is not above that of s, shape (2, N+1)
    jump: NDArray[np.int32]

    @classmethod
    def of(cls, seconds: NDArray[np.float64]) -> Cuts:
        """The cuts with their jumps."""
        return cls(seconds, _jumps(seconds))


class Row(NamedTuple):
    """The best pipelines over [i, j) for one i and every m members and j, with their choices.

    All arrays have shape (n+1, N+1).
    """

    A: NDArray[np.float64]  # bottleneck seconds
    floor: NDArray[np.float64]  # the minimum of A[m, j'] over j' >= j
    stages: NDArray[np.int32]
    split: NDArray[np.int32]  # s, where the last stage begins
    last: NDArray[np.int32]  # members of the last stage; 0 where [i, j) is one stage

    @classmethod
    def empty(cls, n: int, layers: int) -> Row:
        """Infinite seconds, and no choices."""
        shape = (n + 1, layers + 1)
        return cls(
            np.full(shape, np.inf),
            np.full(shape, np.inf),
            *(np.zeros(shape, np.int32) for _ in range(3)),
        )


@compiled(allocates=True)
def _jumps(cuts):  # type: ignore[no-untyped-def]
    """For each s the next index, upward and downward, with a cut not above that of s.

    An index past the ends where there is none.
    """
    jump = np.empty((2, len(cuts)), np.int32)
    for down in range(2):
        for position in range(len(cuts)):
            s = position if down else len(cuts) - 1 - position
            following = s - 1 if down else s + 1
            while 0 <= following < len(cuts) and cuts[following] > cuts[s]:
                following = jump[down, following]
            jump[down, s] = following
    return jump


@compiled()
def split_off(members, i, m, inner, cuts, row):  # type: ignore[no-untyped-def]
    """Improve `row` at m, for every j, by the best split with `members` for the last stage.

    The search goes outward from where the envelopes cross. Any start is right; the crossing, which
    moves little from one j to the next, is the fastest.
    """
    A, floor, left, start = row.A, row.floor, m - members, i + 1
    for j in range(i + 2, len(cuts.seconds)):
        start = _crossing(floor[left], inner, members, i, j, start)
        for down in range(2):
            s = start - down
            while i < s < j:
                bound = _stage_floor_s(inner, s, j, members) if down else floor[left, s]
                if bound > A[m, j]:
                    break
                # so are the cuts up to the next one that is not above it
                if cuts.seconds[s] > A[m, j]:
                    s = cuts.jump[down, s]
                    continue
                stage = stage_s(inner.seconds[s, j], inner.weights[s, j], members, inner.B)
                seconds = max(A[left, s], cuts.seconds[s], stage)
                _improve(row, m, j, seconds, row.stages[left, s] + inner.stages[s, j], s, members)
                s += -1 if down else 1


@compiled(inline="always")
def _stage_floor_s(inner, s, j, members):  # type: ignore[no-untyped-def]
    """What no stage [s', j) with s' <= s goes below."""
    return stage_s(inner.floor[s, j], inner.weights[s, j], members, inner.B)


@compiled(inline="always")
def _crossing(floor, inner, members, i, j, start):  # type: ignore[no-untyped-def]
    """The first s, near `start`, at which what lies before it takes no less than the stage."""
    while start > i + 1 and floor[start - 1] >= _stage_floor_s(inner, start - 1, j, members):
        start -= 1
    while start < j - 1 and floor[start] < _stage_floor_s(inner, start, j, members):
        start += 1
    return start


@compiled(inline="always")
def _improve(row, m, j, seconds, count, s, members):  # type: ignore[no-untyped-def]
    """Take a split if it is faster; of equal ones that with fewer stages, then the later cut."""
    tie = seconds == row.A[m, j] and (count, -s) < (row.stages[m, j], -row.split[m, j])
    if seconds < row.A[m, j] or tie:
        row.A[m, j], row.stages[m, j] = seconds, count
        row.split[m, j], row.last[m, j] = s, members
