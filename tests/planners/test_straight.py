"""The best pipeline without replication is the best of all partitions into one-device stages."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partopt.cost.iteration import objective_s
from partopt.cost.problem import CONTIGUOUS, NONE, Assignment, Partition, Problem
from partopt.planners import straight
from tests.examples import examples
from tests.planners.exhaustive import partitions
from tests.planners.problems import chain, chains, problem, proven, topology
from tests.planners.test_optimal import clusters

SCHEDULES = st.one_of(
    st.just(("pipedream", None)),
    st.tuples(st.sampled_from(["1f1b", "gpipe", "zb-h1"]), st.integers(1, 6)),
)


def least_objective(given: Problem) -> float:
    """The least objective over every partition into one-device stages, on any of the ranks."""
    return min(
        objective_s(Partition(CONTIGUOUS, [Assignment(*stage) for stage in stages]), given)
        for stages in partitions(replace(given, replication=NONE))
    )


@examples(100)
@given(
    chains(5),
    clusters(levels=2, devices=5),
    SCHEDULES,
    st.integers(0, 40),
    st.tuples(*[st.booleans()] * 2),
)
def test_equals_exhaustive_search_under_the_common_cost(
    model, cluster, scheduled, optimizer_s, options
):
    recompute, serial = options
    name, M = scheduled
    given = problem(
        replace(model, optimizer_s=float(optimizer_s)),
        cluster,
        schedule=name,
        microbatches=M,
        recompute=recompute,
        serial_transfers=serial,
        memory_bytes=1,  # is not looked at
    )
    partition, certificate = proven(straight.plan(given))
    least = least_objective(replace(given, memory_bytes=None))
    assert certificate.objective_s == pytest.approx(least, rel=1e-11)
    assert {len(stage.ranks) for stage in partition.stages} == {1}


@examples(50)
@given(chains(), SCHEDULES, st.data())
def test_takes_exactly_the_stages_asked_for(model, scheduled, data):
    K = data.draw(st.integers(1, model.layers))
    name, M = scheduled
    given = problem(model, topology((8, 2.0)), stages=K, schedule=name, microbatches=M)
    partition, certificate = proven(straight.plan(given))
    assert len(partition.stages) == K
    assert certificate.objective_s == pytest.approx(least_objective(given), rel=1e-11)


def test_takes_as_many_stages_as_help_and_no_more():
    """Layers of 4, 1, 1, 1 and 1 s: two stages of 4 s each are as fast as five."""
    given = problem(chain([2, 1, 1, 1, 1], [2, 0, 0, 0, 0], [0] * 4, [0] * 5), topology((5, 1.0)))
    partition, certificate = proven(straight.plan(given))
    assert (len(partition.stages), certificate.objective_s) == (2, 4.0)
