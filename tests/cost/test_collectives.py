"""All-reduces worked by hand; what is left of one beside a backward."""

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from partopt.cost.collectives import (
    ALGORITHMS,
    BUCKET_BYTES,
    HIERARCHICAL,
    RING,
    TREE,
    allreduce_over,
    exposed,
    tail_share,
)
from partopt.cost.memory import kept_of
from partopt.cost.sharding import collectives_of, exchange_of
from partopt.documents.engine import Engine
from partopt.documents.topology import AllReduceRates, Device, Level, Topology
from tests.examples import examples
from tests.planners.problems import clusters

GB = 1e9


def cluster(*levels: Level, allreduce: str = "fastest") -> Topology:
    """Levels, innermost first."""
    return Topology(
        name="cluster", device=Device(name="device"), levels=list(levels), allreduce=allreduce
    )


def level(size: int, bandwidth: float, **fields: object) -> Level:
    """A level of `size` members."""
    return Level(
        name=f"of {size} at {bandwidth}", size=size, bandwidth_bytes_per_s=bandwidth, **fields
    )


SERVERS = [level(4, 100.0, latency_s=0.5), level(4, 10.0, links=2, latency_s=3.0)]


def test_a_ring_moves_all_but_one_share_twice_through_the_narrowest_level():
    """Eight ranks: 2 * 7/8 of 400 bytes at 10 * 2 bytes/s, in 2 * 7 steps of 3 s."""
    found = allreduce_over(range(8), cluster(*SERVERS, allreduce="ring"))
    assert found.seconds(400) == pytest.approx(2 * 7 / 8 * 400 / 20 + 14 * 3.0)
    assert found.slopes == pytest.approx({1: 1.75 / 100, 2: 1.75 / 20})


def test_a_tree_moves_all_twice_in_as_many_steps_as_it_is_deep():
    """Eight ranks: 400 bytes up and down at 10 * 2 bytes/s, three steps of 3 s each way."""
    found = allreduce_over(range(8), cluster(*SERVERS, allreduce="tree"))
    assert found.seconds(400) == pytest.approx(2 * 400 / 20 + 2 * 3 * 3.0)


def test_one_level_after_the_other_each_moves_its_own_share():
    """Eight ranks: 2 * 3/4 of 400 bytes at 100 bytes/s in 2 * 3 steps of 0.5 s, then two servers
    2 * 1/2 of them at 20 bytes/s in two steps of 3 s.
    """
    found = allreduce_over(range(8), cluster(*SERVERS, allreduce="hierarchical"))
    inside, across = 1.5 * 400 / 100 + 6 * 0.5, 400 / 20 + 2 * 3.0
    assert found.seconds(400) == pytest.approx(inside + across)


def test_ranks_that_lie_unevenly_take_a_ring():
    uneven = cluster(*SERVERS, allreduce="hierarchical")
    assert allreduce_over([0, 1, 2, 4], uneven).algorithm == RING
    assert allreduce_over([0, 1, 4, 5], uneven).algorithm == HIERARCHICAL


def test_libraries_take_the_fastest_for_a_bucket():
    """Of 64 ranks on one level a tree, where a step takes as long as a good part of a bucket does;
    of eight behind a narrow level one level after the other.
    """
    slow = cluster(level(64, 10 * GB, latency_s=1e-3))
    assert allreduce_over(range(64), slow).algorithm == TREE
    assert allreduce_over(range(64), cluster(level(64, 10 * GB))).algorithm == RING
    narrow = cluster(level(8, 100 * GB), level(4, 1 * GB))
    assert allreduce_over(range(32), narrow).algorithm == HIERARCHICAL


def test_a_collective_has_its_own_bandwidth_and_latency():
    rates = AllReduceRates(bandwidth_bytes_per_s=50.0, latency_s=2.0)
    own = cluster(level(4, 100.0, latency_s=0.5, allreduce=rates))
    assert allreduce_over(range(4), own).seconds(400) == pytest.approx(1.5 * 400 / 50 + 6 * 2.0)
    half = structs.replace(rates, latency_s=msgspec.UNSET)
    own = cluster(level(4, 100.0, latency_s=0.5, allreduce=half))
    assert allreduce_over(range(4), own).seconds(400) == pytest.approx(1.5 * 400 / 50 + 6 * 0.5)


@pytest.mark.slow
@examples(100)
@given(clusters(devices=16), st.data())
def test_the_fastest_is_no_slower_than_any_for_a_bucket(topology, data):
    ranks = sorted(data.draw(st.sets(st.integers(0, topology.devices - 1), min_size=1)))
    seconds = {
        name: allreduce_over(ranks, structs.replace(topology, allreduce=name)).seconds(BUCKET_BYTES)
        for name in ("fastest", *ALGORITHMS)
    }
    assert seconds["fastest"] == pytest.approx(min(seconds.values()))


def test_an_exchange_in_four_buckets_begins_when_a_quarter_of_the_backward_is_done():
    """A backward of 8 s makes four buckets: an exchange of 4 s begins after 2 s and would be over
    before the backward, but for the last bucket; one of 12 s has 6 s before the end and 6 s behind.
    """
    assert exposed(4.0, 40, 8.0, 10.0) == 1.0
    assert exposed(12.0, 40, 8.0, 10.0) == 6.0
    assert exposed(12.0, 40, 8.0, np.inf) == 12.0
    assert exposed(12.0, 0, 8.0, 10.0) == 12.0
    assert tail_share(40, 10.0) == 0.25


@examples(100)
@given(*[st.floats(0, 100)] * 3, st.floats(1, 100))
def test_what_is_left_of_an_exchange_is_neither_none_of_it_nor_more_than_all(
    seconds, size, backward, bucket
):
    left = exposed(seconds, size, backward, bucket)
    assert max(seconds * tail_share(size, bucket), seconds - backward) <= left <= seconds


@pytest.mark.parametrize(
    ("shard", "synchronous", "exchange", "collectives"),
    [
        ("none", True, (2, 1, 0, 0), [("allreduce", 80, "iteration")]),
        (
            *("optimizer", True, (3 / 2, 1, 0, 0)),
            [("reducescatter", 80, "iteration"), ("allgather", 40, "iteration")],
        ),
        (
            *("gradients", True, (1 / 2, 1 / 2, 0, 2)),
            [("reducescatter", 80, "microbatch"), ("allgather", 40, "iteration")],
        ),
        (
            *("parameters", True, (0, 0, 1 / 2, 2)),
            [("reducescatter", 80, "microbatch"), ("allgather", 2 * 25, "microbatch")],
        ),
        (
            *("gradients", False, (3 / 2, 1, 0, 0)),
            [("reducescatter", 80, "round"), ("allgather", 40, "round")],
        ),
        (
            *("parameters", False, (1, 1 / 2, 1 / 2, 0)),
            [("reducescatter", 80, "round"), ("allgather", 2 * 25, "microbatch")],
        ),
    ],
)
def test_what_is_exchanged_of_what_is_shared(shard, synchronous, exchange, collectives):
    """Of 16-bit parameters, 40 bytes with a gradient of 32 bits and 10 frozen, gathered in 8."""
    engine = Engine(gradients="float32", gathered_bytes=1)
    kept = kept_of("adam", engine, shard, sixteen_bit=True)
    assert exchange_of(kept, synchronous) == exchange
    per = "iteration" if synchronous else "round"
    assert collectives_of(kept, 40.0, 50.0, per) == collectives
