"""Simulated annealing in the simulator: steps from plan to plan, ever fewer of which lead up.

What a bound rules out is not simulated (Kirkpatrick, Gelatt and Vecchi, "Optimization by simulated
annealing", Science 1983).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TypeVar

from partopt.cost.problem import ReportShare, ignore_share
from partopt.search.effort import AnnealingParams
from partopt.search.evaluator import Evaluator

REPORTED = 50  # steps between two reports of progress of which none is simulated

T = TypeVar("T")


def anneal(
    begin: T,
    propose: Callable[[T], tuple[float, T | None]],
    evaluator: Evaluator[T],
    params: AnnealingParams,
    budget: float,
    enough_s: float = 0.0,
    report_progress: ReportShare = ignore_share,
) -> tuple[float, T]:
    """The seconds of the best plan that steps from one lead to, and the plan.

    `propose` draws, in an order of its choice, a number from [0, 1), by which a step may lead up,
    and a neighbour, None where the step leads to none. Steps end where `budget` is spent, as
    `evaluator.spent` counts, or at a plan of `enough_s` seconds.
    """
    now = best = begin
    now_s = best_s = math.inf
    for share in _shares_spent(evaluator, budget, params, report_progress):
        if best_s == math.inf:  # where `begin` is new, what it takes is spent, too
            now_s = best_s = evaluator.seconds(begin)
        if best_s <= enough_s:
            break
        heat = params.hot * (params.cold / params.hot) ** share
        drawn, other = propose(now)
        allowed_s = now_s * (1 - heat * math.log(1 - drawn))
        if other is None or evaluator.lower_bound_s(other, allowed_s) >= allowed_s:
            continue
        seconds = evaluator.seconds(other, allowed_s)
        if seconds < allowed_s:
            now, now_s = other, seconds
            if now_s < best_s:
                best, best_s = now, now_s
    return evaluator.seconds(best), best


def _shares_spent(
    evaluator: Evaluator[T], budget: float, params: AnnealingParams, report_progress: ReportShare
) -> Iterator[float]:
    """Before every step the share of the budget that is spent.

    They end with the budget, or its steps, or where too many of these in a row spent nothing.
    """
    before = seen = evaluator.spent
    tries = idle = 0
    while evaluator.spent - before < budget and tries < params.steps * budget:
        tries += 1
        idle = idle + 1 if evaluator.spent == seen else 0
        seen = evaluator.spent
        if idle > params.patience:
            return
        share = (seen - before) / budget
        if not idle or tries % REPORTED == 1:
            report_progress(share)
        yield share
