"""The simulated steady state beside what a planner minimises, the largest load of any device, ring
and side of a cut.

Under PipeDream's 1F1B-RR every replica of stage s alternates a forward with the backward of the one
w_s before it. What waits for what is then the same for every microbatch, and with messages that
take the same time each and no ports shared, the period is the largest of

    (sum of C_u over s <= u <= t, and 2 x for each cut between)  /  (r_s (w_s + 1) - r_t w_t)

seconds per microbatch over all stages s <= t: from a forward of stage s down to stage t, and from
the backward that follows it there back up to the forward that waits for it. With s = t it is
C_s / r_s, the load of a device.
"""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from partopt.cost.collectives import allreduce_over
from partopt.cost.pricing import under
from partopt.simulator import execute
from partopt.simulator.work import ports_of
from tests.examples import examples
from tests.helpers import BLOCKING, flat, two_level
from tests.simulator.plans import plan_of, plans
from tests.simulator.reference_network import port_pair


def round_trips_s(plan, message_s=0.0):
    """The formula above."""
    C, r, w = (
        [getattr(stage, name) for stage in plan.stages]
        for name in ("compute_s", "replicas", "warmup")
    )
    S = len(C)
    return max(
        (sum(C[s : t + 1]) + 2 * (t - s) * message_s) / (r[s] * (w[s] + 1) - r[t] * w[t])
        for s in range(S)
        for t in range(s, S)
    )


def ratio(*arguments, **options):
    """The simulated period over the planner's."""
    plan = plan_of(*arguments, **options)
    return execute(plan).period_s / plan.predicted.period_s


def enough(replicas):
    """w_s = ceil(r_{s+1} (w_{s+1} + 1) / r_s), from the last stage's 0: then no round trip takes
    longer than its devices' loads.
    """
    warmups = [0]
    for r, following in zip(replicas[-2::-1], replicas[:0:-1], strict=True):
        warmups.insert(0, -(-following * (warmups[0] + 1) // r))
    return warmups


def close(value):
    return pytest.approx(value, rel=1e-9)


free = plans(messages=False, gradients=False, stages=5, replicas=4)


@pytest.mark.slow
@examples(150)
@given(free)
def test_without_messages_the_objective_is_exact_where_every_warm_up_reaches_the_next_stage(plan):
    """PipeDream's warm-up is rounded down at each stage by itself, and may leave a stage less ahead
    of the next than both compute.

    1-2-1, balanced: stage 0 has 4 in flight, stage 1 has 2 before its backward; C_0 + C_1 = 9 s for
    4 - 2 microbatches: 4.5 s, not 3.
    """
    assert execute(plan).period_s == close(round_trips_s(plan))
    deep = under(plan, warmups=enough([stage.replicas for stage in plan.stages]))
    assert execute(deep).period_s == close(plan.predicted.period_s)
    if all(own.warmup >= least.warmup for own, least in zip(plan.stages, deep.stages, strict=True)):
        assert execute(plan).period_s == close(plan.predicted.period_s)


def test_a_warm_up_that_is_rounded_down_twice_costs_half_as_much_again():
    assert ratio([1, 2, 1]) == close(1.5)
    assert ratio([1, 4, 1]) == close(2.5)
    assert ratio([2, 1, 1]) == ratio([3, 2]) == ratio([1, 1, 1, 1]) == close(1.0)


@pytest.mark.slow
@examples(60)
@given(
    st.integers(1, 6),
    st.lists(st.integers(1, 20), min_size=6, max_size=6),
    st.sampled_from([0.0, 0.5, 2.0]),
)
def test_latency_is_part_of_every_round_trip(S, seconds, latency):
    """Equal stages: 2c(P-1)/P more, 1F1B's; 5 s of compute with 1 s of latency on 4 stages: 5 + 6/4
    s. Planners leave latency out.
    """
    on, forward = flat(S, 1.0, latency), [float(each) for each in seconds[:S]]
    plan = plan_of([1] * S, forward, [0.0] * S, topology=on)
    assert execute(plan).period_s == close(round_trips_s(plan, latency))
    expected = close(3.0 + 2 * latency * (S - 1) / S)
    assert execute(plan_of([1] * S, topology=on)).period_s == expected


@pytest.mark.slow
@examples(60)
@given(st.lists(st.integers(1, 12), min_size=4, max_size=4), st.integers(0, 30))
def test_two_stages_take_their_load_or_the_round_trip_of_two_microbatches(seconds, size):
    """Here each message has two ports to itself. 3 s and 3 s of compute, 0.5 s each way: (3 + 3 +
    1) / 2 s, not 3.
    """
    f, g = [float(each) for each in seconds[:2]], [float(each) for each in seconds[2:]]
    plan = plan_of([1, 1], f, g, cuts=[size])
    expected = max(plan.predicted.period_s, round_trips_s(plan, float(size)))
    assert execute(plan).period_s == close(expected)


@pytest.mark.slow
@examples(60)
@given(plans(stages=1, replicas=6))
def test_the_objective_is_exact_for_data_parallelism(plan):
    assert execute(plan).period_s == close(plan.predicted.period_s)


def port_loads_s(plan):
    """Seconds per microbatch for which transfers and rings hold every port, from who sends what to
    whom.
    """
    ports, on = ports_of(plan.topology), plan.topology
    load = np.zeros(ports.count)
    G = math.lcm(*(stage.replicas for stage in plan.stages))
    for before, after in zip(plan.stages, plan.stages[1:], strict=False):
        for m in range(G):
            pair = before.ranks[m % before.replicas], after.ranks[m % after.replicas]
            k = on.common_level(*pair)
            for source, destination in (pair, pair[::-1]):
                for port in {port_pair(ports, source, k)[0], port_pair(ports, destination, k)[1]}:
                    load[port] += (
                        after.input_bytes / ports.bandwidth[k - 1] / ports.lanes[k - 1] / G
                    )
    for stage in plan.stages:
        slopes = allreduce_over(stage.ranks, on).slopes
        for port, k in zip(*ports.of_ring(stage.ranks), strict=True):
            load[port] += slopes[k] * stage.parameter_bytes / stage.replicas
    return load


@pytest.mark.slow
@examples(200)
@given(plans())
def test_nothing_is_faster_than_its_busiest_device_port_or_round_trip_allows(plan):
    least = max(port_loads_s(plan).max(), round_trips_s(plan))
    assert execute(plan).period_s >= least * (1 - 1e-9)


def test_replicas_that_wait_for_each_others_gradients_need_a_deeper_warm_up():
    """2-1-1: both replicas of stage 0 wait until the later one has its gradient, and hold 2
    microbatches each meanwhile. One more forward in the warm-up restores the ideal.
    """
    waiting = {(3, 1): 1.0, (15, 1): 1.0, (2, 1, 1): 1.5, (1, 2): 1.5, (3, 2): 4 / 3, (2, 3): 4 / 3}
    for replicas, factor in waiting.items():
        assert ratio(replicas, engine=BLOCKING) == close(factor)
        assert ratio(replicas) == close(1.0)
    plan = plan_of([2, 1, 1], engine=BLOCKING)
    first, *others = (stage.warmup for stage in plan.stages)
    assert execute(under(plan, warmups=[first + 1, *others])).period_s == close(3.0)


@pytest.mark.slow
@examples(200)
@given(plans(gradients=False))
def test_loads_of_ports_are_those_of_the_busiest(plan):
    loads = {load.what: load.seconds for load in plan.predicted.estimate.loads}
    most = max(loads.get("cut", 0.0), loads.get("ports", 0.0))
    assert most == close(port_loads_s(plan).max(initial=0.0))


# replicas, forward, backward, cuts, weights, topology, the objective
SHARED_PORTS = [
    # stage 1 receives 1 s of activations and 1 s of gradients for each microbatch: the sum
    ([1, 1, 1], [0.1] * 3, [0.1] * 3, [1, 1], None, None, 2.0),
    # two replicas send 4 s of messages and 8 s of gradients out of each port per 2 microbatches
    ([2, 1], [1.0, 1.0], [0.0, 0.0], [4], [8, 0], flat(3, 1.0, links=1), 6.0),
    # 15-1 on four servers of four, 10 s a message between servers: 12 of 15 enter the last server
    ([15, 1], [0.0, 0.0], [15.0, 1.0], [10], None, two_level(4, 4, 1e9, 1.0), 8.0),
    # 3-1 on two servers of two with a bus between: one message of three stays in the second server
    ([3, 1], [0.0, 0.0], [3.0, 1.0], [9], None, two_level(2, 2, 1e9, 1.0, outer_bus=True), 12.0),
    # 8 s a message, of which two pass at a time
    ([2, 1], [0.0, 0.0], [2.0, 1.0], [8], None, flat(3, 1.0, links=2), 4.0),
]


@pytest.mark.parametrize("replicas, forward, backward, cuts, weights, topology, load", SHARED_PORTS)
def test_what_passes_a_port_adds_up(replicas, forward, backward, cuts, weights, topology, load):
    plan = plan_of(replicas, forward, backward, cuts, weights, topology)
    assert plan.predicted.period_s == close(load) == port_loads_s(plan).max()
    assert load <= execute(plan).period_s * (1 + 1e-9) < 2 * load


def test_stages_replicated_over_the_same_servers_share_their_ports():
    """Two stages on a device of each of two servers: both rings leave by the servers' ports, 9 s
    each a round of two microbatches.

    Each alone would take 4.5 s per microbatch, as the planner has it.
    """
    on = two_level(2, 2, 1e9, 1.0)
    plan = plan_of([2, 2], [1.0, 1.0], [0.0, 0.0], weights=[9, 9], topology=on)
    stages = [replace(stage, ranks=[s, s + 2]) for s, stage in enumerate(plan.stages)]
    nested = under(replace(plan, stages=stages))
    assert [stage.allreduce_s for stage in nested.stages] == [9.0, 9.0]
    assert execute(nested).period_s == close(9.0)
