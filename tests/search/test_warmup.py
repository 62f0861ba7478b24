"""The warm-up search beside every warm-up there is, simulated one by one, and beside closed
forms.
"""

import dataclasses
import itertools
import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from partopt.cost.pricing import price, under
from partopt.cost.problem import CONTIGUOUS, Partition, consecutive
from partopt.documents.engine import Engine
from partopt.documents.plan import Plan
from partopt.errors import PartoptError
from partopt.search import warmup
from partopt.search.warmup import (
    ENDLESS,
    WORTHWHILE,
    Stages,
    simulate_with_best_warmup,
    stages_of,
    try_warmup,
)
from partopt.simulator.execution import execute, simulate_plan
from tests.examples import examples
from tests.helpers import BLOCKING, flat, limited, two_level
from tests.search.problems import slow
from tests.simulator.plans import plan_of


def period_at(plan: Plan, depth: tuple[int, ...] | list[int]) -> float:
    """What the plan does at a warm-up; infinite where it deadlocks."""
    try:
        return execute(under(plan, warmups=depth)).period_s
    except PartoptError:
        return math.inf


def shortest(plan: Plan, deepest: int) -> float:
    """The shortest period of all warm-ups up to `deepest`, of the last stage up to 1."""
    depths = [range(deepest + 1)] * (len(plan.stages) - 1)
    return min(period_at(plan, depth) for depth in itertools.product(*depths, range(2)))


def depths_of(plan: Plan) -> list[int]:
    return [stage.warmup for stage in plan.stages]


@pytest.mark.parametrize(
    ("replicas", "formula"),
    [
        ([2, 1, 1], 1.5),
        ([1, 2], 1.5),
        ([3, 2], 4 / 3),
        ([2, 3], 4 / 3),
        ([1, 2, 1], 2.0),
        ([1, 1, 3], 5 / 3),
    ],
)
def test_blocking_all_reduces_ask_for_more_than_the_formula(replicas, formula):
    """Stages of 3 s for each replica: the loads allow 3 s a microbatch."""
    plan = plan_of(replicas, engine=BLOCKING)
    best = simulate_with_best_warmup(plan)
    assert simulate_plan(plan).predicted.period_s == pytest.approx(3.0 * formula)
    assert best.predicted.period_s == pytest.approx(3.0)
    assert best.predicted.formula_period_s == pytest.approx(3.0 * formula)
    assert period_at(plan, depths_of(best)) == pytest.approx(3.0)
    assert best.noam == best.stages[0].in_flight == best.stages[0].warmup + 1


@pytest.mark.parametrize("replicas", [[1, 3, 1], [2, 3, 1], [1, 5, 1]])
def test_a_formula_that_deadlocks_is_left_for_a_warmup_that_does_not(replicas):
    plan = plan_of(replicas, engine=BLOCKING)
    with pytest.raises(PartoptError, match=r"deadlock|wait"):
        simulate_plan(plan)
    best = simulate_with_best_warmup(plan)
    assert best.predicted.period_s == pytest.approx(3.0)
    assert best.predicted.formula_period_s is None


@pytest.mark.parametrize(("stages", "latency"), [(2, 1.0), (3, 1.0), (4, 0.5), (4, 2.0), (4, 6.0)])
def test_latency_asks_for_more_than_the_formula(stages, latency):
    plan = plan_of([1] * stages, topology=flat(stages, 1.0, latency=latency))
    best = simulate_with_best_warmup(plan)
    assert best.predicted.formula_period_s == pytest.approx(3 + 2 * latency * (stages - 1) / stages)
    assert best.predicted.period_s == pytest.approx(3.0)


@pytest.mark.parametrize(
    "options", [{}, {"schedule": "pipedream-2bw"}, {"schedule": "1f1b", "microbatches": 4}]
)
def test_nothing_is_searched_where_the_formula_reaches_the_load(monkeypatch, options):
    plan = plan_of([2, 1, 1], **options)
    monkeypatch.setattr(warmup, "under", lambda *_, **__: pytest.fail("it tried another warm-up"))
    assert simulate_with_best_warmup(plan) == simulate_plan(plan)


@pytest.mark.parametrize("schedule", ["pipedream", "pipedream-2bw"])
def test_a_deeper_warmup_that_does_not_fit_is_not_taken(schedule):
    plan = plan_of([1, 4], engine=BLOCKING, schedule=schedule, weights=[1000, 1000])
    free, least = simulate_with_best_warmup(plan), simulate_plan(plan)
    assert free.peak_memory_bytes > least.peak_memory_bytes
    tight = limited(plan, least.peak_memory_bytes)
    assert simulate_with_best_warmup(tight) == simulate_plan(tight)
    between = simulate_with_best_warmup(limited(plan, free.peak_memory_bytes - 1))
    assert least.peak_memory_bytes <= between.peak_memory_bytes < free.peak_memory_bytes
    assert free.predicted.period_s < between.predicted.period_s <= least.predicted.period_s


def test_a_stage_with_room_leaves_it_where_those_in_front_would_wait():
    """Four stages of 3 s with room for two microbatches. A third stage that takes in two holds each
    for 9 s, and those in front hold theirs for longer: 9 s a microbatch. With one it is 6 s.
    """
    plan = limited(plan_of([1] * 4), 28)
    full = [1, 1, 1, 0]
    stages = stages_of(plan)
    assert stages.room == [2] * 4
    assert stages.warmups(("pace", 1.0)) == (1, 1, 0, 0)
    assert period_at(plan, full) == pytest.approx(9.0)
    best = simulate_with_best_warmup(plan)
    assert (depths_of(best), best.predicted.period_s) == ([1, 1, 0, 0], pytest.approx(6.0))


@pytest.mark.parametrize(
    ("replicas", "room", "extra", "expected"),
    [
        # nothing limits them: the devices behind, and 3 more
        ([1, 1, 1], [9, 9, 9], 3, (5, 4, 0)),
        # the first is full with two: the second takes in no more
        ([1, 1, 1], [2, 9, 9], 3, (1, 1, 0)),
        # the first has room for one more than it holds
        ([1, 1, 1], [7, 9, 9], 3, (5, 4, 0)),
        ([1, 1, 1], [6, 9, 9], 3, (5, 4, 0)),
        # the second is full, and the last holds one in any case
        ([1, 1, 1], [9, 2, 9], 3, (5, 1, 0)),
        # of two full replicas each of two gets what one holds; a single one gets what both hold
        ([2, 2, 1], [2, 9, 9], 8, (1, 1, 0)),
        ([2, 1, 1], [2, 9, 9], 8, (1, 3, 0)),
        ([1, 2, 1], [4, 9, 9], 8, (3, 1, 0)),
    ],
)
def test_a_stage_takes_in_no_more_than_a_full_stage_before_it_holds(
    replicas, room, extra, expected
):
    stages = Stages(replicas, room, [1.0] * 3, [0.0] * 3, None)
    assert stages.warmups((1, extra)) == expected


@pytest.mark.parametrize(
    ("replicas", "M", "expected"), [([1, 1, 1], 3, (2, 2, 0)), ([2, 2, 1], 7, (3, 3, 0))]
)
def test_no_more_forwards_come_first_than_an_iteration_has(replicas, M, expected):
    stages = Stages(replicas, [99] * 3, [1.0] * 3, [0.0] * 3, M)
    assert stages.warmups((1, 20)) == expected


@pytest.mark.slow
@examples(40, derandomize=True)
@given(st.data())
def test_within_a_limit_no_warmup_there_is_is_better(data):
    """Stages with room for one to three microbatches each."""
    S = data.draw(st.integers(2, 4))
    seconds = st.lists(st.integers(1, 4).map(float), min_size=S, max_size=S)
    plan = plan_of([1] * S, data.draw(seconds), data.draw(seconds))
    plan = limited(plan, data.draw(st.integers(14, 40)))
    stages = stages_of(plan)
    assume(stages is not None)
    every = itertools.product(*(range(min(most, 5)) for most in stages.room))
    least = min(period_at(plan, depth) for depth in every)
    assert simulate_with_best_warmup(plan).predicted.period_s == pytest.approx(least)


def test_what_does_not_fit_is_not_made_larger():
    plan = limited(plan_of([1, 4], engine=BLOCKING), 1)
    assert simulate_with_best_warmup(plan) == simulate_plan(plan)


def test_at_a_pace_unequal_replicas_do_not_lose_depth_stage_by_stage():
    """Stages of 7 and 5 replicas hold 14 and 10 microbatches, so that the last, by far the slowest,
    never waits; a stage that held no more than the one before would hold one a replica.
    """
    replicas = [7, 5] * 20 + [7]
    forward = [0.05 / 3 * r for r in replicas[:-1]] + [4 / 3 * 7]
    plan = plan_of(replicas, forward, [2 * forward_s for forward_s in forward])
    depths = stages_of(plan).warmups(("pace", 1.0))
    assert depths == (1,) * 40 + (0,)
    assert period_at(plan, depths) == pytest.approx(4.0)


def test_what_deadlocks_and_does_not_fit_is_a_plan_that_does_not_fit():
    plan = simulate_with_best_warmup(limited(plan_of([1, 3, 1], engine=BLOCKING), 1))
    assert not plan.fits
    assert plan.predicted.period_s < math.inf


def test_where_the_deepest_that_fits_deadlocks_stages_hold_what_they_do_in_turns():
    cluster = two_level(4, 8, 12e9, 1.25e9)
    problem = slow(40, cluster, memory_bytes=6 * 10**9, schedule="pipedream")
    stages = consecutive([0, 19, 30, 35, 36, 38, 40], [4, 4, 4, 12, 4, 4])
    plan = price(Partition(CONTIGUOUS, stages), problem, "manual")
    assert stages_of(plan).warmups((1, 0)) == (0, 0, 0, 0, 1, 0)
    assert try_warmup(plan, [0, 0, 0, 0, 1, 0]) is None
    best = simulate_with_best_warmup(plan)
    assert best.fits
    assert depths_of(best) == [0] * 6


def test_in_turns_no_round_is_shorter_than_its_work_however_many_may_be_in_flight():
    problem = slow(40, two_level(4, 8, 12e9, 1.25e9), schedule="pipedream")
    plan = price(Partition(CONTIGUOUS, consecutive([0, 19, 30, 40], [8, 8, 16])), problem, "manual")
    stages = stages_of(plan)
    held = dataclasses.replace(stages, room=[ENDLESS] * 3).warmups(("pace", 1.0))
    round_s = max(stage.compute_s / stage.replicas for stage in plan.stages)
    way_s = sum(stage.compute_s for stage in plan.stages) + 4 * max(
        (stage.input_bytes + stage.gradient_bytes) / 1.25e9 for stage in plan.stages
    )
    assert 0 < held[0] <= 3 + way_s / round_s / plan.stages[0].replicas
    assert simulate_with_best_warmup(plan).predicted.period_s < math.inf


def test_no_more_are_in_flight_than_the_period_needs():
    """1-4 needs 7 forwards first, and 8 would do as well."""
    best = simulate_with_best_warmup(plan_of([1, 4], engine=BLOCKING))
    assert depths_of(best) == [7, 0]
    assert period_at(best, [6, 0]) > 3.0 * (1 + WORTHWHILE) > period_at(best, [8, 0])


def test_a_simulation_that_would_take_too_long_is_not_repeated(monkeypatch):
    plan = plan_of([1, 2], engine=BLOCKING)
    monkeypatch.setattr(warmup, "SEARCH_LIMIT", 5)
    assert simulate_with_best_warmup(plan) == simulate_plan(plan)


@given(st.lists(st.integers(1, 20), min_size=1, max_size=6))
def test_the_least_of_the_warmups_is_pipedreams(replicas):
    S = len(replicas)
    stages = Stages(replicas, [ENDLESS] * S, [1.0] * S, [0.0] * S, None)
    own = [(sum(replicas[s:]) - 1) // r for s, r in enumerate(replicas[:-1])]
    assert stages.warmups((1, 0)) == (*own, 0)


@pytest.mark.slow
@examples(25, derandomize=True)
@given(st.data())
def test_no_warmup_there_is_is_better(data):
    """Whole seconds, so that ties are ties.

    Of 150 cases like these the search finds the best but twice, by 6 and 2 %.
    """
    replicas = data.draw(st.lists(st.integers(1, 3), min_size=2, max_size=3))

    def drawn(least: int, most: int, size: int) -> list[int]:
        return data.draw(st.lists(st.integers(least, most), min_size=size, max_size=size))

    S = len(replicas)
    plan = plan_of(
        replicas,
        [float(seconds) for seconds in drawn(1, 4, S)],
        [float(seconds) for seconds in drawn(1, 6, S)],
        drawn(0, 4, S - 1),
        [6 * size for size in drawn(0, 3, S)],
        flat(
            sum(replicas),
            data.draw(st.sampled_from([2.0, 8.0])),
            latency=data.draw(st.sampled_from([0.0, 0.5, 2.0])),
        ),
        engine=data.draw(st.sampled_from([Engine(), BLOCKING])),
    )
    found = simulate_with_best_warmup(plan)
    assert found.predicted.period_s == pytest.approx(period_at(plan, depths_of(found)))
    assert found.predicted.period_s <= min(
        shortest(plan, 5 if S == 3 else 8) * 1.07, judged_or_none(plan) * (1 + 1e-12)
    )


def judged_or_none(plan: Plan) -> float:
    try:
        return simulate_plan(plan).predicted.period_s
    except PartoptError:
        return math.inf
