"""Plans in closed form: F = 1, B = 2, I = W = 1, no communication, executed as plans are."""

import pytest

from partopt.schedules import SCHEDULES
from partopt.simulator import execute, simulate_plan
from tests.helpers import flat
from tests.simulator.plans import chunked, plan_of

ASYNCHRONOUS = [name for name, entry in SCHEDULES.items() if entry.asynchronous]
SYNCHRONOUS = [name for name, entry in SCHEDULES.items() if not entry.asynchronous]
CHUNKED = ("interleaved", "interleaved-zb", "zbv", "dualpipe", "dualpipev")


def made(name, P, M):
    if name in CHUNKED:
        return chunked(name, P, 3 if name.startswith("interleaved") else 2, M)
    return plan_of([1] * P, schedule=name, microbatches=M)


@pytest.mark.parametrize("P, M", [(2, 4), (4, 8), (4, 16), (6, 12)])
@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_an_iteration_takes_what_the_closed_form_says(name, P, M):
    plan = made(name, P, M)
    found = execute(plan)
    v = len(plan.stages) // P
    expected = SCHEDULES[name].makespan(P, v, M)
    assert found.makespan_s == expected
    assert found.period_s == expected / M
    assert simulate_plan(plan).predicted.iteration_s == expected


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zbv", "dualpipe"])
def test_pipelines_side_by_side_take_as_long_as_one(name):
    one = made(name, 4, 8)
    if name in CHUNKED:
        several = chunked(name, 4, len(one.stages) // 4, 24, d=3)
    else:
        several = plan_of([3] * 4, [1.0] * 4, [2.0] * 4, schedule=name, microbatches=24)
    assert execute(several).makespan_s == execute(one).makespan_s


@pytest.mark.parametrize("P", [1, 2, 4, 7])
@pytest.mark.parametrize("name", ASYNCHRONOUS)
def test_an_asynchronous_pipeline_of_equal_stages_is_never_idle(name, P):
    found = execute(plan_of([1] * P, schedule=name))
    assert found.period_s == 3.0
    assert found.bubble == 0.0
    assert found.shares.idle_s.max() == 0.0


@pytest.mark.parametrize("P, M", [(2, 4), (4, 8), (4, 16)])
def test_share_of_the_bubble(P, M):
    for name in ("gpipe", "1f1b"):
        assert execute(made(name, P, M)).bubble == pytest.approx((P - 1) / (M + P - 1), rel=1e-12)
    assert execute(made("interleaved", P, M)).bubble == pytest.approx(
        (P - 1) / (3 * M + P - 1), rel=1e-12
    )


@pytest.mark.parametrize("P, M", [(2, 4), (3, 6), (4, 16)])
@pytest.mark.parametrize("latency", [0.25, 0.5])
def test_gpipe_pays_for_latency_once_each_way(P, M, latency):
    found = execute(
        plan_of([1] * P, schedule="gpipe", microbatches=M, topology=flat(P, 1.0, latency))
    )
    assert found.makespan_s == 3 * (M + P - 1) + 2 * latency * (P - 1)
