"""Planners: from a problem to a partition. One file each, and one line in the registry here.

A planner's file has one function, `plan(problem: Problem) -> Decision`; it is imported when it is
first used.
"""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import NamedTuple

from partopt.cost.price import price
from partopt.cost.problem import FREE, Decision, Problem
from partopt.documents.plan import Plan
from partopt.errors import PartoptError, did_you_mean
from partopt.planners.placing import placed
from partopt.schedules import schedule
from partopt.schedules.layout import STRAIGHT


class Planner(NamedTuple):
    """A registered planner: its module, what it does, in a line, what it looks at or keeps to, and
    which schedules it plans for.

    It may look at the options `stages` (with `fewer` as the most that there may be), `costs` and
    `cuts`. `chunks`: it can plan for schedules that give a device several stages; `uniform`,
    `none`: its stages have equally many replicas or one, always or where that is asked for; `auto`:
    it chooses the stages that recompute. `schedules` are empty where it plans for any.
    """

    module: str
    summary: str
    uses: frozenset[str] = frozenset()
    schedules: tuple[str, ...] = ()

    def plans_for(self, name: str) -> bool:
        """Whether it can plan for the schedule `name`."""
        return (schedule(name).shape == STRAIGHT or "chunks" in self.uses) and (
            not self.schedules or name in self.schedules
        )


_SINGLE = frozenset({"stages", "uniform", "none"})
_BALANCES = _SINGLE | {"costs", "chunks"}
PLANNERS: dict[str, Planner] = {
    "optimal": Planner(
        "partopt.planners.optimal",
        "the best contiguous or nested plan within the memory, with a proof",
        _SINGLE | {"auto"},
        ("pipedream", "pipedream-2bw", "1f1b", "1f1b-eager", "gpipe", "zb-h1"),
    ),
    "pipedream": Planner(
        "partopt.planners.pipedream",
        "PipeDream's recurrence: replicated stages over any number of levels, exactly",
    ),
    "gpipe": Planner(
        "partopt.planners.gpipe", "GPipe: K stages of least variance, exactly", _BALANCES
    ),
    "torchgpipe": Planner(
        "partopt.planners.torchgpipe", "torchgpipe: K stages by local search over blocks", _BALANCES
    ),
    "lingvo": Planner(
        "partopt.planners.lingvo",
        "Lingvo's GPipe: K stages by cumulative cost",
        _BALANCES | {"fewer"},
    ),
    "straight": Planner(
        "partopt.planners.straight", "the best pipeline without replication", _SINGLE
    ),
    "data_parallel": Planner(
        "partopt.planners.data_parallel", "the whole model on every device", frozenset({"uniform"})
    ),
    "manual": Planner(
        "partopt.planners.manual", "your own --cuts and --replicas", frozenset({"chunks", "cuts"})
    ),
}


def required_features(problem: Problem) -> set[str]:
    """What a problem asks of its planner beyond its schedule, as `Planner.uses` says it."""
    asked = {
        "stages": problem.stages is not None,
        "costs": problem.costs is not None,
        "auto": problem.recompute_per_stage,
        problem.replication: problem.replication != FREE,
    }
    return {use for use, stated in asked.items() if stated}


def decide(name: str, problem: Problem) -> Decision:
    """What the planner `name` decides.

    Raises PartoptError for an unknown name, or where the planner has no plan.
    """
    if name not in PLANNERS:
        raise PartoptError(f"--planner {name}: no such planner", did_you_mean(name, PLANNERS))
    if not PLANNERS[name].plans_for(problem.schedule):
        able = ", ".join(
            other for other, entry in PLANNERS.items() if entry.plans_for(problem.schedule)
        )
        chunked = schedule(problem.schedule).shape != STRAIGHT
        why = (
            f"the planner {name} puts one stage on a device, this schedule has more"
            if chunked
            else f"not for the planner {name}"
        )
        raise PartoptError(f"--schedule {problem.schedule}: {why}", f"choose --planner {able}")
    coarse = problem if "cuts" in PLANNERS[name].uses else problem.coarsened()
    decision: Decision = importlib.import_module(PLANNERS[name].module).plan(coarse)
    partition = decision.partition
    if coarse is not problem:
        bounds = problem.boundaries()
        stages = [
            replace(stage, start=bounds[stage.start], stop=bounds[stage.stop])
            for stage in partition.stages
        ]
        partition = replace(partition, stages=stages)
    return replace(decision, partition=placed(partition, problem, name))


def plan(name: str, problem: Problem) -> Plan:
    """The priced plan of the planner `name`."""
    decision = decide(name, problem)
    return price(decision.partition, problem, name, decision.certificate)
