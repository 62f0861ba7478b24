"""Bounds on what stages take together, which raise the bound of the probes.

Probes know one stage at a time. A refuter shows that no plan takes so many seconds from what all
stages send over a bus or the port of a server, from what follows on what in an iteration, or from
what the stages of an asynchronous pipeline hold, one behind the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from partopt.cost.problem import Problem
from partopt.planners.optimal import bus, pipelines, prefixes, servers, suffixes

_NEAR = 1e-6  # relative: the interval that holds the bound is halved until it is as narrow
_GROWTH = 4  # of the interval, while its end is refuted too


def refuter(problem: Problem) -> Callable[[float], bool]:
    """Whether no plan takes so many seconds."""
    refuters = [each.refuter(problem) for each in (bus, servers, prefixes, suffixes, pipelines)]
    return lambda T: any(refutes(T) for refutes in refuters)


def bound_s(problem: Problem, lower_s: float) -> float:
    """Seconds that no plan goes below, at least `lower_s`, which is a bound already.

    Infinite where no plan fits.
    """
    if lower_s <= 0:
        return lower_s
    refutes = refuter(problem)
    low, high = lower_s, lower_s * (1 + _NEAR)
    while high < math.inf and refutes(high):
        low, high = high, lower_s + _GROWTH * (high - lower_s)
    if high == math.inf:
        return high
    while high > low * (1 + _NEAR):
        middle = (low + high) / 2
        low, high = (middle, high) if refutes(middle) else (low, middle)
    return low
