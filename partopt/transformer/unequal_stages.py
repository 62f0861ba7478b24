"""The best cut of a row of unequal blocks, embedding and head into the stages of a pipeline."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from partopt.transformer.rates import Seconds

# U      units in order: embedding, blocks, what predicts further tokens, head
# S[i,j] seconds of units [i, j)
# n      stages, of which none is empty
# G[i,j] seconds of the slowest of n stages of units [i, j), as fast as can be; k the last cut but
#        those inside the parts
# F[j]   sum over chunks of the slowest stage, of units [0, j)
# C[j]   seconds of units [0, j), F[j] of their forwards; T of an iteration

Units = tuple[float, ...]
_EXACT, _NEAR = 1e-12, 1e-9  # of the time: cuts that differ by less are equally fast; rounding


@lru_cache(maxsize=4096)
def cut_units(units: Units, p: int, v: int) -> tuple[int, ...]:
    """The units of all p v stages, so that no other cut is faster.

    As many microbatches as devices pass a chunk before the next one, at the pace of its slowest
    stage: the sum of these over v chunks is least. A chunk that is faster than stages are in the
    mean saves nothing, because devices are in different ones at a time.
    """
    G, U = _slowest(units, p)[0], len(units)
    paces, F, before = np.maximum(G, sum(units) / (p * v)), np.full(U + 1, np.inf), list[Any]()
    F[0] = 0.0
    for _ in range(v):
        ways = F[:, None] + paces
        before.append(ways.argmin(axis=0))
        F = ways.min(axis=0)
    ends = [U]
    for cuts in reversed(before):
        ends.append(int(cuts[ends[-1]]))
    bounds = [0]
    for start, stop in itertools.pairwise(reversed(ends)):
        bounds += _bounds(units, p, start, stop)
    return tuple(stop - start for start, stop in itertools.pairwise(bounds))


@lru_cache(maxsize=512)
def _slowest(units: Units, n: int) -> tuple[Any, Any]:
    """G and k of n stages: products of those of half as many, in which (min, max) are (+, x)."""
    if n == 1:
        sums = np.concatenate([[0.0], np.cumsum(units)])
        S = sums[None, :] - sums[:, None]
        S[np.tril_indices(len(sums))] = np.inf
        return S, None
    ways = np.maximum(
        _slowest(units, n // 2)[0][:, :, None], _slowest(units, n - n // 2)[0][None, :, :]
    )
    return ways.min(axis=1), ways.argmin(axis=1)


def _bounds(units: Units, n: int, start: int, stop: int) -> list[int]:
    """The ends of n stages of units [start, stop)."""
    if n == 1:
        return [stop]
    cut = int(_slowest(units, n)[1][start, stop])
    return _bounds(units, n // 2, start, cut) + _bounds(units, n - n // 2, cut, stop)


@lru_cache(maxsize=8192)
def cut_for_makespan(units: tuple[Seconds, ...], p: int, m: int) -> tuple[int, ...]:
    """The units of p stages of one chunk, so that no other cut has a shorter `makespan_s`.

    The time that a stage allows depends on its place and bounds alone. It is more if the stage ends
    later, and less if it begins later: within T all fit if they do where every stage ends as late
    as it may. Of equally fast cuts it is one whose stages have about the mean of what is left.
    """
    C = [0.0, *itertools.accumulate(map(sum, units))]
    F = [0.0, *itertools.accumulate(unit.forward for unit in units)]
    if (U := len(units)) == p:
        return (1,) * p

    def allowed_s(s: int, i: int, j: int) -> float:
        return device_s(C[j] - C[i], F[j] - F[i], C[i], C[U] - C[j], s, p, m)

    def latest(s: int, i: int, T: float) -> int:
        """The end of stage s, which leaves a unit for every further one; i where there is none."""
        j = min(bisect_right(C, C[i] + (T - C[i]) / m + _NEAR * C[U]) - 1, U - p + s + 1)
        while j > i and allowed_s(s, i, j) > T:
            j -= 1
        return max(i, j)

    def slowest_s(bounds: Sequence[int]) -> float:
        return max(allowed_s(s, *pair) for s, pair in enumerate(itertools.pairwise(bounds)))

    def even(s: int, i: int) -> int:
        """The end of stage s that leaves the further ones as much in the mean."""
        j = bisect_left(C, C[i] + (C[U] - C[i]) / (p - s) - C[U] / U / 2)
        return min(max(i + 1, j), U - p + s + 1)

    found = [0]
    for s in range(p - 1):
        found.append(even(s, found[-1]))
    found.append(U)
    low_s, high_s = m * C[U] / p, slowest_s(found)
    while high_s - low_s > _EXACT * high_s:
        T, bounds, next_s = (low_s + high_s) / 2, [0], math.inf
        for s in range(p):
            i = bounds[-1]
            bounds.append(latest(s, i, T))
            if bounds[-1] < U - p + s + 1:
                next_s = min(next_s, allowed_s(s, i, bounds[-1] + 1))
            if bounds[-1] == i:
                break
        if bounds[-1] == U:
            found, high_s = bounds, slowest_s(bounds)
        else:
            low_s = next_s  # with less, all of them end where they did
    T, first = high_s * (1 + _EXACT), [U]
    for s in reversed(range(1, p)):
        i = found[s]
        while i > s and allowed_s(s, i - 1, max(first[-1], i)) <= T:
            i -= 1
        first.append(i)
    bounds = [0]
    for s, (begin, end) in enumerate(zip(first[:0:-1], found[1:], strict=False)):
        i = bounds[-1]
        bounds.append(max(i + 1, begin, min(even(s, i), end, latest(s, i, T))))
    return tuple(stop - start for start, stop in itertools.pairwise([*bounds, U]))


def makespan_s(loads: Sequence[float], forward_s: Sequence[float], m: int) -> float:
    """Seconds of m microbatches under 1F1B, sends left out: the latest of what devices allow.

    Exact where stages differ by a block and backwards are twice as long as forwards or longer, else
    a bound from below.
    """
    p, whole_s = len(loads), sum(loads)
    found_s, before_s = 0.0, 0.0
    for s, (load_s, fwd_s) in enumerate(zip(loads, forward_s, strict=True)):
        behind_s = whole_s - before_s - load_s
        found_s = max(found_s, device_s(load_s, fwd_s, before_s, behind_s, s, p, m))
        before_s += load_s
    return found_s


def device_s(
    load_s: float, forward_s: float, before_s: float, behind_s: float, s: int, p: int, m: int
) -> float:
    """Seconds of m microbatches as device s of p allows them under 1F1B.

    Beside its work it waits for the first forward and, behind its last backward, for those before
    it. It waits for those behind it twice: for the first backward, less the further forwards of its
    warm-up; and for the last one, less the backwards that it has left by then. Where all forwards
    are warm-up it waits once.
    """
    steady = m > p - s
    ahead = (p - s if steady else m) - 1
    first_s, last_s = behind_s - ahead * forward_s, behind_s - ahead * (load_s - forward_s)
    if first_s < 0:  # faster than `max`, and cuts ask a million times
        first_s = 0.0
    if last_s < 0:
        last_s = 0.0
    waits_s = first_s + last_s if steady else max(first_s, last_s)
    return m * load_s + before_s + waits_s


def pace_s(stages: Sequence[tuple[float, float]], p: int) -> float:
    """Seconds a microbatch of interleaved stages that take so long forward and backward.

    Device d is d slots behind with forwards and before others with backwards, whose chunks come in
    the opposite order. A slot is as long as that of the device that has most to do in it.
    """
    v, seconds = len(stages) // p, np.array(stages).reshape(-1, p, 2)
    slots, devices = np.arange(p * v)[:, None], np.arange(p)[None, :]
    forwards = (slots - devices + 2 * (p - 1) + (v - 1) * p) // p % v
    backwards = v - 1 - (slots + devices) // p % v
    both = seconds[forwards, devices, 0] + seconds[backwards, devices, 1]
    return float(both.max(axis=1).sum()) / p


def ends_of(counts: Sequence[int], blocks: int, further: int) -> str:
    """The blocks of stages that have so many units, as `Practice.ends` states them."""
    letters = "E" + "t" * blocks + "m" * bool(further) + "L"
    bounds = itertools.accumulate(counts, initial=0)
    stages = [letters[start:stop] for start, stop in itertools.pairwise(bounds)]
    return "-".join(f"{stage.count('t')}{'m' * ('m' in stage)}" for stage in stages)
