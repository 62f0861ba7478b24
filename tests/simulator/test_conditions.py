"""Other conditions of a plan: those that it takes, and those that are refused."""

import pytest

import partopt
from partopt.errors import PartoptError
from tests.helpers import flat
from tests.simulator.plans import chunked, plan_of

STRAIGHT = plan_of([1, 1], schedule="1f1b", microbatches=4, topology=flat(2, 1e9))
LOOPED = chunked("interleaved", 2, 2, 4)


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
