"""Plans executed: iterations in closed form (F = 1, B = 2, I = W = 1, no communication), idle
shares, and that a plan predicts what its execution shows.
"""

import msgspec
import pytest
from msgspec import structs

from partopt import planners
from partopt.cost.pricing import under
from partopt.cost.problem import problem_of
from partopt.documents.files import find_shipped
from partopt.documents.profile import Profile
from partopt.documents.topology import Topology
from partopt.schedules import SCHEDULES
from partopt.schedules.placement import CHUNKS, LOOPED, STRAIGHT, pipeline_of, ranks_of
from partopt.schedules.torch_csv import to_csv
from partopt.simulator import execute, simulate_plan
from partopt.simulator.execution import execute_csv, placement_of
from partopt.simulator.metrics import longest_span_s
from partopt.what_if.document import document_of
from tests.helpers import chain_profile, flat, two_level
from tests.report.timelines import plan_of as stages_of
from tests.simulator.plans import chunked, plan_of

ASYNCHRONOUS = [name for name, entry in SCHEDULES.items() if entry.asynchronous]
SYNCHRONOUS = [name for name, entry in SCHEDULES.items() if not entry.asynchronous]
CHUNKED = ("interleaved", "interleaved-zb", "zbv", "dualpipe", "dualpipev")


def made(name, P, M):
    if name in CHUNKED:
        return chunked(name, P, 3 if name.startswith("interleaved") else 2, M)
    return plan_of([1] * P, schedule=name, microbatches=M)


@pytest.mark.parametrize("P, M", [(2, 4), (4, 16), (6, 12)])
@pytest.mark.parametrize("name", [name for name in SCHEDULES if name not in ASYNCHRONOUS])
def test_an_iteration_takes_what_the_closed_form_says(name, P, M):
    plan = made(name, P, M)
    found = execute(plan)
    expected = SCHEDULES[name].makespan(P, len(plan.stages) // P, M)
    assert found.makespan_s == simulate_plan(plan).predicted.iteration_s == expected
    assert found.period_s == expected / M


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zb-h1"])
@pytest.mark.parametrize("engine", [{}, {"allreduce": "blocking"}, {"waits": ()}])
def test_an_own_order_is_executed_as_its_schedule_with_exchanges_in_the_background(name, engine):
    plan = plan_of([2, 2], cuts=[3], weights=[8, 4], schedule=name, microbatches=8)
    plan = plan.with_engine(bucket_bytes=1, **engine)
    text = to_csv(execute(plan).order, placement_of(plan))
    own = execute_csv(text, "mine", plan, 8)
    assert own.plan.schedule == "mine"
    overlapping = plan.with_engine(allreduce="overlap")
    assert own.makespan_s == execute(under(overlapping)).makespan_s


@pytest.mark.parametrize(("name", "span"), [("1f1b", 3 * 6 + 3 * 3), ("zb-h1", 3 * 6 + 3)])
@pytest.mark.parametrize("step", [0.0, 40.0])
def test_the_longest_span_ends_with_the_last_backward(name, span, step):
    """Zero-bubble papers quote it: the drain of one device overlaps the fill of another. No
    exchange of gradients and no step counts.
    """
    plan = plan_of([2] * 4, [1.0] * 4, [2.0] * 4, weights=[7] * 4, schedule=name, microbatches=12)
    plan = structs.replace(
        plan, stages=[structs.replace(stage, optimizer_s=step) for stage in plan.stages]
    )
    found = execute(plan)
    assert longest_span_s(found.timeline) == span
    assert found.makespan_s > span + step


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
    for name, v in (("gpipe", 1), ("1f1b", 1), ("interleaved", 3)):
        expected = pytest.approx((P - 1) / (v * M + P - 1), rel=1e-12)
        assert execute(made(name, P, M)).bubble == expected
    assert execute(made("naive", P, M)).bubble == pytest.approx(1 - 1 / P, rel=1e-12)


@pytest.mark.parametrize("P, M", [(2, 4), (3, 6)])
def test_gpipe_pays_for_latency_once_each_way(P, M):
    plan = plan_of([1] * P, schedule="gpipe", microbatches=M, topology=flat(P, 1.0, 0.25))
    assert execute(plan).makespan_s == 3 * (M + P - 1) + 2 * 0.25 * (P - 1)


FREE = {"optimizer_s": 0.0, "parameter_bytes": 0, "input_bytes": 0, "output_bytes": 0}


@pytest.mark.parametrize("d", [1, 2])
@pytest.mark.parametrize("name", [n for n in SCHEDULES if n not in (*ASYNCHRONOUS, "1f1b-eager")])
def test_equal_stages_idle_as_the_closed_form_says(name, d):
    shape = SCHEDULES[name].shape
    v = CHUNKS.get(shape, 3 if shape == LOOPED else 1)
    plan = under(stages_of(name, ranks_of(shape, 4, v, d), 12 * d, **FREE))
    assert pipeline_of(plan, shape) == (4, v, 12)
    assert execute(plan).bubble == pytest.approx(SCHEDULES[name].idle_share(4, v, 12), abs=1e-9)


def test_unequal_replicas_fill_as_one_pipeline_of_all_devices():
    plan = under(stages_of("1f1b", [[0, 1, 2], [3]], 30, **FREE))
    wide = msgspec.structs.replace(plan.stages[0], compute_s=9e-3, forward_s=3e-3, backward_s=6e-3)
    plan = msgspec.structs.replace(plan, stages=[wide, plan.stages[1]])
    assert pipeline_of(plan, STRAIGHT) == (4, 1, 30)
    assert execute(plan).bubble == pytest.approx(SCHEDULES["1f1b"].idle_share(4, 1, 30), abs=0.03)


PROFILE = Profile.load(find_shipped("gpt.cpu.float32", "profiles"))
CLUSTER = Topology.load(find_shipped("v100-pcie", "topologies"), 1)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_plan_predicts_the_memory_period_and_bubble_of_its_run(name, recompute):
    options = {"microbatches": None if SCHEDULES[name].asynchronous else 16, "recompute": recompute}
    problem = problem_of(PROFILE, CLUSTER, schedule=name, **options)
    plan = simulate_plan(planners.plan("gpipe", problem))
    simulation = execute(plan)
    assert plan.peak_memory_bytes == simulation.peak_memory_bytes.max()
    assert plan.predicted.period_s == pytest.approx(simulation.period_s, rel=1e-12)
    assert plan.predicted.bubble == pytest.approx(simulation.bubble, abs=1e-12)
    document = document_of(simulation, plan, [])
    assert (document.layers, document.stages) == (len(PROFILE.layers), len(plan.stages))
    assert document.parameter_bytes == PROFILE.parameter_bytes()
    assert document.planned.period_s == plan.predicted.period_s
    assert document.changed == []


def bound_by(bytes_between, replicas=(1, 1, 1), weights=0, latency=0.0, cluster=None):
    """Of stages of 3 ms behind links of 1 GB/s."""
    S = len(replicas)
    content = chain_profile([1e-3] * S, [2e-3] * S, [bytes_between] * S, [weights] * S)
    cluster = cluster or flat(sum(replicas), latency=latency)
    problem = problem_of(content, cluster, cuts=range(1, S), replicas=replicas)
    return simulate_plan(planners.plan("manual", problem)).predicted.bound_by


def test_what_binds_is_what_is_always_busy():
    """Each message of 10 MB takes 10 ms, and the middle device sends two of them for each
    microbatch through its one port out. With two replicas each port has a message and a ring of 10
    MB every second microbatch. Behind 15 devices on four servers of four stands one whose server's
    port takes 12 of 15 messages.
    """
    assert bound_by(0).startswith("compute of stage")
    assert bound_by(10**7) == "ports of stage 1"
    assert bound_by(10**7, (2, 2), weights=10**7) == "ports of stage 0"
    assert bound_by(10**7, (15, 1), cluster=two_level(4, 4, 1e9, 1e9)) == "cut before stage 1"
    assert bound_by(0, latency=1e-2) == "microbatches in flight"
