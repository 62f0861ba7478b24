"""Plans under other conditions, where how memory is counted depends on them."""

import pytest
from msgspec.structs import replace

from partopt import Job, simulate, solve
from partopt.documents.plan import Plan
from partopt.errors import PartoptError
from tests.helpers import flat, uniform_profile

GB = 10**9


def planned(**options: object) -> Plan:
    return solve(Job(uniform_profile(6), flat(4, memory_bytes=GB), **options)).plan


def test_buffers_of_a_whole_iteration_need_one():
    plan = planned(schedule="1f1b", microbatches=8, facts={"buffers": "all"}, cuts=[2, 4])
    assert [stage.memory.buffers_bytes for stage in plan.stages] == [
        8 * (stage.input_bytes + stage.output_bytes) for stage in plan.stages
    ]
    again = simulate(plan, microbatches=16).plan
    assert [stage.memory.buffers_bytes for stage in again.stages] == [
        16 * (stage.input_bytes + stage.output_bytes) for stage in plan.stages
    ]
    with pytest.raises(PartoptError, match="the plan has `buffers=all`"):
        simulate(plan, schedule="pipedream")
    faults = replace(plan.with_layout(schedule="pipedream"), microbatches=None).inconsistencies()
    assert "engine.buffers: all under pipedream" in [fault.message for fault in faults]


def test_a_replica_holds_its_share_under_other_conditions_too():
    plan = planned(schedule="1f1b", microbatches=8, shard="optimizer", cuts=[3], replicas=[2, 2])
    for stage in simulate(plan, microbatches=16).plan.stages:
        assert stage.memory.optimizer_bytes == stage.trained_bytes  # two moments, in two shares


def test_a_limit_of_what_the_model_may_take_has_no_reserve():
    plan = planned(facts={"reserve": "100 MB"})
    assert plan.memory_limit_bytes == 900 * 10**6
    other = simulate(plan, memory="500 MB").plan
    assert (other.memory_limit_bytes, other.reserve.size_bytes) == (500 * 10**6, 0)
