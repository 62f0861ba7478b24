"""Bounds, shared by the probes of all families, on what the layers of a chain take.

They hold for every plan within given bounds, however it is placed.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from partopt.cost.compiled import compiled
from partopt.cost.kernels import (
    NEVER,
    Layers,
    between,
    passed_s,
)
from partopt.cost.tolerances import FITS_BYTES, RECOMPUTE_UNITS, TINY
from partopt.planners.optimal.bounds import Bounds, Counts
from partopt.planners.optimal.probes import Answer
from partopt.schedules.entry import ALL_IN_FLIGHT, DEPTH

# N   layers; [i, j) is a stage


@compiled(allocates=True)
def furthest_ends(layers):  # type: ignore[no-untyped-def]
    """For each i the last j at which a stage [i, j) may end, N itself for i = N; shape (N+1,).

    Only its weights and its stash count.
    """
    N = len(layers.cuts) - 1
    furthest = np.full(N + 1, N)
    j = N
    for i in range(N - 1, -1, -1):
        j = max(j, i + 1)
        while j > i + 1 and not _may_fit(layers, i, j, 2 if layers.M == 0 else 1):
            j -= 1
        furthest[i] = j
    return furthest


@compiled(allocates=True)
def longest_passes_s(layers, furthest):  # type: ignore[no-untyped-def]
    """Seconds in which the largest stage with each layer passes a microbatch on; shape (N,)."""
    N = len(furthest) - 1
    longest = np.zeros(N)
    for i in range(N):
        passed = passed_s(layers, i, furthest[i], layers.first_mode)
        for layer in range(i, furthest[i]):
            longest[layer] = max(longest[layer], passed)
    return longest


@compiled()
def _may_fit(layers, i, j, F):  # type: ignore[no-untyped-def]
    """Whether [i, j) fits with F in flight, its cuts not counted."""
    if layers.memory == np.inf:
        return True
    versions = F if layers.versions == ALL_IN_FLIGHT else layers.versions
    kept = 1 if layers.last_mode else F
    weights, stash = between(layers.weights, i, j), between(layers.stash, i, j)
    held = (versions + 1 + layers.optimizer) * weights + kept * stash
    return held <= layers.memory + FITS_BYTES


def devices_needed(
    layers: Layers, longest: NDArray[np.float64], bounds: Bounds, counts: Counts
) -> NDArray[np.float64]:
    """Devices that the layers before each cut take by their compute, at the least; shape (N+1,).

    A synchronous stage takes the fewest replicas or M C / (X + passed) if that is more, where what
    it passes on in is at most `longest`: each of its layers accounts for its own share of that.
    """
    M, T, (fewest, most) = layers.M, bounds.pace_s, counts
    compute = layers.compute[layers.first_mode]
    if M == 0:
        return np.asarray(compute / T)
    turns = -(-M // most)
    longest = longest if turns == 1 else np.minimum(longest, T / (turns - 1))
    passed = np.diff(layers.compute[0 if layers.recompute_is_free else layers.first_mode])
    counted = fewest * passed / np.maximum(longest, TINY)
    paced = M * np.diff(compute) / np.maximum(T + longest, TINY)
    return np.concatenate([[0.0], np.cumsum(np.minimum(np.maximum(counted, paced), NEVER))])


def devices_around(
    needs: NDArray[np.float64], after: NDArray[np.float64] | None
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The fewest devices of the layers behind each cut and of those before it, shape (N+1,) each.

    `needs` is what the compute before each cut takes, and `after`, if known, bounds what the layers
    behind take: using more devices behind a cut than necessary does not let the layers before it
    take fewer.
    """
    if after is None:
        return needs[-1] - needs, needs
    possible = np.where(np.isinf(after), 0.0, after)
    return np.maximum(after, needs[-1] - needs), np.maximum(needs, after[0] - possible)


def recompute_units(layers: Layers) -> tuple[float, NDArray[np.int64]]:
    """Seconds of a unit, and the whole units that recomputation adds before each cut.

    They add to the pass of the layers before the cut; shape (N+1,).
    """
    forward = layers.compute[1] - layers.compute[0]
    unit_s = max(float(forward[-1]), TINY) / RECOMPUTE_UNITS
    return unit_s, np.rint(forward / unit_s).astype(np.int64)


@compiled(allocates=True)
def stages_up_to(layers, own):  # type: ignore[no-untyped-def]
    """For each cut the fewest stages up to it and the one after, all recomputed; shape (N+1,).

    NEVER where they do not fit. Cuts are not counted. Stages are as long as they can be from the
    first on: each keeps what it rebuilds of as many microbatches as there are stages up to it, of
    at most `own`, so that a later one holds less.
    """
    N = len(layers.cuts) - 1
    count = np.full(N + 1, NEVER)
    i = s = 0
    count[0] = 1
    while i < N:
        s += 1
        j = i
        while j < N and _holds(layers, i, j + 1, min(s, own)):
            j += 1
            count[j] = s + 1
        if j == i:
            break
        i = j
    return count


@compiled()
def _holds(layers, i, j, rebuilt):  # type: ignore[no-untyped-def]
    """Whether [i, j) fits with what it has rebuilt, its cuts not counted."""
    weights, stash = between(layers.weights, i, j), between(layers.stash, i, j)
    held = (layers.versions + 1 + layers.optimizer) * weights + rebuilt * stash
    return held <= layers.memory + FITS_BYTES


def find_at_depth(
    layers: Layers,
    stages: int | None,
    counts: Counts,
    devices: int,
    find: Callable[[Layers], Answer],
) -> Answer:
    """The answer of `find`, at the fewest stages with a plan if what is in flight depends on them.

    More stages hold more: a plan of fewest stages, found where stages hold as little as those of a
    smaller depth, has no more stages than any plan that fits. Where stages also keep what they have
    rebuilt, which is less the more stages are behind them, that depth is where the search begins:
    depths are tried in turn, as far as the `devices` allow with the fewest replicas of `counts`. In
    a plan of the fewest stages each cut has the fewest behind it, so the entries with the fewest
    are enough.
    """
    if layers.depends_on != DEPTH or layers.memory == np.inf:
        return find(layers)
    if stages is not None:
        return find(layers._replace(depth=stages))
    recomputes, complete, depth = layers.last_mode == 1, True, 1
    most = min(devices // counts[0], len(layers.cuts) - 1)
    if recomputes:
        own = -(-layers.M // counts[0])
        up_to = stages_up_to(layers, own)
        layers, depth = layers._replace(least_rebuilt=np.minimum(up_to, own)), int(up_to[-1]) - 1
    if depth > most:
        return Answer(None)
    while True:
        answer = find(layers._replace(depth=depth, rebuilds=False))
        complete = complete and answer.complete
        if answer.plan is not None and len(answer.plan.stages) > depth:
            depth = len(answer.plan.stages)
            continue
        if answer.plan is None or not (layers.rebuilds and recomputes):
            return answer._replace(complete=complete)
        answer = find(layers._replace(depth=depth))
        complete = complete and answer.complete
        found = answer.plan is not None and len(answer.plan.stages) <= depth
        if found or answer.gave_up or depth == most:
            return answer._replace(plan=answer.plan if found else None, complete=complete)
        depth += 1
