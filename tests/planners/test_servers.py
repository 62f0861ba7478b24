"""What the port of a server carries bounds every plan on servers, as the simulator executes it."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partopt.cost.problem import Problem
from partopt.planners.optimal import refuters, servers
from partopt.schedules import SCHEDULES
from tests.examples import examples
from tests.planners.problems import chain, problem, topology
from tests.planners.test_bus import partition_s, simulated_s
from tests.planners.test_optimal import clusters, stashed
from tests.planners.test_pipelines import OPTIONS, drawn, partitions


@examples(60)
@given(
    stashed(4),
    clusters(levels=3, devices=6, sizes=3),
    st.sampled_from(["pipedream", "pipedream-2bw", "1f1b", "1f1b-eager", "gpipe", "zb-h1"]),
    st.integers(1, 7),
    st.sampled_from([None, 100, 300]),
    *OPTIONS,
)
def test_no_plan_on_servers_is_simulated_to_less(
    model, cluster, name, M, memory_bytes, recompute, replication, serial
):
    M = None if SCHEDULES[name].asynchronous else M
    given = drawn(model, cluster, name, M, memory_bytes, recompute, replication, serial)
    refutes = servers.refuter(given)
    for each in partitions(given):
        seconds = partition_s(given, each)
        assert seconds is None or not refutes(seconds * (1 + 1e-6))


def two_servers(cuts: list[int], weights: list[int], **options: object) -> Problem:
    """Four layers of 1 s and 1 s on two servers of two devices, 1 byte/s between them."""
    on = topology((2, 1000.0), (2, 1.0))
    return problem(chain([1] * 4, [1] * 4, cuts, weights), on, **options)


def test_two_stages_of_a_server_share_its_port():
    """Cuts of 3 bytes around the inner layers, parameters that no two servers can exchange, and on
    three servers a server in the middle, whose two stages send and get 3 bytes each.
    """
    on = topology((2, 1000.0), (3, 1.0))
    model = chain([2] * 6, [2] * 6, [9, 3, 9, 3, 9], [1000] * 6)
    given = problem(model, on)
    refutes = servers.refuter(given)
    assert refutes(5.99) and not refutes(6.0)
    assert refuters.bound_s(given, 4.0) == pytest.approx(6.0, rel=1e-5)
    plan = [(s, s + 1, range(s, s + 1)) for s in range(6)]
    assert simulated_s(given, plan) == pytest.approx(6.0, rel=1e-2)


def test_all_reduces_between_servers_hold_their_ports():
    """All four devices exchange 2 * 1/2 * W bytes for every four microbatches, at 1 byte/s."""
    light, heavy = two_servers([99] * 3, [2] * 4), two_servers([99] * 3, [3] * 4)
    assert servers.refuter(light)(1.99) and not servers.refuter(light)(2.0)
    assert servers.refuter(heavy)(2.99) and not servers.refuter(heavy)(3.0)
    assert simulated_s(heavy, [(0, 4, range(4))]) == pytest.approx(3.0, rel=1e-2)


def test_an_iteration_is_over_when_the_port_has_carried_all():
    """Cuts of 3 bytes between two servers, and parameters that are not exchanged. What comes into
    the second are 20 microbatches, after the forward of two layers and before the backward of three
    and more: its first stage is one layer at the least.
    """
    given = two_servers([99, 3, 99], [1000] * 4, schedule="gpipe", microbatches=20)
    refutes = servers.refuter(given)
    assert refutes(64.9) and not refutes(65.1)


def test_replicas_of_a_server_may_be_those_that_get_one_less():
    """Layers of 2 s and 18 s on 1 and 3 devices. Of 7 microbatches the second server's two replicas
    get 2 each, of 12 s, after a forward of 1 s and before the backwards of both layers, 10 s.
    """
    on = topology((2, 1000.0), (2, 1.0))
    model = chain([1, 9], [1, 9], [12], [1000, 0])
    refutes = servers.refuter(problem(model, on, schedule="gpipe", microbatches=7))
    assert refutes(58.9) and not refutes(59.1)


def test_where_there_are_no_servers_nothing_is_refuted():
    given = two_servers([99] * 3, [12] * 4)
    assert servers.refuter(given)(1e-9)
    for other in (
        topology((4, 1.0)),
        topology((1, 1.0), (4, 1.0)),
        topology((4, 1.0), (1, 1.0)),
        topology((2, 1000.0), (2, 1.0), bus=True),
        topology((2, 1000.0), (2000, 1.0)),
    ):
        assert not servers.refuter(replace(given, topology=other))(1e-9)
