"""What the stages of a contiguous plan may carry within given bounds."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from partopt.cost.capacity import Shapes, trees_of
from partopt.cost.kernels import Layers
from partopt.cost.tolerances import SUM
from partopt.planners.optimal.bounds import Bounds, Counts


class Caps(NamedTuple):
    """What stages may carry in one probe."""

    pace: float  # seconds: `partopt.cost.kernels.replicas_to_keep_pace`
    # devices that the layers before each cut take by their compute, at the least, shape (N+1,)
    needs: NDArray[np.float64]
    # devices that the layers behind a cut take, infinite where there can be no cut, shape (N+1,)
    min_devices_after: NDArray[np.float64]
    min_devices_before: NDArray[np.float64]  # devices that the layers before it take
    # replicas that a stage beside a cut has at the least, by its gap, shape (L+1, N+1)
    min_replicas_for_cut: NDArray[np.int64]
    min_replicas: int  # of a stage
    max_replicas: int
    # in the unit of `Layers.extra`: what all stages together may add to a microbatch's pass by
    # recomputing
    max_extra: float
    limited: bool  # devices in use matter: memory is limited
    group: NDArray[np.int64]  # ranks of the components of each level, shape (L+1,)
    # the largest of `weights` for each length of a run, a tree of shape (2 size,)
    any_weights: NDArray[np.float64]
    # bytes that the all-reduce of each shape can carry, trees of shape (G, 2 size)
    weights: NDArray[np.float64]
    # s/byte of parameters that each shape takes to update them, shape (G, P+1)
    slope: NDArray[np.float64]
    latency: NDArray[np.float64]  # s, shape (G, P+1)
    update: float  # seconds that an update may take, asynchronous for each replica
    sides: NDArray[np.float64]  # bytes/s of a side of each shape, trees of shape (L, G, 2 size)
    exchange: NDArray[np.float64]  # bytes/s, shape (L, G, P+1)
    free: NDArray[np.bool_]  # cuts at which the gap does not matter, shape (N+1,)


def weight_limits(layers: Layers, shapes: Shapes, bounds: Bounds) -> NDArray[np.float64]:
    """Bytes of parameters that each shape can update within the bounds, shape (G, P+1).

    -1 where it can update none.
    """
    replicas = np.arange(shapes.slope.shape[1])
    slope = shapes.slope + (layers.optimizer_rate if layers.M else 0.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        budget = bounds.pace_s * replicas if layers.M == 0 else bounds.update_s
        room = budget - shapes.latency
        weights = np.where(room < 0, -1.0, np.where(slope > 0, room / slope, np.inf))
    weights[:, 0] = -1.0
    return weights


def free_cuts(layers: Layers, shapes: Shapes, bounds: Bounds) -> NDArray[np.bool_]:
    """Cuts that any stage bears at any gap, shape (N+1,); the two ends of the chain among them."""
    # bytes/s that every stage has for a side, wherever it stands
    narrowest = float(shapes.side[:, :, 1:].min())
    carried = narrowest * (bounds.pace_s / layers.M if layers.M else bounds.pace_s)
    free = layers.cuts <= (0.0 if layers.serial else carried)
    free[[0, -1]] = True
    return free


def min_replicas_for_cuts(layers: Layers, shapes: Shapes, bounds: Bounds) -> NDArray[np.int64]:
    """The fewest replicas of any run of ranks that bear each cut at each gap, shape (L+1, N+1).

    1 where the gap does not matter.
    """
    L = len(shapes.side)
    longest = float(layers.compute[layers.last_mode, -1])
    within = (bounds.pace_s + longest) / layers.M if layers.M else bounds.pace_s
    fewest = np.ones((L + 1, len(layers.cuts)), np.int64)
    for gap in range(1, L + 1):
        best = np.maximum.accumulate(shapes.side[gap - 1, :, 1:].max(axis=0)) * (1 + SUM)
        fewest[gap] += np.searchsorted(best, layers.cuts / within)
    return fewest


def caps_of(
    layers: Layers,
    shapes: Shapes,
    sides: NDArray[np.float64],
    bounds: Bounds,
    counts: Counts,
    needs: NDArray[np.float64],
    around: tuple[NDArray[np.float64], NDArray[np.float64]],
) -> Caps:
    """What a stage may carry within the bounds.

    `sides` are the trees of the shapes' sides; `needs` and `around` are as in
    `partopt.planners.optimal.needs`.
    """
    weights = weight_limits(layers, shapes, bounds)
    return Caps(
        pace=bounds.pace_s,
        needs=needs,
        min_devices_after=around[0],
        min_devices_before=around[1],
        min_replicas_for_cut=min_replicas_for_cuts(layers, shapes, bounds),
        min_replicas=counts[0],
        max_replicas=counts[1],
        max_extra=np.inf,
        limited=layers.memory != np.inf,
        group=shapes.group,
        any_weights=trees_of(weights.max(axis=0, keepdims=True))[0],
        weights=trees_of(weights),
        slope=shapes.slope + (layers.optimizer_rate if layers.M else 0.0),
        latency=shapes.latency,
        update=bounds.update_s if layers.M else bounds.pace_s,
        sides=sides,
        exchange=shapes.exchange,
        free=free_cuts(layers, shapes, bounds),
    )
