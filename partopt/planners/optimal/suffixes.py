"""What the stages of an asynchronous pipeline hold together: a bound where memory is limited.

The probes know one stage at a time, and what the layers behind it compute. Here a dynamic program
builds pipelines from the last stage: of the ways to place layers [i, N) on d devices, that is best
whose first stage holds a microbatch for the shortest time (`partopt.cost.turns`). Where none is
left that fits, no plan takes T.

Ranks and links are the best there are, so that the bound holds for plans of any family.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from partopt.cost.capacity import Shapes, shapes_of
from partopt.cost.compiled import compiled
from partopt.cost.deadline import fewest_in_time
from partopt.cost.kernels import layers_of, most_in_flight, replica_counts, stage_cost, varies
from partopt.cost.links import run_sides_s
from partopt.cost.problem import Problem
from partopt.cost.relaxed import relax
from partopt.cost.tolerances import EPSILON
from partopt.cost.turns import held_s
from partopt.documents.topology import Topology

# [i, j)  a stage with r replicas
# d       devices for the layers from i on, at the most
# held    seconds for which the first stage of these holds a microbatch, shape (N+1, P+1)

WORK = 20_000_000  # squares of layers times devices: more take long


def refuter(problem: Problem) -> Callable[[float], bool]:
    """Whether no plan takes so many seconds a microbatch.

    Never, where the problem is large, the schedule synchronous or memory not limited.
    """
    N, P = problem.chain.layers, problem.topology.devices
    limited = problem.microbatches is None and problem.memory_bytes is not None
    if not limited or (N * P) ** 2 > WORK:
        return lambda T: False
    layers, shapes = layers_of(problem), _best_shapes(problem.exchange_topology)
    held, counts = np.zeros((N + 1, P + 1)), replica_counts(problem)

    def refutes(T: float) -> bool:
        return not any(fits(layers, shapes, T, *each, held) for each in counts)

    return refutes


def _best_shapes(topology: Topology) -> Shapes:
    """What r ranks carry at the best; on one level all runs of r are alike."""
    shapes = shapes_of(topology)
    single = sum(level.size > 1 for level in topology.levels) <= 1
    return shapes if single else relax(shapes, topology)


@compiled()
def fits(layers, shapes, T, least, most, held):  # type: ignore[no-untyped-def]
    """Whether the stages of some pipeline, of `least` to `most` replicas each, hold what they must.

    Fills `held`.
    """
    N, P = held.shape[0] - 1, held.shape[1] - 1
    held[:], held[N] = np.inf, 0.0
    for i in range(N - 1, -1, -1):
        for j in range(i + 1, N + 1):
            if held[j, P - 1] == np.inf:
                continue
            for mode in range(layers.first_mode, layers.last_mode + 1):
                stage = stage_cost(layers, i, j, mode)
                fewest, F = fewest_in_time(layers, stage, T, least, min(most, P))
                for r in range(fewest, min(most, P) + 1):
                    if varies(layers):
                        F = most_in_flight(layers, stage, r)
                    if _carries(layers, shapes, T, stage, r):
                        _add(layers, T, stage, r, F, held)
    return held[0, P] < np.inf


@compiled()
def _add(layers, T, stage, r, F, held):  # type: ignore[no-untyped-def]
    """Put a stage with r replicas before what there is from its end on."""
    busy, message = stage.forward_s + stage.backward_s, 2 * layers.message[stage.stop]
    for d in range(r, held.shape[1]):
        seconds = held_s(T, r, F, busy, message + held[stage.stop, d - r])
        held[stage.start, d] = min(held[stage.start, d], seconds)


@compiled()
def _carries(layers, shapes, T, stage, r):  # type: ignore[no-untyped-def]
    """Whether r replicas of a stage have the time for its all-reduce and its cuts, at the best."""
    none, trained, limit = len(shapes.group), stage.held.trained, T * (1 + EPSILON)
    first, last = stage.start == 0, stage.stop == len(layers.cuts) - 1
    pause = shapes.latency[0, r] + stage.tied_s
    if shapes.slope[0, r] * trained + pause > r * limit:
        return False
    if not first and stage.traffic_before > shapes.sides[0, 0, 0, r] * limit:
        return False
    if not last and stage.traffic_after > shapes.sides[1, 0, 0, r] * limit:
        return False
    ring = trained if r > 1 else 0.0
    gaps = none if first else 1, none if last else 1
    cuts = stage.traffic_before, stage.traffic_after
    busy = run_sides_s(shapes.network, *cuts, 0, r - 1, *gaps, ring, pause)
    return busy <= limit
