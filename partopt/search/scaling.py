"""How a model scales: its best plan on ever more devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from partopt.cost.problem import Problem
from partopt.plan import Plan
from partopt.search import contest
from partopt.topology import Topology, resized

Stated = Callable[[Topology, int], Problem]  # the problem on a topology, the batch so many times as large


def scaling(topology: Topology, devices: Sequence[int], planner: str | None, weak: bool, stated: Stated) -> list[Plan]:
    """The judged plan on each number of `devices`, of `planner` or the best of all.

    Strong scaling keeps the batch of an iteration, weak scaling lets it grow with the devices, from the first number on. Raises
    PartoptError for numbers that the topology cannot be cut down or grown to.
    """
    plans: list[Plan] = []
    for count in devices:
        problem = stated(resized(topology, count), count // devices[0] if weak else 1)
        problem.progress("scaling", len(plans), len(devices))
        names = contest.contestants(problem) if planner is None else [planner]
        with contest.quiet():
            found = contest.plans_of(names, problem)
        plans.append(found[contest.best_of(found, problem.memory_bytes)])
    return plans
