"""How busy ports are, worked by hand: a bus is one port for all, elsewhere every member sends
through one and receives through another.
"""

from types import SimpleNamespace

import numpy as np
import pytest

from partopt.documents.actions import B, F
from partopt.simulator.metrics import level_use
from partopt.simulator.timeline import Collectives, Transfers
from partopt.simulator.work import Work, ports_of
from tests.helpers import flat, two_level
from tests.simulator.reference_network import port_pair

BUS, SWITCH = flat(2, 1.0, bus=True), flat(2, 1.0)


def use(topology, end_s, sent=(), exchanged=(), start_s=0.0, ranks=((0,), (1,)), gradient=0.0):
    """Shares of transfers and all-reduces and sent bytes of each level, by messages of 5 bytes as
    (kind, stage, source, destination, start), and all-reduces as (stage, start, end).
    """
    kind, stage, source, destination, start = np.array(sent or np.empty((0, 5))).T
    of, begin, end = np.array(exchanged or np.empty((0, 3))).T
    numbers = [each.astype(np.int32) for each in (stage, 0 * stage, source, destination)]
    timeline = SimpleNamespace(
        transfers=Transfers(kind.astype(np.int8), *numbers, start, start + 5.0),
        collectives=Collectives(of.astype(np.int32), (0 * of).astype(np.int32), begin, end),
    )
    S = len(ranks)
    work = Work(
        ranks=ranks,
        seconds=np.zeros((7, S)),
        cut_bytes=np.array([0.0, *[5.0] * (S - 1), 0.0]),
        gradient_bytes=np.full(S, gradient),
        tied_s=np.zeros(S),
        topology=topology,
    )
    found = level_use(timeline, work, start_s, end_s)
    return [(each.transfer_share, each.allreduce_share, each.sent_bytes) for each in found]


def test_an_activation_and_a_gradient_share_a_bus_alone():
    """5 s each way, in 20 s; each of them holds a bus once, though both ends sit on it."""
    there_and_back = [(F, 0, 0, 1, 0.0), (B, 1, 1, 0, 5.0)]
    for topology, share in (
        (BUS, 10 / 20),
        (SWITCH, 5 / 20),
        (flat(2, 1.0, bus=True, links=2), 5 / 20),
        (flat(2, 1.0, links=2), 2.5 / 20),
    ):
        assert use(topology, 20.0, there_and_back) == [(share, 0.0, 10.0)]


def test_of_several_buses_the_busiest_counts():
    """Two servers with a bus each: 5 s on one, 10 s on the other, of 10 s."""
    sent = [(F, 0, 0, 1, 0.0), (F, 0, 2, 3, 0.0), (B, 1, 3, 2, 5.0)]
    found = use(two_level(2, 2, 1.0, 1.0, inner_bus=True), 10.0, sent)
    assert found == [(1.0, 0.0, 15.0), (0.0, 0.0, 0.0)]


def test_a_message_counts_for_as_long_as_it_lies_inside_and_its_bytes_where_it_ends():
    """From 0 to 5 s, seen from 2 to 4 s and from 4 to 8 s."""
    sent = [(F, 0, 0, 1, 0.0)]
    assert use(SWITCH, 4.0, sent, start_s=2.0) == [(1.0, 0.0, 0.0)]
    assert use(SWITCH, 8.0, sent, start_s=4.0) == [(1 / 4, 0.0, 5.0)]


@pytest.mark.parametrize(("bus", "seconds"), [(True, 24.0), (False, 8.0)])
def test_the_members_of_a_ring_share_a_bus(bus, seconds):
    """Three of them, 2 * 2/3 * 6 bytes each at 1 byte/s: 8 s, and 24 s one after the other."""
    exchanged = [(0, 0.0, seconds)]
    found = use(flat(3, 1.0, bus=bus), 48.0, (), exchanged, ranks=((0, 1, 2),), gradient=6.0)
    assert found == [(0.0, seconds / 48, 0.0)]


def test_a_rank_has_a_port_out_and_a_port_in_and_a_bus_one_for_all():
    ranks, level = np.array([0, 1], np.int32), np.array([1, 1])
    assert [port_pair(ports_of(BUS), rank, 1) for rank in (0, 1)] == [(0, 0), (0, 0)]
    assert [ports_of(BUS).of_ranks(ranks, level, side).tolist() for side in (0, 1)] == [[0, 0]] * 2
    assert [port_pair(ports_of(SWITCH), rank, 1) for rank in (0, 1)] == [(0, 1), (2, 3)]
    assert ports_of(SWITCH).of_ranks(ranks, level, 0).tolist() == [0, 2]
    assert ports_of(SWITCH).of_ranks(ranks, level, 1).tolist() == [1, 3]
    assert (ports_of(BUS).count, ports_of(SWITCH).count) == (1, 4)


def test_a_ring_holds_a_bus_once_and_on_the_servers_that_it_crosses_one_port_each_way():
    """Ranks 0, 1 and 2 on two servers of two: a bus in the first, no ring inside the second; then
    the servers' own ports, numbered after the two buses.
    """
    ports = ports_of(two_level(2, 2, inner_bus=True))
    port, level = ports.of_ring([0, 1, 2])
    assert (port.tolist(), level.tolist()) == ([0, 2, 3, 4, 5], [1, 2, 2, 2, 2])
    assert not len(ports.of_ring([1])[0])
