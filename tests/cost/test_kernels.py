"""The compiled formulas of a stage against those that price a plan."""

from bisect import bisect_right
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from partopt.cost.flight import in_flight, rebuilt, weight_versions
from partopt.cost.kernels import (
    NEVER,
    StageCost,
    between,
    exchanged_s,
    exchanged_table,
    has_room,
    layers_of,
    most_in_flight,
    replicas_to_fit,
    replicas_to_keep_pace,
    stage_cost,
    tied_of,
)
from partopt.cost.memory import MOMENTS, stage_memory
from partopt.cost.period import tied_exchange_s
from partopt.cost.problem import CONTIGUOUS, Assignment, Partition
from partopt.cost.ranges import Group, RangeSum
from tests.examples import examples
from tests.planners.problems import chain, chains, problem, topologies, topology

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
    optimizer, sixteen_bit = data.draw(st.sampled_from(sorted(MOMENTS))), data.draw(st.booleans())
    stash = RangeSum([float(data.draw(st.integers(0, 9))) for _ in range(model.layers)])
    model = replace(model, sixteen_bit=sixteen_bit, stash_bytes=stash)
    layers = layers_of(
        problem(
            model,
            topology((4, 1.0)),
            schedule=schedule,
            microbatches=M,
            optimizer=optimizer,
            memory_bytes=LIMIT,
        )
    )
    for i in range(model.layers):
        for j in range(i + 1, model.layers + 1):
            for mode in range(2):
                found = most_in_flight(layers, stage_cost(layers, i, j, mode))
                counts = range(1, 2 * LIMIT)  # what they take rises: those that fit come first

                def taken_bytes(F, i=i, j=j, mode=mode):
                    versions = weight_versions(schedule, F)
                    return stage_memory(model, i, j, F, versions, optimizer, bool(mode)).total_bytes

                assert min(found, len(counts)) == bisect_right(counts, LIMIT, key=taken_bytes)


@pytest.mark.parametrize("schedule, M", SCHEDULES)
def test_the_fewest_replicas_that_fit(schedule, M):
    layers = layers_of(problem(*_small(), schedule=schedule, microbatches=M))
    for F in [*range(12), NEVER]:
        for R in range(12):
            fitting = [
                r for r in range(1, 40) if in_flight(schedule, 0, [r, R] if R else [r], M) <= F
            ]
            assert min(replicas_to_fit(layers, F, R), NEVER) == min(fitting, default=NEVER)


@examples(50)
@given(chains(), st.integers(1, 4), st.integers(1, 3), st.booleans(), st.integers(1, 12))
def test_stages_of_zb_h1_have_room_for_what_they_rebuild(model, S, r, recompute, M):
    layers = layers_of(
        problem(model, topology((12, 1.0)), schedule="zb-h1", microbatches=M, memory_bytes=LIMIT)
    )._replace(depth=S)
    for s in range(S):
        F = in_flight("zb-h1", s, [r] * S, M)
        kept = rebuilt("zb-h1", s, [r] * S, M) if recompute else 0
        for i in range(model.layers):
            stage = stage_cost(layers, i, model.layers, int(recompute))
            taken = stage_memory(model, i, model.layers, F, 1, "adam", kept).total_bytes
            if not recompute:
                assert has_room(layers, stage, (S - 1 - s) * r, r)
            elif most_in_flight(layers, stage) >= F:
                assert has_room(layers, stage, (S - 1 - s) * r, r) == (taken <= LIMIT)
            else:
                assert taken > LIMIT


def test_the_fewest_replicas_that_keep_pace():
    asynchronous = layers_of(problem(*_small()))
    synchronous = layers_of(problem(*_small(), schedule="gpipe", microbatches=6))

    def stage(C: float, passed: float) -> StageCost:
        return stage_cost(asynchronous, 0, 1, 0)._replace(compute_s=C, passed_s=passed)

    for C in np.arange(0, 4, 0.25):
        for pace in np.arange(0.25, 12, 0.25):
            assert replicas_to_keep_pace(asynchronous, stage(C, C), pace) == next(
                r for r in range(1, 99) if C / r <= pace
            )
            for passed in (C, C / 2):
                keeping = [r for r in range(1, 99) if -(-6 // r) * C - passed <= pace]
                assert replicas_to_keep_pace(synchronous, stage(C, passed), pace) == min(
                    keeping, default=NEVER
                )


def _small():
    return chain([1, 2], [2, 3], [4], [5, 6]), topology((4, 1.0))
