"""Other conditions of a plan: those that it takes, and those that are refused."""

import pytest
from msgspec.structs import replace

import partopt
from partopt.documents.stage import Reserve
from partopt.errors import PartoptError
from partopt.what_if.conditions import Conditions, apply_conditions
from tests.helpers import flat, limited
from tests.simulator.plans import chunked, plan_of

STRAIGHT = plan_of([1, 1], schedule="1f1b", microbatches=4, topology=flat(2, 1e9))
LOOPED = chunked("interleaved", 2, 2, 4)
STALE = plan_of([1, 1], schedule="pipedream", topology=flat(2, 1e9))


@pytest.mark.parametrize(
    ("plan", "conditions"),
    [
        (STRAIGHT, {"schedule": "gpipe"}),
        (STRAIGHT, {"schedule": "1f1b"}),
        (LOOPED, {"schedule": "interleaved"}),
        (LOOPED, {"schedule": "interleaved-zb"}),
        (STRAIGHT, {"links": {"all": 1}}),
        (STRAIGHT, {"links": {"all": 1024}}),
        (STRAIGHT, {"latency": {"all": 0}}),
    ],
)
def test_what_a_plan_takes(plan, conditions):
    assert partopt.simulate(plan, **conditions).document.makespan_s > 0


@pytest.mark.parametrize(
    ("plan", "conditions", "changed"),
    [
        (STRAIGHT, {}, []),
        (STALE, {}, []),
        (STRAIGHT, {"microbatches": 8}, ["microbatches 4 -> 8"]),
        (STRAIGHT, {"schedule": "gpipe"}, ["schedule 1f1b -> gpipe"]),  # whose warm-ups are others
        (STALE, {"warmup": [1, 0]}, []),
        (STALE, {"warmup": [3, 1]}, ["warm-up 1,0 -> 3,1"]),
        (STRAIGHT, {"links": {"all": 2}}, ["links of all 1 -> 2"]),
        (STRAIGHT, {"memory": "1GB"}, ["memory of a device unknown -> 1 GB"]),
    ],
)
def test_what_is_said_to_have_changed(plan, conditions, changed):
    assert partopt.simulate(plan, **conditions).document.changed == changed


@pytest.mark.parametrize(
    ("plan", "conditions", "message"),
    [
        (STRAIGHT, {"schedule": "interleaved"}, "for several stages on each device, and the plan"),
        (STRAIGHT, {"schedule": "zbv"}, "`schedule=zbv`: "),
        (LOOPED, {"schedule": "1f1b"}, "`schedule=1f1b`: the schedule needs one stage on"),
        (STRAIGHT, {"links": {"all": 0}}, "invalid link count '0'"),
        (STRAIGHT, {"links": {"all": 1025}}, "invalid link count '1025'"),
        (STRAIGHT, {"links": {"all": True}}, "invalid link count 'True'"),
        (STRAIGHT, {"latency": {"all": -1e-9}}, "latency must be 0 to "),
    ],
)
def test_what_a_plan_does_not_take(plan, conditions, message):
    with pytest.raises(PartoptError) as raised:
        partopt.simulate(plan, **conditions)
    assert message in raised.value.message


def test_a_replica_warms_up_by_what_it_gets_of_microbatches_that_do_not_divide():
    """Of 5 microbatches the first of two replicas gets 3, the other 2: at most 2 come first."""
    plan = plan_of([2, 1], schedule="1f1b-eager", microbatches=5, topology=flat(3, 1e9))
    changed = apply_conditions(plan, Conditions(warmup=[2, 4]), 10**6)
    assert [stage.warmup for stage in changed.stages] == [2, 4]
    for stage, given, gets in ((0, [3, 0], 3), (1, [0, 5], 5)):
        with pytest.raises(PartoptError) as raised:
            apply_conditions(plan, Conditions(warmup=given), 10**6)
        assert f"{gets} forwards first on stage {stage}" in raised.value.message
        assert raised.value.hint == f"use 0 to {gets - 1}: each replica gets {gets} microbatches"


def test_a_limit_that_is_given_is_what_the_model_may_take():
    reserve = Reserve(size_bytes=100, basis="given")
    plan = replace(limited(STRAIGHT, 10**6), reserve=reserve)
    for changes, left in (({"schedule": "gpipe"}, reserve), ({"memory": 5000}, Reserve())):
        assert apply_conditions(plan, Conditions(**changes), 10**6).reserve == left


def test_an_order_of_ones_own_is_a_text_and_may_not_be_too_long(tmp_path):
    path = tmp_path / "own.csv"
    path.write_bytes(b"\xff\xfe0F0,0B0\n1F0,1B0\n")
    with pytest.raises(PartoptError, match=r"own\.csv: "):
        partopt.simulate(STRAIGHT, schedule=str(path))
    path.write_text("0F0,0B0\n1F9999999,1B0\n")
    with pytest.raises(PartoptError, match=r"own\.csv: .* are 40,000,000 actions"):
        partopt.simulate(STRAIGHT, schedule=str(path))
