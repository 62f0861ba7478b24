"""The best pipeline without replication: the dynamic program of `optimal`, one device a stage.

As many stages as help, ranks in their order; memory is not looked at.
"""

from __future__ import annotations

from dataclasses import replace

from partopt.cost.problem import NONE, Decision, Problem
from partopt.planners import optimal
from partopt.planners.costs import StageCosts
from partopt.planners.placing import stage_count


def plan(problem: Problem) -> Decision:
    """The partition into one-device stages whose slowest stage is fastest.

    Exactly `problem.stages` of them where that is given.
    """
    stage_count(problem)
    stated, cells = optimal.coarsen(replace(problem, replication=NONE, memory_bytes=None))
    costs = StageCosts(stated)
    places = tuple((rank,) for rank in range(problem.topology.devices))
    found = optimal.layout_plans(costs, places, problem.topology.devices)
    return Decision(min(found, key=costs.estimate_s).partition().on_layers(cells))
