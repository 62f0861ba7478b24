"""The best of all planners beside each of them."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from partopt import planners
from partopt.cost.problem import problem_of
from partopt.documents.engine import Engine
from partopt.errors import PartoptError
from partopt.planners import PLANNERS
from partopt.search import contest
from partopt.search.effort import SearchParams
from partopt.search.improve import GRID
from partopt.search.variants import Variant
from tests.examples import examples
from tests.helpers import BLOCKING, chain_profile, flat, two_level, uniform_profile

pytestmark = pytest.mark.any_effort


AUTOMATIC = {name for name in PLANNERS if name != "manual"}
UNEQUAL = chain_profile(
    [3e-3, 1e-3, 4e-3, 1e-3, 5e-3, 9e-3, 2e-3, 6e-3],
    [6e-3, 2e-3, 8e-3, 2e-3, 10e-3, 18e-3, 4e-3, 12e-3],
    [10**6] * 8,
    [10**7] * 8,
    stash_groups=[((layer,), 10**7) for layer in range(8)],
)


def problem(**options):
    return problem_of(UNEQUAL, options.pop("topology", two_level(2, 2)), **options)


def plans_of(names, stated, shown=None):
    """What planners find for a problem."""
    return contest.Contest(names, Variant(stated), shown).plans_at(SearchParams.at("quick"))


@pytest.mark.slow
@examples(15, derandomize=True)
@given(
    st.sampled_from(["pipedream", "pipedream-2bw", "1f1b", "zb-h1", "interleaved"]),
    st.sampled_from([None, 90, 120, 200]),
    st.booleans(),
)
def test_the_best_is_no_slower_than_any_that_fits_and_fits_where_any_does(
    schedule, limit, blocking
):
    asynchronous = schedule.startswith("pipedream")
    options = (
        {"engine": BLOCKING if blocking else Engine()} if asynchronous else {"microbatches": 8}
    )
    stated = problem(schedule=schedule, memory_bytes=limit and limit * 10**6, **options)
    plans = plans_of(contest.contestants(stated), stated).plans
    best = contest.Plans(plans, []).best
    alone = {
        name: contest.plan_alone(name, stated, SearchParams.at("quick"))[0]
        for name in plans
        if name != GRID
    }
    each = (plans | alone).values()
    fitting = [plan for plan in each if plan.fits]
    assert best.fits == bool(fitting)
    assert best.predicted.samples_per_s == max(
        plan.predicted.samples_per_s for plan in fitting or each
    )


def test_of_equal_plans_the_first_is_the_best():
    plan = contest.plan_alone("gpipe", problem(), SearchParams.at("quick"))[0]
    other = msgspec.structs.replace(plan)
    assert contest.Plans({"one": plan, "two": other}, []).best is plan


@pytest.mark.parametrize(
    ("options", "able"),
    [
        ({}, AUTOMATIC),
        ({"stages": 2}, {"optimal", "gpipe", "torchgpipe", "lingvo", "straight"}),
        ({"costs": [1.0] * 8}, {"gpipe", "torchgpipe", "lingvo"}),
        ({"schedule": "zbv", "microbatches": 8}, {"gpipe", "torchgpipe", "lingvo", "grid"}),
        ({"schedule": "dualpipe", "microbatches": 8}, {"gpipe", "torchgpipe", "lingvo", "grid"}),
        ({"schedule": "zb-h1", "microbatches": 8}, AUTOMATIC),
        ({"schedule": "1f1b-eager", "microbatches": 8}, AUTOMATIC),
        ({"replication": "none"}, {"optimal", "gpipe", "torchgpipe", "lingvo", "straight"}),
        ({"replication": "uniform"}, AUTOMATIC - {"pipedream"}),
        ({"recompute": "auto"}, {"optimal"}),
    ],
)
def test_contestants_look_at_what_is_stated(options, able):
    assert set(contest.contestants(problem(**options))) == able


def test_a_planner_that_refuses_is_skipped_with_its_reason(monkeypatch):
    monkeypatch.setattr("partopt.planners.pipedream.LAYER_LIMIT", 5)
    plans, (note,) = plans_of(["pipedream", "gpipe"], problem())
    assert list(plans) == ["gpipe"]
    assert note.code == "planner-refused"
    assert note.text.startswith("without pipedream: pipedream: 8 layers")


def test_where_all_refuse_each_reason_is_given_once():
    # in groups for 4 devices: none that are equal
    stated = problem(schedule="interleaved", microbatches=9)
    with pytest.raises(PartoptError) as raised:
        plans_of(["gpipe", "torchgpipe", "pipedream"], stated)
    messages = [part.message for part in raised.value.parts]
    assert len(messages) == len(set(messages)) == 2
    assert messages[0].startswith(
        "`schedule=interleaved`: the planner pipedream puts one stage on each device"
    )


def test_nobody_is_no_mistake():
    assert plans_of([], problem()) == ({}, [])


def test_what_a_planned_plan_predicts_is_simulated_at_its_best_warmup():
    """Two stages, 1-2: waiting for gradients, the formula's warm-up gives 1.5 times the period of
    the loads.
    """
    profile = chain_profile([1.0, 2.0], [2.0, 4.0])
    stated = problem_of(profile, flat(3, 1.0), cuts=[1], replicas=[1, 2], engine=BLOCKING)
    plan = contest.plan_alone("manual", stated, SearchParams.at("quick"))[0]
    assert (plan.predicted.period_s, plan.predicted.formula_period_s) == (
        pytest.approx(3.0),
        pytest.approx(4.5),
    )
    assert planners.plan("manual", stated).predicted.period_s == pytest.approx(3.0)


def test_a_planner_whose_plans_are_among_those_of_optimal_is_not_asked_unless_shown(monkeypatch):
    stated, asked = problem_of(uniform_profile(3), flat(12)), []
    decide = planners.decide
    monkeypatch.setattr(planners, "decide", lambda *a: asked.append(a[0]) or decide(*a))
    names = contest.contestants(stated)
    assert "straight" not in plans_of(names, stated, ["optimal"]).plans
    assert "straight" not in asked
    assert "straight" in plans_of(names, stated).plans
    assert "straight" in asked


def test_uniform_layers_on_one_device():
    stated = problem_of(uniform_profile(3), flat(1))
    plans = plans_of(contest.contestants(stated), stated).plans
    assert {plan.shape for plan in plans.values()} == {"1"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"recompute": "auto"}, {"replication": "uniform"}, {"replication": "none"}]
)
def test_planners_that_keep_to_what_is_asked_without_looking_are_candidates_too(options):
    """With all-reduces that are waited for, simulated, the formulas' best is not the fastest."""
    stated = problem(engine=BLOCKING, **options)
    best = contest.plan_alone("optimal", stated, SearchParams.at("quick"))[0]
    free = {"recompute": "never", "replication": "free"}
    for name in AUTOMATIC - {"optimal"}:
        plan, _ = contest.plan_alone(name, stated.with_(**free), SearchParams.at("quick"))
        asked = msgspec.structs.replace(plan, request=best.request)
        if not list(asked.find_deviations()):
            assert best.predicted.period_s <= plan.predicted.period_s * (1 + 1e-12)
    assert best.certificate is not None
    assert best.certificate.gap >= 0


def test_the_naive_iteration_of_replicas_is_what_they_take():
    """Two replicas work side by side, and exchange at the end."""
    stated = problem_of(UNEQUAL, flat(2), schedule="naive", microbatches=4)
    simulated, formula = (
        contest.plan_alone("data_parallel", stated, SearchParams.at("quick"))[0],
        planners.plan("data_parallel", stated),
    )
    assert simulated.predicted.iteration_s == pytest.approx(formula.predicted.iteration_s)


def test_a_schedule_that_optimal_cannot_plan_for_is_refused():
    with pytest.raises(PartoptError) as raised:
        contest.plan_alone(
            "optimal", problem(schedule="interleaved", microbatches=8), SearchParams.at("quick")
        )
    assert raised.value.code == "planner-cannot-plan-for-schedule"


def test_what_is_found_so_far_is_not_searched_for():
    """A search that is interrupted before it begins makes nothing more."""
    begun = contest.Contest(["optimal", GRID], Variant(problem(schedule="1f1b", microbatches=8)))
    assert begun.plans_so_far() is None
    assert begun.optimal is begun.grid is None
