"""Plans improved in the simulator: never worse than what they began with, always the same."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import chain as chained
from math import inf

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from partopt import planners
from partopt.cost.pricing import price
from partopt.cost.problem import Problem, problem_of
from partopt.errors import PartoptError
from partopt.planners import optimal
from partopt.planners.costs import StageCosts
from partopt.planners.layouts import Shape, layouts_of
from partopt.schedules import SCHEDULES
from partopt.search import contest, improve
from partopt.search.annealing import anneal
from partopt.search.bound import lower_bound_s
from partopt.search.effort import SearchParams
from partopt.search.evaluator import Candidate, PlanEvaluator
from partopt.search.steps import neighbour, step
from partopt.search.warmup import simulate_with_best_warmup
from tests.examples import examples
from tests.helpers import flat, measurement, profile_of, two_level
from tests.planners.problems import chain, problem, profiled, topology
from tests.planners.test_optimal import problems, shapes
from tests.search.problems import slow, spending

PLANNED = ["pipedream", "pipedream-2bw", "1f1b", "1f1b-eager", "gpipe", "zb-h1"]
WORSE = 1.001  # times the best of all plans: the chosen one may be so much slower


def drawn(seed: int, name: str, share: float | None, cluster: int) -> Problem:
    """Four or five layers on four devices, with a share of the memory of it all."""
    draw = random.Random(seed)
    layers = range(draw.randint(4, 5))
    forward = [draw.uniform(0.5e-3, 3e-3) for _ in layers]
    outputs, weights = (
        [round(draw.uniform(0.1, 1) * draw.choice(sizes)) for _ in layers]
        for sizes in ((10**4, 10**6, 5 * 10**6), (10**5, 10**7))
    )
    measured = measurement(
        forward,
        [2 * seconds for seconds in forward],
        outputs,
        stash_groups=[((layer,), 10**7) for layer in layers],
        optimizer_s=1e-3,
    )
    memory = None if share is None else round(share * (4 * sum(weights) + 2e7 * len(layers)))
    asynchronous = SCHEDULES[name].asynchronous

    return problem_of(
        profile_of([measured], weights),
        [flat(4, 1e9, 1e-4), two_level(2, 2, 1e10, 1e9)][cluster],
        schedule=name,
        microbatches=None if asynchronous else draw.choice([4, 8]),
        memory_bytes=memory,
    )


@pytest.mark.slow
@pytest.mark.parametrize("limited", [False, True])
@pytest.mark.parametrize("name", PLANNED)
def test_no_plan_that_there_is_is_faster(name, limited):
    """Each schedule is limited on the one cluster and free on the other, by turns."""
    number = PLANNED.index(name)
    problem = drawn(number, name, 0.5 if limited else None, (number + limited) % 2)
    best_s = inf
    costs = StageCosts(problem)
    for shape in chained.from_iterable(shapes(costs, own) for own in layouts_of(problem.topology)):
        try:
            plan = simulate_with_best_warmup(price(shape.partition(), problem, "manual"))
        except PartoptError:
            continue
        if plan.fits:
            best_s = min(best_s, plan.predicted.period_s)
    try:
        found = contest.plan_alone("optimal", problem, SearchParams.at("quick"))[0]
    except PartoptError:
        assert best_s == inf
        return
    assert found.fits
    assert found.predicted.period_s <= WORSE * best_s
    assert found.certificate.lower_bound_s / (problem.microbatches or 1) <= best_s * (1 + 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pipedream", "zb-h1"])
def test_the_same_problem_gives_the_same_plan(name):
    asynchronous = SCHEDULES[name].asynchronous
    problem = slow(
        12,
        two_level(2, 4, 12e9, 1.25e9),
        schedule=name,
        microbatches=None if asynchronous else 8,
    )
    params = SearchParams.at("quick")
    found = [contest.plan_alone("optimal", problem, params) for _ in range(2)]
    assert found[0] == found[1]


@pytest.mark.slow
def test_annealing_improves_what_the_dynamic_program_finds():
    problem = slow(20, two_level(4, 4, 12e9, 1.25e9), 1, schedule="1f1b", microbatches=16)
    decided = simulate_with_best_warmup(planners.plan("optimal", problem))
    found, _ = contest.plan_alone("optimal", problem, SearchParams.at("quick"))
    assert found.predicted.period_s < 0.99 * decided.predicted.period_s


@pytest.mark.parametrize(("heat", "climbs"), [(1e-9, False), (1.0, True)])
def test_annealing_climbs_where_it_is_hot_and_gives_the_best_that_it_was_at(heat, climbs):
    problem = slow(9, flat(4, 2e9), schedule="gpipe", microbatches=8)
    evaluator = PlanEvaluator(StageCosts(problem))
    _, begin = evaluator.best(Candidate(optimal.plans(evaluator.costs)[-1]))
    params = replace(SearchParams.at("quick").plans.annealing, hot=heat, cold=heat)
    at, rng = list[Candidate](), random.Random(0)

    def propose(now: Candidate) -> tuple[float, Candidate | None]:
        at.append(now)
        other = neighbour(now, evaluator, rng)
        return rng.random(), other

    best_s, _ = anneal(begin, propose, evaluator, params.of_stages(begin.stages), 100.0)
    seconds = [evaluator.seconds(plan) for plan in at]
    assert best_s == min(seconds)
    assert (seconds != sorted(seconds, reverse=True)) == climbs


@pytest.mark.slow
def test_more_effort_spends_more(monkeypatch):
    evaluators: list[PlanEvaluator] = []
    monkeypatch.setattr(
        improve,
        "PlanEvaluator",
        lambda costs: evaluators.append(PlanEvaluator(costs)) or evaluators[-1],
    )
    for params in spending(20.0, 60.0, 180.0).stages:
        problem = slow(9, flat(4, 2e9), schedule="gpipe", microbatches=8)
        contest.plan_alone("optimal", problem, params)
    quick, normal, thorough = (evaluator.spent for evaluator in evaluators)
    assert quick < normal < thorough


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.01, 1.01])
def test_nothing_is_improved_that_cannot_win(monkeypatch, share):
    """What is to be beaten is below the bound, or so little above that no plan is near it."""
    problem = slow(20, two_level(4, 4, 12e9, 1.25e9), 2, schedule="gpipe", microbatches=8)
    monkeypatch.setattr(improve, "anneal", lambda *_: pytest.fail("annealed"))
    beat_s = share * lower_bound_s(problem)
    plan, _ = contest.plan_alone("optimal", problem, SearchParams.at("quick"), beat_s)
    assert plan.predicted.period_s > (1 + SearchParams.at("quick").hoped) * beat_s


def test_steps_lead_to_more_and_to_fewer_stages():
    costs, rng = StageCosts(slow(9, flat(8))), random.Random(0)
    shape = Shape(
        tuple((rank,) for rank in range(8)), (0, 3, 6, 9), (2, 3, 3), (0, 0, 0), (None,) * 3
    )
    found = (step(shape, costs, rng) for _ in range(200))
    assert {other.stages for other in found if other} == {2, 3, 4}


@pytest.mark.slow
@examples(60, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(problems(layers=7, devices=8), st.integers(0, 10**6), st.booleans())
def test_steps_lead_to_plans_of_all_layers_on_places_that_there_are(given, seed, asked):
    costs, rng = StageCosts(profiled(given)), random.Random(seed)
    starts = optimal.plans(costs)
    if not starts:
        return
    shape = starts[-1]
    if asked:
        given = given.with_(stages=shape.stages)
        costs = StageCosts(profiled(given))
    for _ in range(60):
        shape = step(shape, costs, rng) or shape
        assert shape.bounds[0] == 0 and shape.bounds[-1] == costs.N
        assert all(i < j for i, j in zip(shape.bounds, shape.bounds[1:], strict=False))
        assert len(shape.bounds) - 1 == shape.stages == len(shape.idle) == len(shape.recompute)
        assert min(shape.counts) >= 1 and shape.spans[-1][1] <= len(shape.places)
        assert not costs.even or len(set(map(len, shape.ranks))) == 1
        assert given.request.stages in (None, shape.stages)


def test_the_deepest_warm_up_fills_the_room_that_there_is():
    """A layer and a microbatch in flight take 38 or 39 bytes, another one up to 12 more."""
    given = problem(chain([1] * 3, [1] * 3, [1] * 2, [9] * 3), topology((3, 1.0)), memory_bytes=52)
    places = tuple((rank,) for rank in range(3))
    shape = Shape(places, (0, 1, 2, 3), (1, 1, 1), (0, 0, 0), (None,) * 3)
    evaluator = PlanEvaluator(StageCosts(given))
    assert evaluator.warmups(Candidate(shape, evaluator.warmup_rules[-1])) == (1, 1, 0)


@pytest.mark.slow
@examples(40, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(problems(layers=6, devices=6), st.integers(0, 10**6))
def test_a_warm_up_fits_and_takes_in_no_more_than_comes(given, seed):
    evaluator, rng = PlanEvaluator(StageCosts(profiled(given))), random.Random(seed)
    starts = optimal.plans(evaluator.costs)
    if not starts or not evaluator.entry.takes_warmup:
        return
    found = Candidate(rng.choice(starts))
    for _ in range(30):
        found = neighbour(found, evaluator, rng) or found
        warmups = evaluator.warmups(found)
        room = evaluator.stages(found.shape).room
        for w, own, most in zip(warmups, found.shape.ranks, room, strict=True):
            assert 0 <= w <= max(0, most - 1)
            assert given.microbatches is None or w < -(-given.microbatches // len(own))
