"""What the flows of a plan cost, against cases by hand and against plans that have the bytes."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from partopt import planners
from partopt.cost.pricing import under
from partopt.cost.problem import problem_of
from partopt.simulator.execution import execute
from partopt.what_if import variation as module
from partopt.what_if.variation import FLOW_SLOWER as SLOWER
from partopt.what_if.variation import flows_of
from tests.helpers import BLOCKING, chain_profile, flat, two_level

MB = 10**6


def planned(profile, topology, replicas, **options):
    """The priced plan of a layer a stage."""
    stated = {"schedule": "1f1b", "microbatches": 4, "engine": BLOCKING, **options}
    cuts = tuple(range(1, len(replicas)))
    problem = problem_of(profile, topology, cuts=cuts, replicas=tuple(replicas), **stated)
    return planners.plan("manual", problem)


def costs(plan):
    """Kind and place of each flow, and its cost."""
    return {
        (flow.kind, flow.source if flow.stage is None else flow.stage): flow
        for flow in flows_of(execute(plan)).flows
    }


def test_one_microbatch_waits_for_every_message():
    """F 1 s, message 2 s, F 1 s, B 1 s, message 2 s, B 1 s: 8 s, half of it messages. Without its
    bytes a message still has its latency.
    """
    profile = chain_profile([1.0, 1.0], output_bytes=[2 * MB, 0])
    for latency_s, whole_s in ((0.0, 8), (1.0, 10)):
        on = flat(2, 1e6, latency=latency_s)
        found = costs(planned(profile, on, [1, 1], microbatches=1))
        for flow in (found["send", 0], found["send", 1]):
            assert (flow.critical, flow.times, flow.ranks) == (True, 1.0, [0, 1])
            assert flow.takes_s == 2.0 + latency_s
            assert flow.share == pytest.approx(flow.takes_s / whole_s)
            assert flow.per_second == pytest.approx(1.0)
            assert flow.saved == pytest.approx(2 / whole_s)


def test_a_message_of_nanoseconds_is_as_critical_as_one_of_seconds():
    for unit_s in (1.0, 1e-9):
        profile = chain_profile([unit_s, unit_s], output_bytes=[2 * MB, 0])
        found = costs(planned(profile, flat(2, 1e6 / unit_s), [1, 1], microbatches=1))
        assert found["send", 0].critical and found["send", 1].critical


def test_what_all_flows_are_of_is_stated_an_iteration_where_there_is_one():
    profile = chain_profile([1.0, 1.0], output_bytes=[2 * MB, 0])
    plan = planned(profile, flat(2, 1e6), [1, 1], microbatches=2)
    for schedule, M, iteration_s in (("1f1b", 2, 10.0), ("pipedream", None, None)):
        execution = execute(under(plan, schedule, M))
        found = flows_of(execution)
        assert (found.schedule, found.microbatches) == (schedule, M)
        assert (found.period_s, found.iteration_s) == (execution.period_s, iteration_s)
        assert (found.shape, found.slower) == ("1-1", SLOWER)


def test_of_two_all_reduces_the_one_that_ends_last_is_critical():
    """Each stage exchanges 2 MB over two devices, 2 s; stage 1 ends its backwards 1 s earlier."""
    profile = chain_profile([1.0, 1.0], parameter_bytes=[2 * MB, 2 * MB])
    found = costs(planned(profile, flat(4, 1e6), [2, 2], microbatches=2))
    assert (found["allreduce", 0].critical, found["allreduce", 1].critical) == (True, False)
    assert found["allreduce", 0].per_second == pytest.approx(1.0)
    # 4 s of compute, and the exchange of stage 1 is over at 5 s
    assert found["allreduce", 0].saved == pytest.approx((6 - 5) / 6)
    assert (found["allreduce", 1].per_second, found["allreduce", 1].saved) == (0.0, 0.0)


def test_what_is_hidden_behind_the_compute_of_a_steady_state_is_not_critical():
    """Stage 0 takes 6 s a microbatch; with two in flight one comes back 8.2 s after it left."""
    profile = chain_profile([3.0, 1.0], output_bytes=[MB // 10, 0])
    options = {"schedule": "pipedream", "microbatches": None}
    fast = costs(planned(profile, flat(2, 1e6), [1, 1], **options))
    assert [flow.critical for flow in fast.values()] == [False, False]
    slow = costs(planned(profile, flat(2, 1e4), [1, 1], **options))
    assert all(flow.critical for flow in slow.values())
    assert slow["send", 0].times == 1.0


def test_replicas_have_their_parts_of_the_messages_and_exchange_together():
    """3-1 in a steady state of 3 s a microbatch: each of three sends one message of 2 s in three,
    and the exchange of 2 * 2/3 * 3 MB takes 4 s once for three microbatches.
    """
    profile = chain_profile([4.5, 1.5], [4.5, 1.5], [2 * MB, 0], [3 * MB, 0])
    plan = planned(profile, flat(4, 1e6), [3, 1], schedule="pipedream", microbatches=None)
    execution, found = execute(plan), costs(plan)
    send, exchange = found["send", 0], found["allreduce", 0]
    assert (send.takes_s, send.times, send.ranks) == (2.0, 1.0, [0, 1, 2, 3])
    assert send.share == pytest.approx(2 / 3 / execution.period_s)
    assert (exchange.takes_s, exchange.times) == pytest.approx((4, 1 / 3))
    assert exchange.share == pytest.approx(4 / 3 / execution.period_s)
    assert all(flow.share <= 1 for flow in found.values())


@pytest.mark.parametrize(("parameters", "critical"), [(MB, False), (100 * MB, True)])
def test_gathers_beside_the_compute_are_critical_where_they_take_longer(parameters, critical):
    profile = chain_profile([1.0, 1.0], parameter_bytes=[parameters] * 2)
    plan = planned(profile, flat(4, 1e7), [2, 2], shard="parameters")
    found = costs(plan)
    assert {kind for kind, _ in found} == {"allgather", "reducescatter", "send"}
    assert found["allgather", 0].critical is critical
    assert found["allgather", 0].times == 4.0
    for kind in ("allgather", "reducescatter"):  # the last stage never waits
        assert found[kind, 1].per_second == pytest.approx(float(critical))


def test_shares_of_an_exchange_are_made_slower_apart():
    """With the optimizer in shares an exchange is a scatter and a gather, each half of it."""
    profile = chain_profile([1.0, 1.0], parameter_bytes=[2 * MB, 2 * MB])
    found = costs(planned(profile, flat(4, 1e6), [2, 2], microbatches=2, shard="optimizer"))
    for kind in ("reducescatter", "allgather"):
        assert found[kind, 0].takes_s == pytest.approx(1.0)
        assert found[kind, 0].per_second == pytest.approx(1.0)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_slower_flow_costs_what_a_plan_with_more_bytes_does(data):
    """Without latency 1 % more time is 1 % more bytes: of the cut, or of the stage's gradients."""
    S = data.draw(st.integers(2, 4))
    seconds = data.draw(st.lists(st.integers(1, 5).map(float), min_size=S, max_size=S))
    sizes = data.draw(st.lists(st.integers(1, 30).map(lambda n: n * MB), min_size=S, max_size=S))
    d = data.draw(st.sampled_from([1, 2]))
    profile = chain_profile(seconds, output_bytes=sizes, parameter_bytes=sizes[::-1])
    topology = data.draw(st.sampled_from([flat(S * d, 1e7), two_level(2, S * d, 2e7, 5e6)]))
    plan = planned(profile, topology, [d] * S)
    whole_s = execute(plan).makespan_s
    for flow in flows_of(execute(plan)).flows:
        s = flow.stage if flow.stage is not None else max(flow.source, flow.destination)
        own = plan.stages[s]
        if flow.kind == "allreduce":
            changes = {"parameter_bytes": own.parameter_bytes + round(SLOWER * flow.bytes)}
        elif flow.source < flow.destination:
            changes = {
                "input_bytes": own.input_bytes + round(SLOWER * flow.bytes),
                "back_bytes": own.gradient_bytes,
            }
        else:
            changes = {"back_bytes": own.gradient_bytes + round(SLOWER * flow.bytes)}
        stages = [*plan.stages[:s], replace(own, **changes), *plan.stages[s + 1 :]]
        more_s = execute(replace(plan, stages=stages)).makespan_s - whole_s
        assert flow.critical is (more_s > 1e-9 * whole_s)
        busy_s = flow.takes_s * flow.times / (d if flow.kind == "send" else 1)
        assert flow.share == pytest.approx(busy_s / whole_s)
        assert flow.share <= 1
        assert flow.per_second * SLOWER * busy_s == pytest.approx(more_s, abs=1e-7 * whole_s)


def test_too_many_executions_are_not_made(monkeypatch):
    monkeypatch.setattr(module, "MOST_TRIED", 10)
    profile = chain_profile([1.0, 1.0], output_bytes=[MB, 0])
    flows = flows_of(execute(planned(profile, flat(2, 1e6), [1, 1])))
    assert flows.unknown == 2
    assert [(flow.critical, flow.per_second, flow.saved) for flow in flows.flows] == [
        (None, None, None)
    ] * 2
    assert flows.flows[0].takes_s == 1.0
