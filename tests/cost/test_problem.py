"""What a problem records in its plans, and the problem that is stated again from one."""

import pytest

from partopt import planners
from partopt.cost.pricing import price
from partopt.cost.problem import (
    REQUESTED,
    STATED,
    Assignment,
    Partition,
    certify,
    consecutive,
    problem_from_plan,
    problem_of,
)
from partopt.documents.engine import Engine, Layout
from partopt.documents.plan import Request
from partopt.errors import PartoptError
from partopt.schedules.placement import LOOPED, MIRRORED, ranks_of
from tests.helpers import flat, measurement, profile_of, uniform_profile

PROFILE = uniform_profile(6)
COSTS = [1.0, 2.0, 1.0, 3.0, 1.0, 1.0]
BLOCKS = {"engine": Engine(recompute=("none", "blocks")), "block_bounds": [0, 2, 4, 6]}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"stages": 2},
        {"cut_at": [0, 2, 4]},
        {"costs": COSTS},
        {"replication": "uniform"},
        {"tied": "together"},
        {"recompute": "always"},
        {"recompute": "auto"},
        {"recompute": "always", **BLOCKS},
        {"recompute": 2, **BLOCKS},
        {"layout": Layout(pp=1, dp=4)},
    ],
)
@pytest.mark.parametrize(("schedule", "M"), [("1f1b", 8), ("pipedream", None)])
def test_what_is_requested_is_recorded_and_stated_again(options, schedule, M):
    stated = problem_of(PROFILE, flat(4), schedule=schedule, microbatches=M, **options)
    plan = planners.plan("data_parallel", stated)
    asked = {name: value for name, value in options.items() if name in REQUESTED}
    assert plan.request == Request(**asked)
    assert {"schedule", "microbatches", *options} <= STATED
    again = problem_from_plan(plan, PROFILE)
    assert again.request == stated.request
    assert again.cell_costs().tolist() == stated.cell_costs().tolist()
    for name in ("schedule", "microbatches", "optimizer", "engine", "shard", "first"):
        assert getattr(again, name) == getattr(stated, name), name


@pytest.mark.parametrize(
    ("cut_at", "sizes"),
    [([0, 2, 4], [2, 2, 2]), ([0, 1, 2, 4, 5], [1, 1, 2, 1, 1]), (range(6), [1] * 6)],
)
def test_the_layers_of_a_coarse_problem_are_what_no_stage_may_split(cut_at, sizes):
    coarse = problem_of(PROFILE, flat(4), cut_at=list(cut_at), costs=COSTS).coarsen()
    assert coarse.chain.f.tolist() == pytest.approx([size * 1e-3 for size in sizes])
    assert sum(coarse.cell_costs()) == sum(COSTS)
    assert len(coarse.cell_costs()) == len(sizes)


@pytest.mark.parametrize("v", [1, 3])
def test_a_plan_of_several_stages_a_device_is_stated_again_with_as_many(v):
    options = {"schedule": "interleaved", "microbatches": 8, "chunks": v, "shard": "optimizer"}
    stated = problem_of(PROFILE, flat(4), **options)
    stages = consecutive(range(2 * v + 1))
    pairs = zip(stages, ranks_of(LOOPED, 2, v, 2), strict=True)
    own = [Assignment(stage.start, stage.stop, ranks) for stage, ranks in pairs]
    own[-1] = Assignment(own[-1].start, 6, own[-1].ranks)
    again = problem_from_plan(price(Partition(LOOPED, own), stated, "manual"), PROFILE)
    assert {name: getattr(again, name) for name in options} == options


def test_another_model_is_refused():
    plan = planners.plan("data_parallel", problem_of(PROFILE, flat(2)))
    with pytest.raises(PartoptError, match="whose layers are not those of") as raised:
        problem_from_plan(plan, uniform_profile(5))
    assert raised.value.code == "other-layers"


def test_a_manual_split_in_both_directions_records_the_replicas_of_one():
    stages = consecutive([0, 1, 2, 4, 6])
    ranks = ranks_of(MIRRORED, 4, 2, 1)
    own = [type(stage)(stage.start, stage.stop, r) for stage, r in zip(stages, ranks, strict=True)]
    stated = problem_of(PROFILE, flat(4), schedule="dualpipe", microbatches=8)
    request = price(Partition(MIRRORED, own), stated, "manual").request
    assert (request.cuts, request.replicas) == ([1, 2, 4], [1, 1, 1, 1])


@pytest.mark.parametrize(
    ("options", "per"),
    [
        ({"schedule": "pipedream"}, "round"),
        ({"schedule": "1f1b", "microbatches": 4}, "iteration"),
    ],
)
def test_gradients_are_exchanged_once_a_round_or_an_iteration(options, per):
    profile = profile_of([measurement([1.0] * 2, output_bytes=[5, 0])], parameter_bytes=[8, 0])
    stated = problem_of(profile, flat(3, 1.0), cuts=[1], replicas=[2, 1], **options)
    flows = {flow.kind: flow for flow in planners.plan("manual", stated).communication}
    assert (flows["allreduce"].bytes, flows["allreduce"].per) == (8, per)
    assert (flows["send"].bytes, flows["send"].per) == (5, "microbatch")


@pytest.mark.parametrize("stated", ["", "optimal for the recurrence"])
@pytest.mark.parametrize(
    ("lower_s", "bound_s", "gap", "status"),
    [
        (4.0, 4.0, 0.125, "no plan is more than 12.5 % faster"),
        (4.5, 4.5, 0.0, "optimal"),
        (4.5 * (1 - 1e-13), 4.5, 0.0, "optimal"),
        (5.0, 4.5, 0.0, "optimal"),
        (0.0, 0.0, 0.0, "no bound is known"),
    ],
)
def test_a_certificate_says_how_near_its_bound_is_or_what_is_stated(
    lower_s, bound_s, gap, status, stated
):
    found = certify(4.5, lower_s, "plans of 3 layers", "a search", stated)
    assert (found.objective_s, found.lower_bound_s, found.gap) == (4.5, bound_s, gap)
    assert (found.status, found.scope, found.proof) == (
        stated or status,
        "plans of 3 layers",
        "a search",
    )
