"""The best pipeline without replication: stage s on rank s, cut where the slowest is fastest.

    T(s, j) = min over i of max( T(s - 1, i), cost of layers [i, j) on rank s )

As many stages as help; memory is not looked at.
"""

from __future__ import annotations

import numpy as np

from partopt.cost.problem import NONE, Decision, Problem
from partopt.planners import optimal
from partopt.planners.costs import StageCosts
from partopt.planners.layouts import Shape
from partopt.planners.placing import stage_count

# S   stages; N   layers; `ends[s][j]`: where stage s begins, of the best s + 1 that end at j


def plan(problem: Problem) -> Decision:
    """The partition into one-device stages whose slowest stage is fastest.

    As many as are requested, where that is so.
    """
    most = stage_count(problem)
    stated, cells = optimal.coarsen(problem.with_(replication=NONE, memory_bytes=None))
    costs, N = StageCosts(stated), stated.chain.layers
    places = tuple((rank,) for rank in range(problem.topology.devices))
    T, ends, found = np.where(np.arange(N + 1) == 0, 0.0, np.inf), [], list[Shape]()
    fastest, wanted, again = np.inf, problem.request.stages, problem.recompute_by_default
    for s in range(min(most, N)):
        reach = np.maximum(T[:, None], costs.stage(places, s, s + 1, again, most))
        ends.append(reach.argmin(axis=0))
        T = reach.min(axis=0)
        if wanted == s + 1 or (wanted is None and T[N] < fastest):
            bounds = [N]
            for starts in reversed(ends):
                bounds.append(int(starts[bounds[-1]]))
            S, fastest = s + 1, min(fastest, float(T[N]))
            found.append(Shape(places, tuple(bounds[::-1]), (1,) * S, (0,) * S, (None,) * S))
    return Decision(min(found, key=costs.estimate_s).partition().on_layers(cells))
