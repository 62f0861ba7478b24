"""What the stages of a contiguous plan may carry within given bounds."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from partopt.cost.capacity import Shapes, trees_of
from partopt.cost.kernels import Layers
from partopt.cost.links import Network
from partopt.cost.ranges import between
from partopt.cost.tolerances import SUM
from partopt.planners.optimal.probes import Counts


class Caps(NamedTuple):
    """What stages may carry in one probe."""

    T: float  # seconds: `partopt.cost.deadline.replicas_in_time`
    # devices that the layers before each cut take by their compute, at the least, shape (N+1,)
    needs: NDArray[np.float64]
    # devices that the layers behind a cut take, infinite where there can be no cut, shape (N+1,)
    min_devices_after: NDArray[np.float64]
    min_devices_before: NDArray[np.float64]  # devices that the layers before it take
    min_replicas: int  # of a stage
    max_replicas: int
    group: NDArray[np.int64]  # ranks of the components of each level, shape (L+1,)
    network: Network
    # the largest of `weights` for each length of a run, a tree of shape (2 size,)
    any_weights: NDArray[np.float64]
    # bytes that the all-reduce of each shape can carry, trees of shape (G, 2 size)
    weights: NDArray[np.float64]
    # s/byte that the all-reduce of each shape takes, shape (G, P+1)
    slope: NDArray[np.float64]
    latency: NDArray[np.float64]  # s, shape (G, P+1)
    algorithm: NDArray[np.int64]  # of the all-reduce of each shape, shape (G, P+1)
    # bytes/s of the two sides of each shape, trees of shape (2, L, G, 2 size)
    sides: NDArray[np.float64]
    free: NDArray[np.bool_]  # cuts at which the gap does not matter, shape (N+1,)


def weight_limits(layers: Layers, shapes: Shapes, T: float) -> NDArray[np.float64]:
    """Bytes of parameters that each shape can update within `T`, shape (G, P+1).

    -1 where it can update none. The rest of what a stage does is not counted.
    """
    replicas = np.arange(shapes.slope.shape[1])
    with np.errstate(divide="ignore", invalid="ignore"):
        room = T * (1 if layers.M else replicas) * (1 + SUM) - shapes.latency
        step = layers.optimizer_rate / (replicas if layers.kept.shard else 1) if layers.M else 0.0
        slope = shapes.slope + step
        weights = np.where(room < 0, -1.0, np.where(slope > 0, room / slope, np.inf))
    weights[:, 0] = -1.0
    return weights


def free_cuts(layers: Layers, shapes: Shapes, T: float) -> NDArray[np.bool_]:
    """Cuts that any stage bears at any gap, shape (N+1,); the two ends of the chain among them.

    Together with any other cut, that is and, asynchronous, with the all-reduce of all gradients.
    """
    # bytes/s that every stage has for a side, wherever it stands
    narrowest = float(shapes.sides[:, :, :, 1:].min())
    if layers.M:
        left = (T - float(layers.forward[-1] + layers.tail[-1])) / layers.M
    else:
        left = T - _longest_ring_s(layers, shapes)
    free: NDArray[np.bool_] = layers.traffic + layers.traffic.max() <= narrowest * left * (1 - SUM)
    if layers.holds:
        free[:] = False
    free[[0, -1]] = True
    return free


def _longest_ring_s(layers: Layers, shapes: Shapes) -> float:
    """Seconds per microbatch that the all-reduce of any stage takes, at the most."""
    most = float(between(layers.trained, 0, len(layers.cuts) - 1))
    if most == 0.0 or shapes.slope.shape[1] < 3:
        return 0.0
    seconds = (
        shapes.slope * most + shapes.latency + layers.tied.seconds.max(axis=1, initial=0).sum()
    )
    replicas = np.arange(seconds.shape[1])
    return float((seconds[:, 2:] / replicas[2:]).max())


def caps_of(
    layers: Layers,
    shapes: Shapes,
    sides: NDArray[np.float64],
    T: float,
    counts: Counts,
    needs: NDArray[np.float64],
    around: tuple[NDArray[np.float64], NDArray[np.float64]],
) -> Caps:
    """What a stage may carry within `T` seconds.

    `sides` are the trees of the shapes' sides; `needs` and `around` are as in
    `partopt.planners.optimal.needs`.
    """
    weights = weight_limits(layers, shapes, T)
    return Caps(
        T=T,
        needs=needs,
        min_devices_after=around[0],
        min_devices_before=around[1],
        min_replicas=counts[0],
        max_replicas=min(counts[1], layers.M) if layers.M else counts[1],
        group=shapes.group,
        network=shapes.network,
        any_weights=trees_of(weights.max(axis=0, keepdims=True))[0],
        weights=trees_of(weights),
        slope=shapes.slope,
        latency=shapes.latency,
        algorithm=shapes.algorithm,
        sides=sides,
        free=free_cuts(layers, shapes, T),
    )
