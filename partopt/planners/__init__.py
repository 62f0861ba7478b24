"""Planners: from a problem to a partition.

Each is one file, and one entry in the registry here. A planner's file has one function,
`plan(problem: Problem) -> Decision`; it is imported when it is first used.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace

from partopt.cost.pricing import price
from partopt.cost.problem import (
    CONTIGUOUS,
    FREE,
    NESTED,
    Decision,
    Problem,
    are_consecutive,
)
from partopt.documents.plan import Plan
from partopt.errors import PartoptError
from partopt.planners.placing import place
from partopt.registry import Registry
from partopt.schedules import schedule
from partopt.schedules.entry import Schedule
from partopt.schedules.placement import STRAIGHT


def _any(entry: Schedule) -> bool:
    """Schedules that give a device several stages too."""
    return True


def _one_stage_a_device(entry: Schedule) -> bool:
    return entry.shape == STRAIGHT


def _overlapping(entry: Schedule) -> bool:
    return entry.overlaps


@dataclass(frozen=True)
class Planner:
    """A registered planner: its module, a line on what it does, its options and its schedules.

    `uses` names the options that it reads: `stages` (with `fewer` as an upper limit), `costs` and
    `cuts`. It also names what it supports. `uniform`, `none`: its stages have equally many replicas
    or one, always or on request; `auto`: it chooses the stages that recompute. `schedules` says
    whether it plans for a schedule, by default for those with one stage on a device.
    """

    module: str
    summary: str
    uses: frozenset[str] = frozenset()
    schedules: Callable[[Schedule], bool] = _one_stage_a_device

    def plans_for(self, name: str) -> bool:
        """Whether it can plan for the schedule `name`."""
        return self.schedules(schedule(name))


_SINGLE = frozenset({"stages", "uniform", "none"})
_BALANCES = _SINGLE | {"costs"}
_BUILTIN: dict[str, Planner | str] = {
    "optimal": Planner(
        "partopt.planners.optimal",
        "the fastest plan within the memory, with a bound on all others",
        _SINGLE | {"auto"},
        _overlapping,
    ),
    "pipedream": Planner(
        "partopt.planners.pipedream",
        "PipeDream's recurrence: replicated stages over any number of levels, exactly",
    ),
    "gpipe": Planner(
        "partopt.planners.gpipe", "GPipe: K stages of least variance, exactly", _BALANCES, _any
    ),
    "torchgpipe": Planner(
        "partopt.planners.torchgpipe",
        "torchgpipe: K stages by local search over blocks",
        _BALANCES,
        _any,
    ),
    "lingvo": Planner(
        "partopt.planners.lingvo",
        "Lingvo's GPipe: K stages by cumulative cost",
        _BALANCES | {"fewer"},
        _any,
    ),
    "straight": Planner(
        "partopt.planners.straight",
        "the best pipeline without replication",
        _SINGLE,
        _overlapping,
    ),
    "data_parallel": Planner(
        "partopt.planners.data_parallel", "the whole model on every device", frozenset({"uniform"})
    ),
    "manual": Planner(
        "partopt.planners.manual", "your own `cuts` and `replicas`", frozenset({"cuts"}), _any
    ),
}
PLANNERS: Registry[Planner] = Registry("planner", Planner, _BUILTIN)


def required_features(problem: Problem) -> set[str]:
    """What a problem requires of its planner beyond its schedule, in terms of `Planner.uses`."""
    request = problem.request
    asked = {
        "stages": request.stages is not None,
        "costs": request.costs is not None,
        "auto": problem.recompute_per_stage,
        request.replication: request.replication != FREE,
    }
    return {use for use, stated in asked.items() if stated}


def decide(name: str, problem: Problem) -> Decision:
    """What the planner `name` decides.

    Raises PartoptError for an unknown name, or where the planner has no plan.
    """
    planner = check_schedule(name, problem.schedule)
    coarse = problem if "cuts" in planner.uses else problem.coarsen()
    decision: Decision = importlib.import_module(planner.module).plan(coarse)
    partition = decision.partition
    if coarse is not problem:
        partition = partition.on_layers(problem.boundaries())
    partition = place(partition, problem, name)
    if partition.family == NESTED and are_consecutive([s.ranks for s in partition.stages]):
        partition = replace(partition, family=CONTIGUOUS)
    return replace(decision, partition=partition)


def check_schedule(planner: str, name: str) -> Planner:
    """The planner of that name; PartoptError where it cannot plan for the schedule `name`."""
    entry = PLANNERS.lookup(planner)
    if entry.plans_for(name):
        return entry
    able = [other for other, entry in PLANNERS.items() if entry.plans_for(name)]
    why = (
        f"the planner {planner} puts one stage on each device, this schedule has several"
        if schedule(name).shape != STRAIGHT
        else f"the planner {planner} cannot plan for this schedule"
    )
    raise PartoptError(
        f"`schedule={name}`: {why}",
        f"use {', '.join(f'`planner={other}`' for other in able)}",
        code="planner-cannot-plan-for-schedule",
    )


def plan(name: str, problem: Problem) -> Plan:
    """The priced plan of the planner `name`."""
    decision = decide(name, problem)
    return price(decision.partition, problem, name, decision.certificate)
