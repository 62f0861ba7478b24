"""What every planner in the registry keeps to."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partopt import planners
from partopt.cost.problem import problem_of
from partopt.documents.profile import Device, Layer, LayerMeasurement, Measurement, Model, Profile
from partopt.errors import PartoptError
from tests.examples import examples
from tests.helpers import chain_profile
from tests.planners.problems import topology

SCHEDULES = [
    ("pipedream", None),
    ("pipedream-2bw", None),
    ("1f1b", 8),
    ("1f1b-eager", 8),
    ("gpipe", 8),
    ("naive", 8),
]
AUTOMATIC = [name for name in planners.PLANNERS if name != "manual"]


def profile(layers: int) -> Profile:
    costs = list(itertools.islice(itertools.cycle([3, 1, 4, 1, 5, 9, 2, 6]), layers))
    return Profile(
        model=Model(name="model"),
        device=Device(name="device"),
        dtype="float32",
        layers=[
            Layer(name=f"layer{index}", parameter_bytes=1000 * cost)
            for index, cost in enumerate(costs)
        ],
        measurements=[
            Measurement(
                microbatch_size=2,
                layers=[
                    LayerMeasurement(
                        forward_s=cost / 1e3, backward_s=cost / 5e2, output_bytes=100 * cost
                    )
                    for cost in costs
                ],
            )
        ],
    )


@pytest.mark.parametrize(
    "name, schedule, microbatches",
    [
        (name, *of)
        for name, of in itertools.product(AUTOMATIC, SCHEDULES)
        if planners.PLANNERS[name].plans_for(of[0])
    ],
)
@pytest.mark.parametrize(
    "layers, cluster",
    [(1, [(1, 1e6)]), (1, [(4, 1e6)]), (7, [(4, 1e6)]), (20, [(4, 1e6), (2, 1e5)])],
)
def test_plans_are_valid_whatever_the_model_and_the_cluster(
    name, schedule, microbatches, layers, cluster
):
    problem = problem_of(
        profile(layers), topology(*cluster), schedule=schedule, microbatches=microbatches
    )
    plan = planners.plan(name, problem)
    assert list(plan.faults()) == []
    assert [module for stage in plan.stages for module in stage.modules] == problem.chain.names
    assert (
        sum(len(stage.ranks) for stage in plan.stages) + len(plan.idle_ranks)
        == problem.topology.devices
    )
    assert plan.planner == name
    assert 0 <= plan.predicted.bubble < 1


@pytest.mark.parametrize("name", AUTOMATIC)
def test_the_same_problem_gives_the_same_plan(name):
    first, second = (
        planners.plan(name, problem_of(profile(20), topology((4, 1e6), (2, 1e5)))) for _ in range(2)
    )
    assert first == second


ASKED = {
    "stages": {"stages": 3},
    "uniform": {"replication": "uniform"},
    "none": {"replication": "none"},
    "costs": {"costs": [1.0] * 20},
    "auto": {"recompute": "auto"},
}
USED = {
    "optimal": {"stages", "uniform", "none", "auto"},
    "pipedream": set(),
    "gpipe": {"stages", "uniform", "none", "costs"},
    "torchgpipe": {"stages", "uniform", "none", "costs"},
    "lingvo": {"stages", "uniform", "none", "costs", "fewer"},
    "straight": {"stages", "uniform", "none"},
    "data_parallel": {"uniform"},
    "manual": {"cuts"},
}


@pytest.mark.parametrize("name", AUTOMATIC)
def test_what_a_planner_uses_is_required_where_it_is_asked_for_and_kept_to(name):
    assert {own: set(planners.PLANNERS[own].uses) for own in planners.PLANNERS} == USED
    assert planners.required_features(problem_of(profile(20), topology((4, 1e6)))) == set()
    for feature in USED[name] & ASKED.keys():
        asked = problem_of(profile(20), topology((4, 1e6)), **ASKED[feature])
        assert planners.required_features(asked) == {feature}
        replicas = [stage.replicas for stage in planners.plan(name, asked).stages]
        assert feature != "stages" or len(replicas) == 3
        assert feature != "uniform" or len(set(replicas)) == 1
        assert feature != "none" or set(replicas) == {1}


@pytest.mark.parametrize("name", ["optimal", "gpipe", "torchgpipe", "lingvo", "straight"])
@pytest.mark.parametrize("stages, what", [(8, "7 layers"), (7, "4 devices")])
def test_more_stages_than_layers_or_devices_are_refused(name, stages, what):
    problem = problem_of(profile(7), topology((4, 1e6)), stages=stages)
    with pytest.raises(PartoptError, match=f"{stages} stages for {what}"):
        planners.plan(name, problem)


def test_an_unknown_planner_is_answered_with_the_nearest_known():
    with pytest.raises(PartoptError, match="unknown planner") as raised:
        planners.plan("pipedreams", problem_of(profile(2), topology((2, 1e6))))
    assert raised.value.hint == 'did you mean "pipedream"?'


@pytest.mark.parametrize("name", AUTOMATIC)
def test_stages_begin_only_where_they_may(name):
    starts = [0, 3, 8, 9, 15]
    plan = planners.plan(name, problem_of(profile(20), topology((4, 1e6)), cut_at=starts))
    assert {stage.start for stage in plan.stages} <= set(starts)
    assert list(plan.faults()) == []


def tied(layers: int, *members: int) -> Profile:
    """Some of the layers share a parameter."""
    costs = list(itertools.islice(itertools.cycle([3e-3, 1e-3, 4e-3, 1e-3]), layers))
    return chain_profile(
        costs, costs, [100] * layers, [1000] * layers, shared=[("embedding", members, 500)]
    )


@pytest.mark.parametrize("schedule, microbatches", [("pipedream", None), ("1f1b", 8)])
@pytest.mark.parametrize("name", AUTOMATIC)
def test_no_stage_parts_tied_layers_that_stay_together(name, schedule, microbatches):
    options = {
        "schedule": schedule,
        "microbatches": microbatches,
        "replication": "free",
        "tied": "together",
    }
    for starts in (None, list(range(0, 20, 2))):
        plan = planners.plan(
            name, problem_of(tied(20, 4, 7, 11), topology((4, 1e6)), cut_at=starts, **options)
        )
        assert list(plan.faults()) == []
        assert not {stage.start for stage in plan.stages} & set(range(5, 12))
        assert {stage.start for stage in plan.stages} <= set(starts or range(20))
        assert {stage.tied_exchange_s for stage in plan.stages} == {0}


@pytest.mark.parametrize("name", AUTOMATIC)
def test_where_the_first_layer_is_tied_to_the_last_one_stage_is_left(name):
    plan = planners.plan(name, problem_of(tied(20, 0, 19), topology((4, 1e6)), tied="together"))
    assert [(stage.start, stage.stop) for stage in plan.stages] == [(0, 20)]


def test_a_split_of_ones_own_may_not_part_them_either():
    given = problem_of(tied(20, 4, 7, 11), topology((4, 1e6)), tied="together", cuts=[4, 12])
    assert [stage.start for stage in planners.plan("manual", given).stages] == [0, 4, 12]
    with pytest.raises(
        PartoptError, match=r"`cuts=\[4, 9\]`: 9 parts layers 4 to 11, which share embedding"
    ) as raised:
        planners.plan("manual", given.with_(cuts=[4, 9]))
    assert "`tied=exchange`" in raised.value.hint


@examples(25)
@given(st.lists(st.integers(1, 19), max_size=3, unique=True))
def test_every_split_of_ones_own_is_the_plan(cuts):
    own = sorted(cuts)
    plan = planners.plan("manual", problem_of(profile(20), topology((4, 1e6)), cuts=own))
    ends = zip([0, *own], [*own, 20], strict=True)
    assert [(stage.start, stage.stop) for stage in plan.stages] == list(ends)


def test_fewer_places_to_cut_are_never_faster():
    free, bound = (
        planners.plan("straight", problem_of(profile(20), topology((4, 1e6)), cut_at=cuts))
        for cuts in (None, [0, 5, 9])
    )
    assert free.predicted.period_s <= bound.predicted.period_s
