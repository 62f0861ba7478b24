"""The best of all pipelines, beside simulating every one of them."""

import math
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from partopt.cost.price import price
from partopt.search import all_pipelines
from partopt.search.all_pipelines import best_below, none_within
from partopt.search.warmup import simulate_at_warmup
from tests.examples import examples
from tests.planners.exhaustive import profiled
from tests.planners.test_pipelines import OPTIONS, SMALL, drawn, simulated_s

NEAR = 1e-9


def contended(model, *drawn_besides):
    """A problem on few devices, whose messages wait for each other; as much comes back as goes."""
    return profiled(drawn(replace(model, back=model.a), *drawn_besides))


MODEL, CLUSTER, SCHEDULE, _, MEMORY = SMALL
DRAWN = st.builds(
    contended,
    MODEL,
    CLUSTER,
    SCHEDULE,
    st.integers(4, 5),  # as many as devices: with fewer, replicas that get none are no plans
    MEMORY,
    *OPTIONS,
)


@examples(30)
@given(DRAWN, st.floats(0.3, 0.99), st.floats(1.0001, 2.0))
def test_what_is_found_is_the_best_of_all_plans_at_any_warmup(given, below, above):
    least = simulated_s(given)
    assume(0 < least < math.inf)
    found = best_below(given, below * least, above * least)
    assert found.lower_s == pytest.approx(least, rel=NEAR)
    partition, warmups = found.best
    plan = simulate_at_warmup(price(partition, given, "optimal"), warmups or ())
    assert plan.fits
    assert plan.predicted.iteration_s == pytest.approx(least, rel=NEAR)


@examples(30)
@given(DRAWN, st.floats(0.3, 0.99))
def test_of_the_best_plan_nothing_is_left_to_prove(given, below):
    least = simulated_s(given)
    assume(0 < least < math.inf)
    found = best_below(given, below * least, least)
    assert found.best is None
    assert found.lower_s == pytest.approx(least, rel=1e-6)
    assert none_within(given, least * (1 - NEAR))
    assert not none_within(given, least * (1 + NEAR))


@examples(20)
@given(DRAWN, st.sampled_from([1, 2, 3]))
def test_only_plans_of_as_many_stages_as_are_asked_for_count(given, stages):
    given = replace(given, stages=stages)
    least = simulated_s(given)
    assume(0 < least < math.inf)
    found = best_below(given, least / 2, 2 * least)
    assert found.lower_s == pytest.approx(least, rel=NEAR)
    assert len(found.best[0].stages) == stages


@examples(20)
@given(DRAWN, st.integers(1, 6))
def test_where_the_work_does_not_suffice_no_more_is_claimed(given, simulations):
    least = simulated_s(given)
    assume(0 < least < math.inf)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(all_pipelines.SIMULATIONS, "normal", simulations)
        found = best_below(given, least / 2, 2 * least)
        assert found.lower_s <= least * (1 + NEAR)
        patch.setitem(all_pipelines.SIMULATIONS, "normal", 5_000)
        patch.setitem(all_pipelines.WORK, "normal", 100 * simulations)
        assert best_below(given, least / 2, 2 * least).lower_s <= least * (1 + NEAR)
        assert best_below(replace(given, effort="quick"), least / 2, 2 * least).best is None
