"""Numbers of any size in any option or field: an answer, or a refusal that says what to do."""

from contextlib import suppress

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from msgspec.structs import replace

import partopt as po
from partopt.errors import PartoptError
from partopt.options import MOST
from tests.examples import examples
from tests.helpers import flat, two_level, uniform_profile

pytestmark = pytest.mark.any_effort

EXTREMES = [
    -1,
    0,
    1,
    10**12,
    10**30,
    10**400,
    1e308,
    5e-324,
    float("nan"),
    float("inf"),
    -float("inf"),
]
NUMBERS = st.sampled_from(EXTREMES)
COUNTS = ["microbatch_size", "microbatches", "global_batch", "stages", "chunks", "memory"]
SCHEDULES = ["1f1b", "gpipe", "zb-h1", "interleaved", "zbv", "dualpipe", "naive", "auto"]
PROFILE, CLUSTER = uniform_profile(4), flat(2)


def planned(schedule="pipedream", **options):
    return po.solve(po.Job(PROFILE, CLUSTER, schedule=schedule, **options)).plan


PLANS = {
    "pipedream": planned(cuts=[2], replicas=[1, 1]),
    "1f1b": planned("1f1b", microbatches=4, cuts=[2], replicas=[1, 1]),
}


@examples(30)
@given(st.sampled_from(SCHEDULES), st.sampled_from(COUNTS), NUMBERS)
def test_options_of_a_job(schedule, option, number):
    given_ = {"global_batch": 4} | {option: number}
    if option == "microbatches":
        del given_["global_batch"]
    with suppress(PartoptError):
        assert po.solve(po.Job(PROFILE, CLUSTER, schedule=schedule, **given_)).plan.stages


@examples(30)
@given(
    st.sampled_from(sorted(PLANS)),
    st.sampled_from(["microbatches", "memory", "warmup", "bandwidth", "latency", "links"]),
    NUMBERS,
)
def test_conditions_of_a_simulation(plan, condition, number):
    value = {"warmup": [number, 0], "microbatches": number, "memory": number}.get(
        condition, {"all": number}
    )
    with suppress(PartoptError):
        assert po.simulate(PLANS[plan], **{condition: value}).document.period_s > 0


@pytest.mark.slow
@examples(6)
@given(
    st.sampled_from(["size", "bandwidth_bytes_per_s", "latency_s", "links"]),
    st.sampled_from([0, 1]),
    NUMBERS,
)
def test_fields_of_a_topology(field, k, number):
    levels = list(two_level(2, 2).levels)
    levels[k] = replace(levels[k], **{field: number})
    assume(not 0 < number < 1)  # messages of a link so slow take longer than a float holds
    with suppress(PartoptError, ValueError):
        cluster = po.Topology(name="t", device=CLUSTER.device, levels=levels)
        with suppress(PartoptError):
            assert po.solve(po.Job(PROFILE, cluster)).plan.stages


@pytest.mark.parametrize("option", ["microbatches", "global_batch"])
def test_a_count_beyond_all_use_is_refused_with_its_name_and_a_hint(option):
    with pytest.raises(PartoptError) as refused:
        po.Job(PROFILE, CLUSTER, schedule="1f1b", **{option: 10**400})
    assert refused.value.message == f"`{option}=10^400`: is too large"
    assert refused.value.hint == f"give {MOST:,} or less"
    assert refused.value.fields["option"] == option


@pytest.mark.parametrize(
    ("conditions", "message"),
    [
        ({"latency": {"all": 1e9}}, "`latency=all`: latency must be 0 to 1,000,000 s"),
        ({"links": {"all": "9" * 5000}}, "`links=all`: invalid link count"),
        ({"warmup": [10**30, 0]}, "use 0 to 10000000"),
        ({"warmup": "+" + "9" * 5000}, "not a number for each stage"),
        ({"warmup": [10**7, 0]}, "microbatches that it takes to settle in 2 stages"),
    ],
)
def test_a_condition_beyond_all_use_is_refused(conditions, message):
    with pytest.raises(PartoptError) as refused:
        po.simulate(PLANS["pipedream"], **conditions)
    assert message in f"{refused.value.message} {refused.value.hint}"


@pytest.mark.slow
def test_more_levels_than_devices_could_fill_are_refused():
    level = "  - {name: l%d, size: 1, bandwidth: 1 GB/s}\n"
    levels = "".join(level % k for k in range(1000))
    with pytest.raises(PartoptError, match="levels: 1000 levels; partopt plans for up to 32"):
        po.Topology.parse(f"name: t\ndevice: {{name: X}}\nlevels:\n{levels}".encode())
