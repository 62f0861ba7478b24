"""Cases worked by hand: bytes over bytes per second, the arithmetic in the assertion."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from partopt.cost.collectives import allreduce_s, members_crossed, tied_s
from partopt.cost.messages import hold_s, port_rate, transfer_s
from partopt.documents.topology import Device, Level, Topology
from partopt.planners.pipedream import cut_s, stage_s
from tests.examples import examples


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
    assert port_rate(1, bus) == 100 / 2


@examples(100)
@given(st.integers(0, 10**6), st.integers(2, 16), st.integers(1, 10**6))
def test_the_published_recurrence_is_this_model_on_a_bus_without_latency(size, m, bandwidth):
    bus = cluster(level(m, float(bandwidth), bus=True))
    assert stage_s.py_func(0.0, size, m, float(bandwidth)) * m == pytest.approx(
        allreduce_s(size, range(m), bus)
    )
    assert cut_s(size, float(bandwidth)) == pytest.approx(size / port_rate(1, bus))


@pytest.mark.slow
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


def test_messages_take_time_of_devices_that_wait_for_them_or_copy_them():
    """Two messages of 400 bytes in all, 0.5 s each and 400/100 s to copy; sent, they take 3 s and
    400/10 s.
    """
    handled = structs.replace(level(4, 10.0, 1, 3.0), overhead_s=0.5, copy_bytes_per_s=100.0)
    assert hold_s(400, 2, handled, serial=False) == 2 * 0.5 + 4
    assert hold_s(400, 2, handled, serial=True) == 2 * 0.5 + 4 + 3 + 40
    assert hold_s(400, 2, SERVERS.levels[1], serial=False) == 0
