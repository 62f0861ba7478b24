"""Loads, steady states and iterations worked by hand.

Layers take 1 s forward and 2 s backward unless said otherwise.
"""

import math
from dataclasses import replace
from itertools import pairwise

import hypothesis
import pytest
from hypothesis import strategies as st
from msgspec import structs

from partopt.cost.problem import CONTIGUOUS, NESTED, Partition, consecutive
from partopt.documents.plan import Estimate
from tests.examples import examples
from tests.helpers import BLOCKING, WAITING, two_level
from tests.planners.problems import (
    chain,
    chains,
    priced,
    problem,
    topologies,
    topology,
    with_messages,
)


def layers(count: int, cut: int = 0, weight: int = 0):
    return chain([1] * count, [2] * count, [cut] * (count - 1), [weight] * count)


def estimate(given, bounds, replicas=None, family=CONTIGUOUS, ranks=None) -> Estimate:
    """The estimate of stages between `bounds`, on consecutive ranks unless `ranks` are given."""
    stages = consecutive(bounds, replicas)
    if ranks:
        stages = [replace(stage, ranks=own) for stage, own in zip(stages, ranks, strict=True)]
    return priced(given, Partition(family, stages)).predicted.estimate


def loads(found: Estimate) -> dict[str, tuple[int, float]]:
    return {load.what: (load.place, load.seconds) for load in found.loads}


def synchronous(model, on, M, **options):
    return problem(model, on, **{"schedule": "1f1b", "microbatches": M} | options)


def test_the_period_is_the_slowest_stage_over_its_replicas():
    found = estimate(problem(layers(4), topology((4, 1.0))), [0, 3, 4], [3, 1])
    assert (found.period_s, found.bound_by) == (max(9 / 3, 3 / 1), "compute of stage 0")


def test_an_allreduce_longer_than_the_compute_binds():
    """Two replicas exchange 2 * 1/2 * 30 bytes at 1 byte/s in 30 s, for every two microbatches of 3
    s each. Devices that wait for it compute in addition.
    """
    given = problem(layers(1, weight=30), topology((2, 1.0)))
    found = estimate(given, [0, 1], [2])
    assert (found.period_s, found.bound_by) == (30 / 2, "all-reduce of stage 0")
    waiting = estimate(given.with_(engine=BLOCKING), [0, 1], [2])
    assert waiting.bound_by == "compute and all-reduce of stage 0"
    assert waiting.period_s == (3 + 30) / 2


def test_a_narrow_cut_binds():
    """Servers of 2: ranks 0-1 and 2. The first stage leaves its server by one port."""
    given = problem(layers(2, cut=40), topology((2, 100.0), (2, 10.0)))
    found = estimate(given, [0, 1, 2], [2, 1])
    assert (found.period_s, found.bound_by) == (40 / 10, "cut before stage 1")


def test_the_messages_of_a_server_pass_one_port():
    """Four servers of 4, ranks 0-14 and 15: twelve of 15 messages enter the last server."""
    given = problem(layers(2, cut=120), topology((4, 100.0), (4, 10.0)))
    assert loads(estimate(given, [0, 1, 2], [15, 1]))["cut"] == (
        1,
        pytest.approx(120 * 12 / 15 / 10),
    )


def test_a_nested_pipeline_sends_inside_its_servers():
    given = problem(layers(2, cut=40), topology((2, 100.0), (2, 10.0)))
    found = estimate(given, [0, 1, 2], [2, 2], NESTED, [[0, 2], [1, 3]])
    assert loads(found)["cut"] == (1, 40 / (100 * 2))


def test_a_bus_carries_both_ways_of_all_and_several_links_as_many_messages():
    for on, seconds in (
        (topology((3, 1.0), bus=True), 2 * 8),
        (topology((3, 1.0), links=2), 8 / 2),
        (topology((3, 1.0)), 8),
    ):
        assert (
            loads(estimate(problem(layers(2, cut=8), on), [0, 1, 2], [2, 1]))["cut"][1] == seconds
        )


def test_a_device_passes_to_itself_without_a_port():
    """In a V the second and the third stage share a device."""
    given = synchronous(layers(4, cut=8), topology((2, 1.0)), 8, schedule="zbv")
    found = estimate(given, range(5), family="vee", ranks=[[0], [1], [1], [0]])
    assert loads(found)["ports"] == (0, 8 + 8)
    assert loads(found)["cut"] == (1, 8)
    assert loads(found)["compute"] == (0, 3 + 3)


def test_what_a_port_carries_adds_up():
    """The middle device sends activations on and gradients back by one port. Two replicas send half
    of 4 bytes each by their own, and their gradients in between.
    """
    found = estimate(problem(layers(3, cut=4), topology((3, 1.0))), range(4))
    assert (found.period_s, found.bound_by) == (4 + 4, "ports of stage 1")
    ringed = problem(chain([1, 1], [2, 2], [4], [8, 0]), topology((3, 1.0)))
    assert loads(estimate(ringed, range(3), [2, 1])) == {
        "compute": (1, 3.0),
        "all-reduce": (0, 8 / 2),
        "cut": (1, 4.0),
        "ports": (0, 4 / 2 + 8 / 2),
    }


@pytest.mark.parametrize("bus", [False, True])
def test_serial_transfers_make_the_devices_wait(bus):
    """3 s of compute, and an activation and a gradient of 0.5 s each."""
    given = problem(layers(2, cut=5), topology((2, 10.0), bus=bus), engine=WAITING)
    found = estimate(given, range(3))
    assert (found.period_s, found.bound_by) == (3 + 2 * 0.5, "compute and transfers of stage 0")


def test_no_message_waits_between_stages_of_one_device():
    """In a V the ends wait for an activation and a gradient of 8 s; the second and the third stage
    share a device, which has the messages of both other cuts.
    """
    on, how = topology((2, 1.0)), {"schedule": "zbv", "engine": WAITING}
    found = estimate(
        synchronous(layers(4, cut=8), on, 8, **how),
        *(range(5), None, "vee", [[0], [1], [1], [0]]),
    )
    assert loads(found)["compute and transfers"] == (0, 3 + 3 + 2 * 8)


def test_what_messages_take_of_devices_is_part_of_what_these_do_though_none_waits():
    """3 s of compute, and 0.25 s and 5/20 s of an activation and of a gradient each."""
    cluster = topology((2, 10.0))
    handled = structs.replace(cluster.levels[0], overhead_s=0.25, copy_bytes_per_s=20.0)
    given = problem(layers(2, cut=5), structs.replace(cluster, levels=[handled]))
    found = estimate(given, range(3))
    assert (found.period_s, found.bound_by) == (3 + 2 * 0.5, "compute and transfers of stage 0")


def test_recomputation_adds_a_forward():
    given = problem(layers(2), topology((2, 1.0)), recompute="always")
    assert estimate(given, range(3)).period_s == 4


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("P, M", [(1, 1), (4, 1), (4, 8), (3, 16)])
def test_equal_stages_take_three_times_microbatches_and_stages_less_one(schedule, P, M):
    given = synchronous(layers(P), topology((P, 1.0)), M, schedule=schedule)
    assert estimate(given, range(P + 1)).iteration_s == 3 * (M + P - 1)


def test_without_overlap_an_iteration_is_every_microbatch_through_every_stage():
    given = synchronous(layers(4), topology((4, 1.0)), 8, schedule="naive")
    found = estimate(given, range(5))
    assert (found.iteration_s, found.bound_by) == (3 * 4 * 8, "every stage in turn")
    assert found.loads == []


def test_gradients_are_exchanged_once_an_iteration_and_pace_nothing():
    """64 microbatches of 3 s on two replicas, then 2 * 1/2 * 10 bytes at 1 byte/s."""
    given = synchronous(layers(1, weight=10), topology((2, 1.0)), 64)
    found = estimate(given, [0, 1], [2])
    assert (found.iteration_s, found.period_s) == (64 / 2 * 3 + 10, (96 + 10) / 64)
    assert found.bound_by == "compute of stage 0"
    assert loads(found)["all-reduce"] == (0, 10 / 64)


def test_an_iteration_is_set_by_the_stage_that_makes_it_longest_not_by_the_longest_turn():
    """A plan of 2-1 and M = 8: 6 s on two replicas, 3 s on one, then a slower first stage: never
    faster.
    """

    def iteration(first: int) -> float | None:
        model = chain([first, 3000], [0, 0], [0], [0, 0])
        return estimate(synchronous(model, topology((3, 1e9)), 8), range(3), [2, 1]).iteration_s

    assert iteration(6000) == 6000 + 8 * 3000
    assert iteration(6001) == 6001 + 8 * 3000
    assert iteration(9000) == 3000 + 4 * 9000


def test_microbatches_that_do_not_divide_among_replicas_leave_one_with_more():
    """Three microbatches of 3 s on two replicas: one of them runs two."""
    assert estimate(synchronous(layers(1), topology((2, 1.0)), 3), [0, 1], [2]).iteration_s == 6


def test_a_cut_carries_every_microbatch_of_an_iteration():
    """Two stages of 3 s, 5 bytes between them at 1 byte/s, four microbatches: the first activation
    leaves after 1 s, and behind the last gradient comes a backward of 2 s.
    """
    given = synchronous(layers(2, cut=5), topology((2, 1.0)), 4)
    assert estimate(given, range(3)).iteration_s == 1 + 4 * 5 + 2


@pytest.mark.parametrize(("replicas", "exchange_s"), [(1, 0), (2, 12)])
def test_an_iteration_ends_with_the_exchange_and_the_step_of_the_optimizer(replicas, exchange_s):
    """Four microbatches on each; two exchange 12 bytes at 1 byte/s, and the step takes 5 s."""
    model = replace(layers(1, weight=12), optimizer_s=5.0)
    given = synchronous(model, topology((replicas, 1.0)), 4 * replicas, engine=BLOCKING)
    found = estimate(given, [0, 1], [replicas])
    assert found.iteration_s == 4 * 3 + exchange_s + 5


def test_an_update_hides_behind_the_backwards_of_the_stages_before():
    """The second stage computes from 1 s to 7 s, and exchanges its gradients meanwhile."""

    def iteration(weight: int) -> float | None:
        model = chain([1, 1], [2, 2], [0], [0, weight])
        return estimate(synchronous(model, topology((4, 1.0)), 4), range(3), [2, 2]).iteration_s

    assert [iteration(weight) for weight in (0, 2, 3)] == [9, 9, 10]


def test_gradients_of_weights_may_come_last():
    """The second stage begins after 1 s and has 4 * 3 s of work; its last gradient leaves before
    that is done.
    """
    given = synchronous(layers(2), topology((2, 1.0)), 4, schedule="zb-h1")
    assert estimate(given, range(3)).iteration_s == 1 + 4 * 3


def test_recomputation_while_a_stage_waits_delays_no_gradient():
    """One microbatch: the second stage begins after 1 s and takes 1 + 3 s; then the first has its
    backward of 2 s, and a forward of 1 s before it unless GPipe did that meanwhile.
    """
    for schedule, tail in (("gpipe", 2), ("1f1b", 3)):
        given = synchronous(layers(2), topology((2, 1.0)), 1, schedule=schedule, recompute="always")
        assert estimate(given, range(3)).iteration_s == 1 + 4 + tail


def test_with_serial_transfers_the_fullest_replica_waits_for_its_own_messages():
    """A 2-2 split, three microbatches of 8 bytes: two of them on the fullest replica, each of 3 s
    and 2 * 8 s of messages, of which the first and the last keep nothing waiting.
    """
    given = synchronous(layers(2, cut=8), topology((4, 1.0)), 3, engine=WAITING)
    assert estimate(given, range(3), [2, 2]).iteration_s == 1 + 2 * 3 + 2 * 8 + 2


@pytest.mark.slow
@examples(60)
@hypothesis.given(chains(), topologies(), st.data())
def test_what_binds_is_the_largest_of_the_loads(model, cluster, data):
    """Also which of several equal ones, so that a plan's loads name what its `bound_by` does."""
    given = problem(
        model, cluster, **data.draw(st.sampled_from([{}, {"schedule": "1f1b", "microbatches": 4}]))
    )
    cuts = sorted(data.draw(st.sets(st.integers(1, model.layers - 1)))) if model.layers > 1 else []
    size = len(cuts) + 1
    replicas = data.draw(st.lists(st.integers(1, 3), min_size=size, max_size=size))
    hypothesis.assume(sum(replicas) <= cluster.devices)
    found = estimate(given, [0, *cuts, model.layers], replicas)
    pacing = [
        each for each in found.loads if given.microbatches is None or each.what != "all-reduce"
    ]
    assert found.bound_by == str(max(pacing, key=lambda load: load.seconds))


def port_seconds(plan) -> tuple[list[dict], dict]:
    """Seconds for each microbatch in which ports carry what crosses each cut, and all cuts.

    Message by message, of as many microbatches as the iteration has, or as the ranks of both sides
    take turns. Both ends have a port of the level where they part, or share a bus, both ways.
    """
    on, by_cut, together = plan.topology, [], {}
    for before, after in pairwise(plan.stages):
        turns = math.lcm(before.replicas, after.replicas)
        turns = min(turns, plan.microbatches or turns)
        found = {}
        for m in range(turns):
            ends = before.ranks[m % before.replicas], after.ranks[m % after.replicas]
            k = on.common_level(*ends)
            if not k:
                continue
            level, bytes_each = on.levels[k - 1], (after.input_bytes + after.gradient_bytes) / 2
            for end in ends:
                port = k, end // on.group_size(k if level.bus else k - 1)
                seconds = bytes_each / level.bandwidth_bytes_per_s / level.links / turns
                found[port] = found.get(port, 0.0) + seconds
        by_cut.append(found)
        for port, seconds in found.items():
            together[port] = together.get(port, 0.0) + seconds
    return by_cut, together


@pytest.mark.slow
@examples(150)
@hypothesis.given(st.data())
def test_ports_carry_what_is_counted_message_by_message(data):
    """Under a flush, with fewer microbatches than the ranks of a cut take turns, and more; on
    servers of two, with buses and several links.
    """
    buses, links = st.booleans(), st.integers(1, 2)
    on = two_level(
        *(2, 6, 4.0, 1.0),
        inner_bus=data.draw(buses),
        outer_bus=data.draw(buses),
        inner_links=data.draw(links),
        outer_links=data.draw(links),
    )
    replicas = data.draw(st.lists(st.integers(1, 4), min_size=2, max_size=3))
    S = len(replicas)
    cuts = data.draw(st.lists(st.integers(1, 9), min_size=S - 1, max_size=S - 1))
    model = data.draw(with_messages(chain([1] * S, [2] * S, cuts, [0] * S)))
    given = synchronous(model, on, data.draw(st.integers(1, 12)))
    plan = priced(given, Partition(CONTIGUOUS, consecutive(range(S + 1), replicas)))
    found, (by_cut, together) = loads(plan.predicted.estimate), port_seconds(plan)
    longest = max(max(own.values(), default=0.0) for own in by_cut)
    busiest = max(together, key=together.get, default=None)
    assert found.get("cut", (0, 0.0))[1] == pytest.approx(longest)
    if sum(busiest in own for own in by_cut) > 1:
        assert found["ports"][1] == pytest.approx(together[busiest])
    else:
        assert "ports" not in found or found["ports"][1] == pytest.approx(longest)
