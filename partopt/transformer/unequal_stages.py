"""The exact cut of a row of unequal blocks, embedding and head into the stages of a pipeline."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

# U      units in order: embedding, blocks, what predicts further tokens, head
# S[i,j] seconds of units [i, j)
# n      stages, of which none is empty
# G[i,j] seconds of the slowest of n stages of units [i, j), as fast as can be; k the last cut but
#        those inside the parts
# F[j]   sum over chunks of the slowest stage, of units [0, j)

Units = tuple[float, ...]


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
