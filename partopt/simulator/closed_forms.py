"""Idle shares of the synchronous schedules in closed form.

Stages are equal with F = I = W, and messages take no time.
"""

from __future__ import annotations

from typing import NamedTuple

from partopt.documents.plan import Plan
from partopt.schedules import schedule
from partopt.schedules.entry import SLOTS
from partopt.schedules.layout import MIRRORED

# P   devices of one pipeline; v   stages that a device holds
# M   microbatches that pass through one pipeline in an iteration
# d   pipelines side by side


class Pipeline(NamedTuple):
    """One of the equal pipelines of a plan.

    A plan with unequal replicas counts as one pipeline of all its devices, one behind the other.
    """

    P: int
    v: int
    M: int


def pipeline_of(plan: Plan) -> Pipeline:
    """The pipeline of a synchronous plan.

    Balanced stages with unequal replicas fill as one pipeline of all devices does: 15-1 passes its
    first 15 microbatches on at once, and the last stage works through them alone.
    """
    assert plan.microbatches is not None
    held = plan.stages_by_rank()
    devices, v = len(held), len(next(iter(held.values())))
    if len({stage.replicas for stage in plan.stages}) > 1:
        return Pipeline(devices, v, plan.microbatches)
    mirrored = schedule(plan.schedule).shape == MIRRORED
    P = len(plan.stages) if mirrored else len(plan.stages) // v
    return Pipeline(P, v, max(1, plan.microbatches * P // devices))


def idle_share(name: str, of: Pipeline) -> float:
    """Share of an iteration for which devices wait under the schedule `name`.

    The optimizer's step is left out.
    """
    entry = schedule(name)
    return entry.bubble.of(*of, SLOTS) / entry.makespan(*of)
