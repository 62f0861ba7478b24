"""A transformer on several numbers of devices, and the least on which it fits."""

import pytest

from partopt import Layout, Topology, find_transformer
from partopt.errors import PartoptError
from partopt.job import Job
from partopt.trainer_plans.planning import solve_for
from partopt.trainer_plans.sizing import find_fitting, find_servers, scale
from partopt.trainer_plans.transformers import fixed_parts, training_for
from partopt.transformer.layouts import find_layouts


def asked(model="llama3-8b", servers=1, topology="dgx-h100", **options):
    return Job(
        model=find_transformer(model),
        topology=Topology.load(topology, servers),
        **{"trainer": "megatron", "global_batch": 48, "sequence": 4096, "facts": {}} | options,
    )


@pytest.mark.slow
@pytest.mark.parametrize("weak", [False, True])
def test_a_row_is_the_best_plan_on_that_many_devices(weak):
    found = scale(asked(), [8, 16], weak)
    for row, servers in zip(found.rows, (1, 2), strict=True):
        batch = 48 * (servers if weak else 1)
        plan = solve_for(asked(servers=servers, global_batch=batch)).plan
        assert (row.devices, row.planner, row.layout) == (8 * servers, "megatron", plan.layout)
        assert row.samples_per_s == plan.predicted.samples_per_s
        assert row.figures.mfu == plan.predicted.figures.mfu
        assert row.microbatches * row.microbatch_size == batch
    first, second = found.rows
    assert (first.efficiency, first.speedup_over_one_device) == (1.0, 8.0)
    gain = second.samples_per_s / first.samples_per_s
    assert second.efficiency == pytest.approx(gain / 2)
    assert second.speedup_over_one_device == pytest.approx(8 * gain)


@pytest.mark.parametrize(
    ("devices", "options", "message"),
    [
        ([16, 8], {}, "must be ascending numbers of devices"),
        ([8, 20], {}, "20 devices do not fill dgx-h100"),
        ([8, 32], {"layout": Layout(dp=3)}, "8 devices: `layout="),
    ],
)
def test_what_does_not_scale_is_told(devices, options, message):
    with pytest.raises(PartoptError) as error:
        scale(asked(global_batch=64, **options), devices)
    assert message in error.value.message


def fits(question, servers):
    """Whether the best layout on so many servers fits, simulated."""
    topology = question.topology.resize(8 * servers)
    return solve_for(question.with_(topology=topology)).plan.fits


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "servers"),
    [({"model": "llama3-70b", "sequence": 8192}, 3), ({"memory": "14 GB"}, 2)],
)
def test_the_least_servers_are_those_on_which_a_plan_fits_and_none_with_fewer(options, servers):
    question = asked(**options)
    assert find_servers(question) == servers
    assert [fits(question, own) for own in range(1, servers + 1)] == [False] * (servers - 1) + [
        True
    ]


def test_the_least_is_looked_for_from_a_number_on():
    assert find_servers(asked()) == 1
    assert find_servers(asked(), 3) == 3
    alone = asked("llama3-405b", layout=Layout(tp=1, cp=1, pp=1))
    assert find_servers(alone) is None  # replicas hold all of it, on however many


@pytest.mark.slow
def test_no_number_below_the_least_is_passed_over():
    """Of GPT-3 175B on V100, every number of servers by itself."""
    question = asked(
        "gpt3-175b", topology="v100-nvlink", trainer="deepspeed", dtype="float16", memory="30 GB"
    )
    servers = find_servers(question)
    assert servers == 48
    for own in range(33, servers):
        given = (
            training_for(question),
            8 * own,
            48,
            question.limit_bytes,
            fixed_parts(question),
            False,
        )
        assert not find_layouts(*given).fitting


def test_what_does_not_fit_is_told_servers_or_an_open_layout():
    assert find_fitting(asked(memory="14 GB")).options == {"servers": 2}
    assert find_fitting(asked(memory="3 GB")) is None
    held = asked(memory="30 GB", layout=Layout(tp=1, pp=1, dp=8))
    found = find_fitting(held).options
    assert found.pop("layout") == Layout() and set(found.values()) == {None}
    assert solve_for(held.with_(layout=Layout())).fits
