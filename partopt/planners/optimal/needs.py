"""Bounds, shared by the probes of all families, on what the layers of a chain take.

They hold for every plan within given bounds, however it is placed.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from partopt.cost.compiled import compiled
from partopt.cost.kernels import Layers, held_by
from partopt.cost.tolerances import FITS_BYTES, TINY
from partopt.planners.optimal.probes import Answer
from partopt.schedules.entry import ALL_IN_FLIGHT, DEPTH

# N   layers; [i, j) is a stage


@compiled(allocates=True)
def furthest_ends(layers):  # type: ignore[no-untyped-def]
    """For each i the last j at which a stage [i, j) may end, N itself for i = N; shape (N+1,).

    Its cuts do not count, and one microbatch is in flight.
    """
    N = len(layers.cuts) - 1
    furthest = np.full(N + 1, N)
    j = N
    for i in range(N - 1, -1, -1):
        j = max(j, i + 1)
        while j > i + 1 and not _may_fit(layers, i, j):
            j -= 1
        furthest[i] = j
    return furthest


@compiled()
def _may_fit(layers, i, j):  # type: ignore[no-untyped-def]
    """Whether [i, j) fits with one microbatch in flight, its cuts not counted, on any replicas."""
    kept, most = layers.kept, min(layers.devices, layers.M) if layers.M else layers.devices
    versions = 1 if layers.versions == ALL_IN_FLIGHT else layers.versions
    held = held_by(layers, i, j)
    gradients = kept.gradients / (most if kept.shard >= 2 else 1)
    state = kept.state / (most if kept.shard >= 1 else 1)
    parameters = (versions * held.trained + held.frozen) / (most if kept.shard >= 3 else 1)
    weights = parameters + (gradients + state) * held.trained
    return weights + held.stash + held.transient <= layers.memory + FITS_BYTES


def devices_needed(layers: Layers, T: float) -> NDArray[np.float64]:
    """Devices that the layers before each cut take by their compute, at the least; shape (N+1,).

    `T` is the period of an asynchronous schedule, the iteration of a synchronous one.
    """
    compute = layers.compute[layers.first_mode] * max(layers.M, 1)
    return np.asarray(compute / max(T, TINY))


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


def find_at_depth(layers: Layers, stages: int | None, find: Callable[[Layers], Answer]) -> Answer:
    """The answer of `find`, at the fewest stages with a plan if what is in flight depends on them.

    More stages hold more: a plan of fewest stages, found where stages hold as little as those of a
    smaller depth, has no more stages than any plan that fits.
    """
    if layers.depends_on != DEPTH or layers.memory == np.inf:
        return find(layers)
    depth, complete = stages or 1, True
    while True:
        answer = find(layers._replace(depth=depth))
        complete = complete and answer.complete
        if answer.plan is None or len(answer.plan.stages) <= depth:
            return answer._replace(complete=complete)
        depth = len(answer.plan.stages)
