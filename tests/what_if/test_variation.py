"""Plans on devices that vary: what is drawn, what it costs, and whose slowness costs most."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from partopt.errors import PartoptError
from partopt.simulator.execution import execute
from partopt.simulator.kernel import simulate
from partopt.what_if.advice import slow_rank
from partopt.what_if.simulation import simulate as simulate_plan
from partopt.what_if.variation import MOST_RANKS, Variation, _Runs, vary
from tests.examples import examples
from tests.simulator.cases import case, consecutive
from tests.simulator.plans import plan_of


def sync(forward=(1.0, 1.0, 1.0, 1.0), microbatches=8):
    options = {"schedule": "1f1b", "microbatches": microbatches}
    return plan_of([1] * len(forward), list(forward), [2 * each for each in forward], **options)


@pytest.mark.parametrize("plan", [sync(), plan_of([2, 1]), plan_of([1, 1, 1])])
def test_without_jitter_and_slowness_it_is_the_plain_run_to_the_bit(plan):
    execution = execute(plan)
    plain = execution.makespan_s if plan.microbatches else execution.period_s
    for variation in (Variation(), Variation(slow={0: 1.0}), Variation(slow={1: 1.0})):
        varied = vary(execution, replace(variation, draws=1))
        assert varied.p50_s == varied.p95_s == varied.plain_s == plain
        assert varied.p50_loss == 0


def test_factors_have_mean_one_and_the_deviation_that_was_given():
    runs = _Runs(execute(sync(microbatches=4000)), Variation(jitter=0.2))
    factors = runs.factors(0)
    assert len(factors) > 30_000
    assert factors.mean() == pytest.approx(1, abs=0.005)
    assert factors.std() == pytest.approx(0.2, rel=0.02)


def test_seeds_give_the_same_draws_and_others_other_ones():
    execution = execute(sync())
    first, again, other = (
        vary(execution, Variation(jitter=0.1, seed=seed, draws=9)) for seed in (7, 7, 8)
    )
    assert first == again
    assert other.p50_s != first.p50_s
    runs, more = (_Runs(execution, Variation(jitter=0.1, draws=draws)) for draws in (9, 99))
    assert np.array_equal(runs.factors(3), more.factors(3))  # more draws keep those before them
    assert not np.array_equal(runs.factors(3), runs.factors(4))
    ratio, text = (simulate_plan(sync(), jitter=each).varied for each in (0.05, "5%"))
    assert ratio == text
    assert ratio.draws == 50


def test_the_percentiles_are_those_of_the_draws():
    """Of 21 draws in order the 11th and the 20th."""
    variation = Variation(jitter=0.1, draws=21)
    execution = execute(sync())
    runs = _Runs(execution, variation)
    drawn = sorted(runs.seconds(runs.factors(draw)) for draw in range(21))
    varied = vary(execution, variation)
    assert (varied.p50_s, varied.p95_s) == pytest.approx((drawn[10], drawn[19]))


def test_a_pipeline_loses_more_than_its_devices_vary_in_the_mean():
    """A device waits for the latest of its neighbours; a device alone loses nothing in the mean,
    and a slow one in all that it does.
    """
    varied = vary(execute(sync(microbatches=64)), Variation(jitter=0.3))
    assert 0 < varied.p50_loss < varied.p95_loss
    varied = vary(execute(plan_of([1])), Variation(jitter=0.1, draws=20))
    assert varied.p50_loss == pytest.approx(0, abs=0.01)
    varied = vary(execute(sync([1.0])), Variation(slow={0: 1.25}, draws=1))
    assert (varied.plain_s, varied.p50_s) == (24, 30)
    assert varied.p50_loss == pytest.approx(0.25)


def test_an_asynchronous_pipeline_is_taken_at_its_mean_pace_over_many_microbatches():
    execution = execute(plan_of([1, 1, 1]))
    varied = vary(execution, Variation(jitter=0.05, draws=20))
    assert varied.microbatches == execution.microbatches + 512
    assert varied.plain_s == 3
    assert 3 < varied.p50_s < 3.3
    assert varied.p50_s <= varied.p95_s


@pytest.mark.slow
@examples(80)
@given(
    st.integers(1, 5),
    st.integers(1, 8),
    st.sampled_from(["1f1b", "gpipe", "naive", "zb-h1", "1f1b-eager", "pipedream"]),
    st.integers(0, 2**32),
)
def test_no_straight_pipeline_is_faster_for_slower_actions(stages, microbatches, name, seed):
    """Without messages on ports, an action begins at the latest of what it waits for."""
    chance = np.random.default_rng(seed)
    made = case(name, consecutive([1] * stages), microbatches)
    less = chance.lognormal(0, 0.5, len(made.order.kind))
    more = less * (1 + chance.random(len(less)) * chance.integers(0, 2, len(less)))
    slow, slower = (
        simulate(made.order, replace(made.work, scale=each)).makespan for each in (less, more)
    )
    assert slow <= slower


def test_the_slowest_stage_is_the_one_whose_slowness_costs_most():
    varied = vary(execute(sync([1.0, 1.0, 2.0, 1.0], 32)), Variation())
    assert varied.sensitivity[0].rank == 2
    worst = varied.sensitivity[0]
    assert 0.9 < worst.per_second <= 1
    assert worst.loss == pytest.approx(0.1, rel=0.1)
    [point] = slow_rank(varied, True)
    assert point.code == "slow-rank"
    assert point.text.startswith("slowness of rank 2 costs most: where it is 10% slower, an iter")


def test_one_second_more_of_work_is_one_second_more_where_nothing_is_parallel():
    """Of ranks that wait for each other: exchanges of gradients are no work of theirs."""
    for replicas in ([1], [1] * 3, [2]):
        plan = plan_of(replicas, schedule="naive", microbatches=4, weights=[8] * len(replicas))
        for each in vary(execute(plan), Variation()).sensitivity:
            assert each.per_second == pytest.approx(1)


def test_ranks_that_are_slow_stay_so_while_others_are_made_slower():
    varied = vary(execute(sync(microbatches=32)), Variation(slow={1: 2.0}, draws=1))
    assert varied.sensitivity[0].rank == 1
    assert varied.sensitivity[0].loss == pytest.approx(0.1, rel=0.1)
    assert all(each.loss >= 0 and each.per_second <= 1 + 1e-9 for each in varied.sensitivity)


@pytest.mark.slow
def test_of_many_ranks_one_for_each_stage_is_tried_and_ranks_alike_are_counted():
    varied = vary(execute(plan_of([MOST_RANKS, 2])), Variation())
    assert sorted(each.rank for each in varied.sensitivity) == [0, MOST_RANKS]
    [point] = slow_rank(vary(execute(plan_of([1, 3])), Variation()), False)
    assert "of 3 others" in point.text or "of 2 others" in point.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"jitter": "5"}, "not a share in percent"),
        ({"jitter": 1.5}, "from 0% to 100%"),
        ({"jitter": float("nan")}, "from 0% to 100%"),
        ({"slow": {0: 0}}, "more than 0"),
        ({"slow": {0: float("inf")}}, "more than 0"),
        ({"slow": {0: True}}, "more than 0"),
        ({"slow": {9: 1.5}}, "rank 9 has no work"),
        ({"seed": 3}, "nothing is drawn"),
        ({"draws": 3}, "nothing is drawn"),
        ({"jitter": 0.1, "draws": 0}, "draws"),
        ({"jitter": 0.1, "seed": -1}, "whole number"),
        ({"jitter": 0.1, "seed": 2**63}, "whole number"),
        ({"jitter": 0.1, "draws": 10**9}, "more than are simulated"),
    ],
)
def test_what_cannot_be_is_refused(options, message):
    with pytest.raises(PartoptError, match=message) as error:
        simulate_plan(sync(), **options)
    assert error.value.hint
