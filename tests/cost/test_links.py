"""Cases worked by hand: bytes over bytes per second, the arithmetic in the assertion."""

import math
from collections import Counter
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partopt.cost.collectives import allreduce_over, allreduce_s, members_crossed, tied_s
from partopt.cost.links import network_of, paired_sides_s, run_sides_s, transfer_s, wait_s
from partopt.documents.topology import Device, Level, Topology
from partopt.planners.pipedream import cut_s, stage_s
from partopt.simulator.work import ports_of
from tests.examples import examples
from tests.simulator.reference_network import port_pair


def cluster(*levels: Level) -> Topology:
    """Levels with rings."""
    device = Device(name="device")
    return Topology(name="cluster", device=device, levels=list(levels), allreduce="ring")


def level(
    size: int, bandwidth: float, links: int = 1, latency_s: float = 0.0, bus: bool = False
) -> Level:
    return Level(
        name=f"of {size}",
        size=size,
        bandwidth_bytes_per_s=bandwidth,
        links=links,
        latency_s=latency_s,
        bus=bus,
    )


def sides_s(
    topology: Topology, ranks: range, before: tuple[float, int] = (0, 0), after=(0, 0), ring=()
) -> float:
    """`run_sides_s` of the bytes and the gap of each cut; gap 0 for no cut. Of a `ring` the bytes,
    and the seconds that it pauses.
    """
    (size_before, gap_before), (size_after, gap_after) = before, after
    none, ends = len(topology.levels) + 1, (ranks[0], ranks[-1])
    gaps = (gap_before or none, gap_after or none)
    return run_sides_s(network_of(topology), size_before, size_after, *ends, *gaps, *ring)


SERVERS = cluster(level(4, 100.0, latency_s=0.5), level(4, 10.0, links=2, latency_s=3.0))


def test_a_transfer_takes_one_link_of_the_lowest_common_level_and_its_latency():
    assert transfer_s(400, 1, SERVERS) == 0.5 + 400 / 100
    assert transfer_s(400, 2, SERVERS) == 3.0 + 400 / 10


def test_an_allreduce_inside_a_server_is_a_ring_on_its_links():
    """Four members move 2 * 3/4 of 400 bytes at 100 bytes/s, in 2 * 3 steps of 0.5 s."""
    assert allreduce_s(400, range(4), SERVERS) == 2 * 3 / 4 * 400 / 100 + 2 * 3 * 0.5


def test_an_allreduce_across_servers_goes_at_the_pace_of_the_narrowest_level_on_all_its_links():
    """Eight members: the outer level moves 10 * 2 bytes/s, less than the inner 100; 14 steps of the
    larger latency.
    """
    assert allreduce_s(400, range(8), SERVERS) == 2 * 7 / 8 * 400 / 20 + 14 * 3.0


def test_stages_that_hold_tied_parameters_exchange_gradients_in_a_ring_at_the_outermost_level():
    """Of 400 bytes two holders move 2 * 1/2 over links of 10 * 2 bytes/s, in two steps of 3 s; on a
    bus all of them share it.
    """
    assert tied_s(400, 2, SERVERS) == 400 / 20 + 2 * 3.0
    assert tied_s(400, 3, SERVERS) == pytest.approx(2 * 2 / 3 * 400 / 20 + 4 * 3.0)
    assert tied_s(400, 1, SERVERS) == 0
    assert tied_s(400, 3, cluster(level(4, 100.0), level(4, 10.0, bus=True))) == pytest.approx(
        2 * 2 * 400 / 10
    )


def test_a_level_on_which_no_devices_part_exchanges_nothing():
    assert (
        tied_s(400, 2, cluster(level(4, 100.0, latency_s=0.5), level(1, 1.0)))
        == 400 / 100 + 2 * 0.5
    )
    assert tied_s(400, 2, cluster(level(1, 100.0))) == 0


def test_an_allreduce_of_one_device_a_server_does_not_cross_the_inner_level():
    narrow_inside = cluster(level(4, 1.0), level(4, 10.0))
    assert allreduce_s(400, [0, 4, 8, 12], narrow_inside) == pytest.approx(2 * 3 / 4 * 400 / 10)


def test_an_allreduce_of_one_device_takes_no_time():
    assert allreduce_s(400, range(1), SERVERS) == 0


def test_on_a_bus_all_members_and_both_directions_share():
    bus = cluster(level(4, 100.0, bus=True))
    assert allreduce_s(400, range(4), bus) == 2 * 3 * 400 / 100
    assert sides_s(bus, range(2), (400, 1)) == 2 * 400 / 100
    assert sides_s(bus, range(2), (400, 1), (200, 1)) == 2 * 600 / 100


def test_the_port_of_the_fullest_server_binds_a_side():
    """Of ranks 0-5 four are in the first server, by whose port of 10 * 2 bytes/s four of six
    messages leave, wherever the next stage begins behind them.
    """
    for gap in (1, 2):
        assert sides_s(SERVERS, range(6), after=(400, gap)) == pytest.approx(4 / 6 * 400 / 20)
    assert sides_s(SERVERS, range(2, 8), before=(400, 2)) == pytest.approx(4 / 6 * 400 / 20)


def test_messages_of_the_server_at_the_end_of_a_run_may_stay_inside():
    """Ranks 0-2 take turns at the message to rank 3; what leaves a device goes by its own port, of
    100 bytes/s, or by that of its server.
    """
    assert sides_s(SERVERS, range(3), after=(400, 1)) == 400 / (3 * (100 + 20))
    assert sides_s(SERVERS, range(3), after=(400, 2)) == 400 / 20


def test_both_cuts_pass_one_port_where_their_gaps_agree():
    """Rank 4 begins the second server, and rank 7 ends it: both cuts pass the server's port. Of
    rank 5 one cut stays inside.
    """
    assert sides_s(SERVERS, range(4, 8), (400, 2), (200, 2)) == (400 + 200) / 20
    assert sides_s(SERVERS, range(5, 8), (400, 1), (200, 2)) == 200 / 20
    assert sides_s(SERVERS, range(5, 7), (400, 1), (200, 1)) == (400 + 200) / (2 * (100 + 20))


def test_a_device_waits_for_a_message_at_the_quickest_level_that_it_may_take():
    quick_outside = cluster(level(4, 100.0, latency_s=0.5), level(4, 1000.0, latency_s=1.0))
    for topology, inside in ((SERVERS, 0.5 + 400 / 100), (quick_outside, 1.0 + 400 / 1000)):
        network = network_of(topology)
        assert wait_s(network, 400, 1) == inside
        assert wait_s(network, 400, 2) == transfer_s(400, 2, topology)
        assert wait_s(network, 400, 0) == 0
    assert wait_s(network_of(cluster(level(1, 1.0))), 400, 1) == 0


@examples(100)
@given(st.integers(0, 10**6), st.integers(2, 16), st.integers(1, 10**6))
def test_the_published_recurrence_is_this_model_on_a_bus_without_latency(size, m, bandwidth):
    bus = cluster(level(m, float(bandwidth), bus=True))
    assert stage_s(0.0, size, m, float(bandwidth)) * m == pytest.approx(
        allreduce_s(size, range(m), bus)
    )
    assert cut_s(size, float(bandwidth)) == pytest.approx(sides_s(bus, range(1), (size, 1)))


@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.data())
def test_runs_of_ranks_cross_what_their_ranks_one_by_one_do(sizes, data):
    topology = cluster(*[level(size, 1.0) for size in sizes])
    start = data.draw(st.integers(0, topology.devices - 1))
    ranks = range(start, data.draw(st.integers(start, topology.devices - 1)) + 1)
    pairs = {topology.common_level(first, second) for first in ranks for second in ranks} - {0}
    crossed = members_crossed(ranks, topology)
    assert crossed == members_crossed(list(ranks), topology)
    assert list(crossed) == sorted(pairs)


def test_those_on_one_bus_share_it():
    """16 ranks on four buses of 4: the buses carry 4 shares each, the outer ring one each."""
    servers = cluster(level(4, 100.0, bus=True), level(4, 50.0))
    assert allreduce_s(400, range(16), servers) == pytest.approx(
        2 * 15 / 16 * 400 * max(4 / 100, 1 / 50)
    )
    shared_outside = cluster(level(4, 100.0), level(4, 10.0, bus=True))
    assert allreduce_s(400, range(16), shared_outside) == pytest.approx(2 * 15 / 16 * 400 * 4 / 10)


def test_copies_of_a_nested_pipeline_have_a_bus_each():
    servers = cluster(level(2, 10.0, bus=True), level(2, 10.0))
    assert paired_sides_s([0, 2], [(60, [1, 3])], servers, {}) == 2 * 60 / (10 * 2)


def test_copies_of_a_nested_pipeline_have_a_port_each_and_both_cuts_share_it():
    """Stages on ranks 0 and 3, 1 and 4, 2 and 5: the one in the middle passes 60 and 30 bytes by
    its devices' ports.
    """
    servers = cluster(level(3, 10.0), level(2, 1.0))
    around = [(60, [0, 3]), (30, [2, 5])]
    assert paired_sides_s([1, 4], around, servers, {}) == (60 + 30) / (10 * 2)
    assert paired_sides_s([1, 4], [(60, [1, 4])], servers, {}) == 0


@examples(300)
@given(st.data())
def test_no_neighbours_keep_the_ports_of_a_run_less_busy(data):
    """A stage between two others, anywhere: the messages of a whole round, one by one, keep its
    busiest port no less busy.
    """
    runs = [data.draw(st.integers(least, least + 3)) for least in (0, 1, 0, 1, 0, 1)]
    ends = list(accumulate(runs))
    before, own, after = (range(ends[k], ends[k + 1]) for k in (0, 2, 4))
    inner = data.draw(st.lists(st.integers(1, 4), max_size=2))
    rates, lanes = st.sampled_from([1.0, 2.0, 8.0]), st.sampled_from([1, 2])
    topology = cluster(
        *[
            level(size, data.draw(rates), data.draw(lanes), bus=data.draw(st.booleans()))
            for size in (*inner, -(-ends[-1] // math.prod(inner)))
        ]
    )
    G = math.lcm(len(before), len(own), len(after))
    [of_before, of_own, of_after] = [
        [ranks[m % len(ranks)] for m in range(G)] for ranks in (before, own, after)
    ]
    gaps = topology.common_level(before[-1], own[0]), topology.common_level(own[-1], after[0])
    for x, y in ((6, 0), (0, 4), (6, 4)):
        least = sides_s(topology, own, (x, gaps[0] if x else 0), (y, gaps[1] if y else 0))
        around = [(x, of_before), (y, of_after)]
        assert least <= paired_sides_s(of_own, around, topology, {}) * (1 + 1e-12)
        least = sides_s(topology, own, (x, gaps[0] if x else 0), (y, gaps[1]), (5.0, 2.0))
        most = busiest_s(topology, own, of_own, [(x, of_before), (y, of_after)], (5.0, 2.0))
        assert least <= most * (1 + 1e-12)
        if not inner:
            assert least == pytest.approx(most)


def busiest_s(topology, own, of_own, around, ring) -> float:
    """Seconds per microbatch of the busiest port of a stage on the ranks `own`: its messages, from
    and to each rank of `of_own` in turn, and its all-reduce, as the simulator numbers ports.
    """
    ports, busy = ports_of(topology), Counter()
    for size, others in around:
        for rank, other in zip(of_own, others, strict=True):
            k = topology.common_level(rank, other)
            for port in port_pair(ports, rank, k):
                seconds = size / (ports.bandwidth[k - 1] * ports.lanes[k - 1])
                busy[port] += seconds / len(of_own)
    if len(own) > 1:
        slopes = allreduce_over(own, topology).slopes
        for port, k in ports.of_ring(own):
            busy[port] += (slopes[k] * ring[0] + ring[1]) / len(own)
    return max(busy.values())


def test_a_ring_holds_the_ports_of_the_levels_that_it_crosses():
    """Ranks 0-3 reduce 80 bytes in one server: each port of 100 bytes/s sends 120 bytes, and the
    ring waits for 0.5 s; once for four messages of 400 bytes, which may leave by the server's port
    of 20 bytes/s instead. Ranks 0-7 reduce them over that port too.
    """
    ring = (80, 0.5)
    own = (120 + 0.5 * 100) / 4
    assert sides_s(SERVERS, range(4), after=(400, 1), ring=ring) == (own + 400 / 4) / (100 + 20)
    assert sides_s(SERVERS, range(4), after=(400, 2), ring=ring) == 400 / 20
    ring_s = 2 * 7 / 8 * 80 / 20 + 0.5
    half = 400 / 2 / 20
    assert sides_s(SERVERS, range(8), after=(400, 2), ring=ring) == ring_s / 8 + half
