"""Planners: from a problem to a partition. One file each, and one line in the registry here.

A planner's file has one function, `plan(problem: Problem) -> Partition`; it is imported when it is first used.
"""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import NamedTuple

from partopt.cost.price import price
from partopt.cost.problem import Assignment, Partition, Problem
from partopt.errors import PartoptError, did_you_mean
from partopt.plan import Plan
from partopt.planners.placing import placed
from partopt.schedules import schedule
from partopt.schedules.layout import STRAIGHT


class Planner(NamedTuple):
    """A registered planner: its module, what it does, in a line, and which of the options `stages` and `costs` it looks at.

    `chunks` is among them where it can plan for schedules that give a device several stages.
    """

    module: str
    summary: str
    uses: frozenset[str] = frozenset()


_BALANCES = frozenset({"stages", "costs", "chunks"})
PLANNERS: dict[str, Planner] = {
    "pipedream": Planner("partopt.planners.pipedream", "PipeDream's recurrence: replicated stages over any number of levels, exactly"),
    "gpipe": Planner("partopt.planners.gpipe", "GPipe: K stages of least variance, exactly", _BALANCES),
    "torchgpipe": Planner("partopt.planners.torchgpipe", "torchgpipe: K stages by local search over blocks", _BALANCES),
    "lingvo": Planner("partopt.planners.lingvo", "Lingvo's GPipe: K stages by cumulative cost", _BALANCES),
    "straight": Planner("partopt.planners.straight", "the best pipeline without replication", frozenset({"stages"})),
    "data_parallel": Planner("partopt.planners.data_parallel", "the whole model on every device"),
    "manual": Planner("partopt.planners.manual", "your own --cuts and --replicas", frozenset({"chunks"})),
}


def partition(name: str, problem: Problem) -> Partition:
    """What the planner `name` decides. Raises PartoptError for an unknown name, or where the planner has no plan."""
    if name not in PLANNERS:
        raise PartoptError(f"--planner {name}: no such planner", did_you_mean(name, PLANNERS))
    if schedule(problem.schedule).shape != STRAIGHT and "chunks" not in PLANNERS[name].uses:
        able = ", ".join(other for other, entry in PLANNERS.items() if "chunks" in entry.uses)
        message = f"--schedule {problem.schedule}: the planner {name} puts one stage on a device, this schedule has more"
        raise PartoptError(message, f"choose --planner {able}")
    decided: Partition = importlib.import_module(PLANNERS[name].module).plan(problem.coarsened())
    if problem.cut_at is not None:
        bounds = problem.boundaries()
        decided = replace(decided, stages=[Assignment(bounds[stage.start], bounds[stage.stop], stage.ranks) for stage in decided.stages])
    return placed(decided, problem, name)


def plan(name: str, problem: Problem) -> Plan:
    """The priced plan of the planner `name`."""
    return price(partition(name, problem), problem, name)
