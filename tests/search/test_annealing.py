"""The one loop of annealing, on whole numbers, and the efforts that say how long it goes on."""

from __future__ import annotations

import random
from dataclasses import replace
from math import inf

import pytest

from partopt.options import EFFORTS
from partopt.search.annealing import anneal
from partopt.search.effort import BY_EFFORT, NORMAL, QUICK, THOROUGH
from partopt.search.evaluator import Evaluator

PARAMS = QUICK.grids.annealing.of_stages(10)
BEST = 17


class Line(Evaluator[int]):
    """A number takes as long as it is far from `BEST`, and a second; all of them are listed."""

    def __init__(self, bound: float = 1.0) -> None:
        self.spent, self.bound, self.listed = 0.0, bound, list[int]()

    def seconds(self, plan: int, allowed_s: float = inf) -> float:
        if plan not in self.listed:
            self.listed.append(plan)
            self.spent += 1
        return 1.0 + abs(plan - BEST)

    def lower_bound_s(self, plan: int, allowed_s: float = inf) -> float:
        return self.bound * (1.0 + abs(plan - BEST))


def steps_of(seed: int = 0):
    rng = random.Random(seed)
    return lambda now: (rng.random(), now + rng.choice((-1, 1)))


@pytest.mark.parametrize("seed", range(5))
def test_steps_lead_to_the_best(seed):
    assert anneal(0, steps_of(seed), Line(), PARAMS, 100.0) == (1.0, BEST)


def test_steps_end_at_a_plan_that_is_good_enough():
    assert anneal(0, steps_of(), Line(), PARAMS, 100.0, enough_s=6.0) == (6.0, BEST - 5)


def test_no_more_is_spent_than_the_budget():
    line = Line()
    seconds, best = anneal(0, steps_of(), line, PARAMS, 8.0)
    assert line.spent == 8.0
    assert (seconds, best) == min((1.0 + abs(plan - BEST), plan) for plan in line.listed)


def test_what_a_bound_rules_out_is_not_evaluated():
    """A cold walk takes no step up, whose bound is what it takes."""
    line = Line()
    anneal(0, steps_of(), line, replace(PARAMS, hot=1e-9, cold=1e-9), 100.0)
    assert line.listed == list(range(BEST + 1))


@pytest.mark.parametrize("patience", [3, 30])
def test_patience_ends_where_steps_lead_nowhere(patience):
    asked = list[int]()

    def nowhere(now: int) -> tuple[float, None]:
        asked.append(now)
        return 0.5, None

    params = replace(PARAMS, patience=patience)
    assert anneal(3, nowhere, Line(), params, 1000.0) == (15.0, 3)
    assert patience <= len(asked) <= patience + 2


def test_the_share_that_is_spent_is_reported():
    reported = list[float]()
    anneal(0, steps_of(), Line(), PARAMS, 10.0, 0.0, reported.append)
    assert reported == sorted(reported)
    assert reported[0] == 0.0 and 0.8 <= reported[-1] < 1.0


def test_every_effort_goes_on_where_the_one_before_it_ends():
    assert tuple(BY_EFFORT) == EFFORTS
    assert THOROUGH.stages == (QUICK, NORMAL, THOROUGH)
    for less, more in ((QUICK, NORMAL), (NORMAL, THOROUGH)):
        assert more.before == less
        assert less.plans.budget < more.plans.budget and less.grids.budget <= more.grids.budget
        assert less.variants < more.variants
