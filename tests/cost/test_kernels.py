"""The compiled formulas of a stage against those that price a plan."""

from bisect import bisect_right
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from msgspec import structs

from partopt.cost import passes
from partopt.cost.deadline import replicas_in_time, time_left_s, waits_in_time
from partopt.cost.flight import weight_versions
from partopt.cost.iteration import stage_objective_s
from partopt.cost.kernels import (
    exchanged_s,
    exchanged_table,
    layers_of,
    most_in_flight,
    stage_cost,
    tied_of,
)
from partopt.cost.links import hold_s
from partopt.cost.memory import STATE_BYTES, stage_memory
from partopt.cost.period import gradients_s, tied_exchange_s, update_s
from partopt.cost.problem import CONTIGUOUS, Assignment, Partition
from partopt.cost.ranges import Group, RangeSum, between
from partopt.documents.topology import Topology
from tests.examples import examples
from tests.planners.exhaustive import fits, held_at_least
from tests.planners.problems import (
    chains,
    memory_rules,
    problem,
    topologies,
    topology,
    with_memory,
)

SCHEDULES = [
    ("pipedream", None),
    ("pipedream-2bw", None),
    ("1f1b", 5),
    ("1f1b-eager", 5),
    ("gpipe", 5),
]
LIMIT = 100


@st.composite
def sums(draw: st.DrawFn) -> RangeSum:
    values = draw(st.lists(st.integers(0, 9), min_size=1, max_size=8))
    members = st.lists(st.integers(0, len(values) - 1), min_size=1, max_size=4)
    return RangeSum(
        values,
        [
            Group(*group)
            for group in draw(st.lists(st.tuples(members, st.integers(1, 9)), max_size=5))
        ],
    )


@examples(100)
@given(sums())
def test_differences_add_up_to_the_sums(of):
    parts = of.differences()
    for i in range(of.layers):
        for j in range(i + 1, of.layers + 1):
            assert between(parts, i, j) == of(i, j)


@examples(100)
@given(chains(), topologies(), st.data())
def test_what_stages_exchange_is_what_they_are_charged_for(model, cluster, data):
    starts = sorted({0, *data.draw(st.lists(st.integers(0, model.layers - 1)))})
    coarse = problem(model, cluster, cut_at=starts).coarsen()
    bounds, tied = [*starts, model.layers], tied_of(coarse)
    table = exchanged_table(tied)
    for i in range(coarse.chain.layers):
        for j in range(i + 1, coarse.chain.layers + 1):
            alone = Partition(CONTIGUOUS, [Assignment(bounds[i], bounds[j], [0])])
            assert (
                exchanged_s(tied, i, j)
                == table[i, j]
                == tied_exchange_s(alone, 0, problem(model, cluster))
            )


@pytest.mark.parametrize("schedule, M", SCHEDULES)
@examples(30)
@given(chains(), st.data())
def test_the_most_in_flight_is_what_the_memory_allows(schedule, M, model, data):
    optimizer = data.draw(st.sampled_from(sorted(STATE_BYTES)))
    sixteen_bit, r = data.draw(st.booleans()), data.draw(st.integers(1, 4))
    model = data.draw(with_memory(replace(model, sixteen_bit=sixteen_bit)))
    given = problem(
        model,
        topology((4, 1.0)),
        schedule=schedule,
        microbatches=M,
        optimizer=optimizer,
        memory_rules=data.draw(memory_rules(M)),
        memory_bytes=LIMIT,
    )
    layers = layers_of(given)
    for i in range(model.layers):
        for j in range(i + 1, model.layers + 1):
            for mode in range(2):
                found = most_in_flight(layers, stage_cost(layers, i, j, mode), r)
                counts = range(1, 2 * LIMIT)  # what they take rises: those that fit come first

                def taken_bytes(F, i=i, j=j, mode=mode):
                    versions = weight_versions(schedule, F)
                    kept = given.kept, r, 1, bool(mode)
                    held = stage_memory(model, i, j, F, versions, *kept, split=False)
                    return held.total_bytes

                assert min(found, len(counts)) == bisect_right(counts, LIMIT, key=taken_bytes)
                assert found == passes.most_in_flight(Assignment(i, j, range(r), bool(mode)), given)


def delaying(latency_s: float, overhead_s: float) -> Topology:
    """Twenty devices on links that only delay."""
    cluster = topology((20, 1e300), latency_s=latency_s)
    levels = [structs.replace(cluster.levels[0], overhead_s=overhead_s)]
    return structs.replace(cluster, levels=levels)


@pytest.mark.parametrize("schedule, M", [*SCHEDULES, ("zb-h1", 5)])
@examples(100)
@given(chains(4), st.data())
def test_a_stage_is_in_time_where_its_price_is(schedule, M, model, data):
    """Of a stage between neighbours, on links that only delay: its replicas, its waits, its update
    and the messages over its cuts are in time where what the formulas say of it is.
    """
    draw = data.draw
    given = problem(
        replace(model, optimizer_s=3.0),
        delaying(float(draw(st.integers(0, 1))), float(draw(st.integers(0, 1)))),
        schedule=schedule,
        microbatches=M,
        memory_bytes=None if schedule == "zb-h1" else draw(st.sampled_from([None, 60, 120])),
        recompute=draw(st.booleans()),
        serial_transfers=draw(st.booleans()),
        split_messages=draw(st.booleans()),
        blocking_allreduce=draw(st.booleans()),
        bucket_bytes=draw(st.sampled_from([1, 10, 10**9])),
    )
    i = draw(st.integers(0, model.layers - 1))
    j, r = draw(st.integers(i + 1, model.layers)), draw(st.integers(1, 5))
    own = Assignment(i, j, range(1, 1 + r))
    before = [Assignment(0, i, [0])] * (i > 0)
    after = [Assignment(j, model.layers, [10])] * (j < model.layers)
    partition, s = Partition(CONTIGUOUS, [*before, own, *after]), len(before)

    layers = layers_of(given)
    stage = stage_cost(layers, i, j, int(given.recompute))
    F = most_in_flight(layers, stage, r)
    waiting = 2 * sum(
        hold_s(given.network, size, given.messages[c], 1)
        for c, size, there in ((i, stage.before, before), (j, stage.after, after))
        if there
    )
    update = (gradients_s if M is None else update_s)(partition, s, given)
    carried_s = layers.behind[0] if M is not None and len(partition.stages) > 1 else 0.0
    fitting = fits(given, own, held_at_least(given, 0, [r]))
    price = stage_objective_s(partition, s, given)
    assume(price == 0.0 or price > 1e-200)  # what links of 1e300 bytes/s take is rounding
    for T in (price * (1 - 1e-9), price * (1 + 1e-9), price / 2, price * 2):
        in_time = (
            replicas_in_time(layers, stage, T, F) <= r
            and (not given.messages_hold or waits_in_time(layers, stage, T, r, waiting))
            and update <= time_left_s(layers, stage, T, F, r, waiting)
            and carried_s <= T
        )
        assert in_time == (fitting and price <= T)
