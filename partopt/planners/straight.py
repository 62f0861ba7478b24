"""The best pipeline without replication, exactly, under the physical cost of the topology.

One stage a device, as many stages as help, ranks in their order; memory is not looked at. The
period of an asynchronous schedule and the iteration of a synchronous one are each the largest of
what single stages take, so that the search of the planner `optimal`, with one replica each, finds
the least (`partopt.planners.optimal.least`).
"""

from __future__ import annotations

from dataclasses import replace

from partopt.cost.problem import CONTIGUOUS, NONE, Decision, Problem, certify
from partopt.planners import optimal
from partopt.planners.placing import stage_count


def plan(problem: Problem) -> Decision:
    """The partition into one-device stages with the least period, or iteration if synchronous.

    Exactly `problem.stages` of them where that is given.
    """
    if problem.stages is not None:
        stage_count(problem)
    best, seconds, _ = optimal.least(
        replace(problem, replication=NONE, memory_bytes=None), (CONTIGUOUS,)
    )
    assert best is not None, "without a limit of memory there is a partition"
    scope = "plans of one device a stage, as the formulas price them"
    status = "optimal without replication"
    return Decision(best, certify(seconds, seconds, scope, optimal.PROOF, status))
