"""Under pipedream every backward ends with a step of the optimizer, worked by hand."""

import pytest

from partopt import Job, solve
from partopt.cost.chain import chain_of
from partopt.cost.pricing import under
from partopt.simulator import execute
from tests.helpers import chain_profile, flat

LAYERS = {"forward": [1.0] * 4, "backward": [2.0] * 4, "parameter_bytes": [8, 0, 6, 2]}
LAYERS |= {"optimizer_s": 4.0}


def plan_of(**options):
    given = {"cuts": [2], "replicas": [1, 1]} | options
    return solve(Job(chain_profile(**LAYERS), flat(2, 1e15), **given)).plan


def test_the_slower_stage_steps_after_each_microbatch():
    plan = plan_of(cuts=[1])
    assert [stage.optimizer_s for stage in plan.stages] == [2.0, 2.0]
    assert [stage.backward_s for stage in plan.stages] == [2.0 + 2.0, 6.0 + 2.0]
    assert [stage.compute_s for stage in plan.stages] == [5.0, 11.0]
    assert execute(plan).period_s == pytest.approx(11.0)
    assert plan.predicted.estimate.one_device_s == 12.0 + 4.0


def test_replicas_step_once_for_a_microbatch_of_each():
    assert execute(plan_of(cuts=[], replicas=[2])).period_s == pytest.approx((12.0 + 4.0) / 2)


def test_the_cut_moves_to_where_the_steps_are():
    """The last layer steps for 4 s: it may have one layer of 3 s beside it, or none."""
    last = LAYERS | {"parameter_bytes": [0, 0, 0, 16], "forward": [2.0, 1.0, 1.0, 1.0]}
    plan = solve(Job(chain_profile(**last), flat(2, 1e15), replication="none")).plan
    assert [stage.start for stage in plan.stages] in ([0, 2], [0, 3])
    assert execute(plan).period_s == pytest.approx(10.0)


def test_no_other_backward_ends_with_a_step():
    for options in (
        {"schedule": "1f1b", "microbatches": 4},
        {"schedule": "pipedream-2bw"},
        {"shard": "optimizer"},
    ):
        plan = plan_of(**options)
        assert [stage.backward_s for stage in plan.stages] == [4.0, 4.0]
        assert [stage.optimizer_s for stage in plan.stages] == [2.0, 2.0]


def test_a_plan_takes_its_steps_into_backwards_and_out_of_them_with_its_schedule():
    asynchronous = plan_of()
    synchronous = plan_of(schedule="1f1b", microbatches=8)
    assert under(asynchronous, "1f1b", 8).stages == synchronous.stages
    assert under(synchronous, "pipedream").stages == asynchronous.stages
    assert under(asynchronous, "pipedream").stages == asynchronous.stages


def test_a_tied_parameter_is_stepped_once():
    tied = LAYERS | {"parameter_bytes": [8, 0, 6, 8], "shared": [("table", [0, 3], 8)]}
    chain = chain_of(chain_profile(**tied)).with_steps()
    assert chain.steps_s(0, 4) == pytest.approx(4.0)
    assert chain.steps_s(0, 1) == pytest.approx(4.0 * 8 / 14)
    assert chain.compute_s(0, 4) == pytest.approx(12.0 + 4.0)
