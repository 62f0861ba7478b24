"""The least iteration of a synchronous schedule: one pass + X + U, with X what the stage that paces adds for the other microbatches and U
the largest update. Intervals of U are searched for the least X, those first whose bound is the least.
"""

from __future__ import annotations

import heapq
from functools import partial

from partopt.cost.kernels import passed_s
from partopt.cost.period import parts_of_iteration
from partopt.cost.problem import Partition
from partopt.planners.families import Screened
from partopt.planners.searching import ENDLESS, TOLERANCE, Counts, least


def least_iteration(probe: Screened, counts: Counts, value: float) -> tuple[Partition | None, float, float]:
    """The plan with the least iteration below `value`, that iteration, and a lower bound.

    An interval (low, high] of U in which X is at least x holds no iteration shorter than one pass + x + low. It is searched up to its
    middle or, where that was done before, up to its end.
    """
    problem, M = probe.problem, probe.layers.M
    naive, compute = problem.schedule == "naive", float(probe.layers.compute[probe.layers.first_mode, -1])
    one_pass = M * compute if naive else float(passed_s(probe.layers, 0, problem.chain.layers, probe.layers.first_mode))
    first = 0.0 if naive else max(0.0, (compute * M / problem.topology.devices - one_pass) * (1 - TOLERANCE))
    best, lower, slack, unsettled = None, one_pass, TOLERANCE * one_pass, ENDLESS
    intervals = [(one_pass + first, 0.0, ENDLESS, first, True)]  # bound, low, high, x, and whether all of it is searched at once
    while intervals:
        lower, low, high, x, whole = heapq.heappop(intervals)
        if lower >= value - 2 * slack:
            break
        middle = high if whole else (low + high) / 2
        upper = value - one_pass - low if value < ENDLESS else ENDLESS
        find = partial(_within, probe, middle, counts)
        found, _, bound = least(find, lambda plan: parts_of_iteration(plan, problem)[1], x, upper, slack)
        if middle < high:
            heapq.heappush(intervals, (one_pass + x + middle, middle, high, x, True))
        if found is not None:
            passing, _, update = parts_of_iteration(found, problem)
            seconds = sum(parts_of_iteration(found, problem))
            if passing > one_pass * (1 + 10 * TOLERANCE):  # it recomputes: a plan with a larger X may pass a microbatch on sooner
                unsettled = min(unsettled, one_pass + bound + low)
            best, value = (found, seconds) if seconds < value else (best, value)
            if update - slack > low:
                heapq.heappush(intervals, (one_pass + bound + low, low, min(update, middle) - slack, bound, False))
    else:
        lower = value
    return best, value, min(lower, value, unsettled)


def _within(probe: Screened, U: float, counts: Counts, X: float) -> Partition | None:
    """A plan within both bounds of a synchronous schedule."""
    return probe.find(X, U, counts, probe.problem.stages)
