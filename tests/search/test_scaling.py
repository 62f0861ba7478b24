import pytest

from partopt.cost.problem import problem_of
from partopt.errors import PartoptError
from partopt.search import contest
from partopt.search.scaling import scaling
from tests.helpers import flat, two_level, uniform_profile


def asynchronous(on):
    return problem_of(uniform_profile(8), on)


def test_each_plan_is_the_best_on_its_own_number_of_devices():
    plans = scaling(two_level(2, 4), [1, 2, 4, 6], None, asynchronous)
    assert [plan.topology.devices for plan in plans] == [1, 2, 4, 6]
    assert [[level.size for level in plan.topology.levels] for plan in plans] == [
        [1, 1],
        [2, 1],
        [2, 2],
        [2, 3],
    ]
    for plan in plans:
        problem = asynchronous(plan.topology)
        found = contest.plans_of(contest.contestants(problem), problem)
        assert plan == found[contest.best_of(found, None)]


def test_a_planner_that_is_named_makes_every_plan():
    assert [plan.planner for plan in scaling(flat(4), [2, 4], "straight", asynchronous)] == [
        "straight"
    ] * 2


def test_numbers_are_judged_before_any_plan_is_made(monkeypatch):
    monkeypatch.setattr(contest, "plans_of", lambda *_: pytest.fail("it planned first"))
    with pytest.raises(PartoptError, match="9 devices do not fill"):
        scaling(two_level(8, 4), [8, 9], None, asynchronous)


def test_a_planner_that_refuses_a_number_says_so():
    with pytest.raises(PartoptError, match="unknown planner"):
        scaling(flat(4), [2], "gpip", asynchronous)
