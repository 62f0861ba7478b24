"""How a model scales: its best plan on ever more devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from partopt.cost.problem import Problem
from partopt.documents.plan import Plan
from partopt.documents.topology import Topology
from partopt.search import contest

Stated = Callable[[Topology], Problem]  # the problem on a topology


def scaling(
    topology: Topology, devices: Sequence[int], planner: str | None, stated: Stated
) -> list[Plan]:
    """The judged plan on each number of `devices`, of `planner` or the best of all.

    Raises PartoptError for numbers that the topology cannot be cut down or grown to, before
    anything is planned.
    """
    plans: list[Plan] = []
    for problem in [stated(topology.resize(count)) for count in devices]:
        problem.progress("scaling", len(plans), len(devices))
        names = contest.contestants(problem) if planner is None else [planner]
        with contest.quiet():
            found = contest.plans_of(names, problem)
        plans.append(found[contest.best_of(found)])
    return plans
