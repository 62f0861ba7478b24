"""The search for the least bound that a probe can meet.

Bisection that jumps to what each plan found really takes narrows the interval between the largest
bound without a plan and the best plan, until they meet: Nicol, "Rectilinear partitioning of
irregular data parallel computations", JPDC 1994; Pinar and Aykanat, "Fast optimal load balancing
algorithms for 1D partitioning", JPDC 2004.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from partopt.cost.problem import Partition
from partopt.cost.tolerances import SUM

_STEPS = 300  # more than the digits of a number; so many are never taken
_GROWING = 14  # steps that grow the bound, ever faster, before it becomes infinite
# relative gaps below which every fourth step, or every second, tries just below the best
_CLOSE = 1e-3
_CLOSEST = 1e-6


def bisect_minimum(
    find: Callable[[float], Partition | None],
    measure: Callable[[Partition], float],
    lower: float,
    upper: float,
    slack: float,
    rough: bool = False,
) -> tuple[Partition | None, float, float]:
    """The plan with the least measure below `upper`, that measure, and the largest bound refuted.

    A bound is refuted where it has no plan; the measure is `upper` where there is no plan at all.
    `find` returns a plan for a bound, which need not be the best, or `None`; no plan is below
    `lower`; `upper` is infinite where no plan is known, and `rough` where it is far from the best:
    then what is just below it is not asked first. Measure and bound meet within `slack`.
    """
    best, value, growth = None, upper, 1.001
    bound = lower + 2 * slack if upper == math.inf else upper - slack
    if rough and upper < math.inf:
        bound = (lower + upper) / 2
    if upper <= lower + 2 * slack:
        return None, upper, upper
    for step in range(_STEPS):
        found = find(bound)
        if found is None:
            lower = bound
        else:
            best, value = min((best, value), (found, measure(found)), key=lambda pair: pair[1])
            slack = max(slack, SUM * value)
        if lower == math.inf or value - lower <= 2 * slack:
            break
        if value == math.inf:
            bound = max(bound * growth, 1e9 * slack) if step < _GROWING else math.inf
            growth = min(growth**2, 2.0)
        else:
            bound = _next_bound(lower, value, slack, step)
    return best, value, lower


def _next_bound(lower: float, value: float, slack: float, step: int) -> float:
    """Half way between the two; where they are close, at times the value just below the best."""
    gap = value / lower - 1 if lower > 0 else 1.0
    if (gap < _CLOSE and step % 4 == 3) or (gap < _CLOSEST and step % 2):
        return value - slack
    return (lower + value) / 2
