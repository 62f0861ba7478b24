"""The search that bottleneck recurrences share: where to split off the last stage.

For every j it finds the minimum over i < s < j of max( A(i..s), cut(s), T(s..j) ). A rises with s
and T falls, but for bumps (exactly m workers can make a longer range cheaper), so both are bounded
from below by monotone envelopes. The search starts where the envelopes cross, goes outward only as
long as they allow an improvement or a tie, and jumps over cuts that do not.
"""

from __future__ import annotations

import numpy as np

from partopt.cost.compiled import compiled
from partopt.cost.recurrence import stage_s

# A[m, j]       best bottleneck seconds of [i, j) with m members, for one i; `floor` is its minimum
#               over all j' >= j
# inner[s, j]   seconds of [s, j) inside one member; `inner_floor` is its minimum over all s' <= s


@compiled()
def jumps(cuts):  # type: ignore[no-untyped-def]
    """For each s the next index, upward and downward, with a cut not above that of s; past the ends
    where there is none.
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
def split_off(  # type: ignore[no-untyped-def]
    members,
    i,
    m,
    inner,
    inner_floor,
    inner_stages,
    weights,
    cuts,
    jump,
    B,
    A,
    floor,
    stages,
    split,
    last,
):
    """Improve A[m, j] for every j by the best split that gives the last stage `members`: outward
    from where the envelopes cross.

    Any start is right; the crossing, which moves little from one j to the next, is the fastest.
    """
    left, start = m - members, i + 1
    for j in range(i + 2, len(cuts)):
        while start > i + 1 and floor[left, start - 1] >= stage_s(
            inner_floor[start - 1, j], weights[start - 1, j], members, B
        ):
            start -= 1
        while start < j - 1 and floor[left, start] < stage_s(
            inner_floor[start, j], weights[start, j], members, B
        ):
            start += 1
        for down in range(2):
            s = start - down
            while i < s < j:
                bound = (
                    stage_s(inner_floor[s, j], weights[s, j], members, B)
                    if down
                    else floor[left, s]
                )
                if bound > A[m, j]:
                    break
                if cuts[s] > A[m, j]:  # so are the cuts up to the next one that is not above it
                    s = jump[down, s]
                    continue
                seconds = max(A[left, s], cuts[s], stage_s(inner[s, j], weights[s, j], members, B))
                count = stages[left, s] + inner_stages[s, j]
                if seconds < A[m, j] or (
                    seconds == A[m, j] and (count, -s) < (stages[m, j], -split[m, j])
                ):
                    A[m, j], stages[m, j], split[m, j], last[m, j] = seconds, count, s, members
                s += -1 if down else 1
