"""The best pipeline without replication has the least slowest stage of all of its kind."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partopt.cost.problem import NONE, Problem
from partopt.documents.engine import Engine
from partopt.planners import straight
from partopt.planners.costs import StageCosts
from partopt.planners.layouts import Shape, shape_of
from tests.examples import examples
from tests.helpers import WAITING
from tests.planners.problems import chain, chains, clusters, problem, topology

SCHEDULES = st.one_of(
    st.just(("pipedream", None)),
    st.tuples(st.sampled_from(["1f1b", "gpipe", "zb-h1"]), st.integers(1, 6)),
)


def least_s(given: Problem) -> float:
    """The least that the slowest stage takes over every cut and every choice of ranks, in order."""
    costs, S = priced(given), given.request.stages
    N, P = given.chain.layers, given.topology.devices
    places, found = tuple((rank,) for rank in range(P)), []
    for cuts in combinations(range(1, N), S - 1):
        for ranks in combinations(range(P), S):
            idle = tuple(b - a - 1 for a, b in zip((-1, *ranks), ranks, strict=False))
            shape = Shape(places, (0, *cuts, N), (1,) * S, idle, (None,) * S)
            found.append(costs.slowest_s(shape))
    return min(found)


def priced(given: Problem) -> StageCosts:
    """The costs of stages on one device each, of any memory."""
    return StageCosts(given.with_(replication=NONE, memory_bytes=None))


def planned(given: Problem) -> Shape:
    """What the planner decides."""
    partition = straight.plan(given).partition
    assert {len(stage.ranks) for stage in partition.stages} == {1}
    return shape_of(partition, given.topology.devices)


@pytest.mark.slow
@examples(40)
@given(
    chains(5),
    clusters(levels=1, devices=5),
    SCHEDULES,
    st.integers(0, 40),
    st.tuples(*[st.booleans()] * 2),
    st.integers(1, 5),
)
def test_no_other_has_a_faster_slowest_stage(
    model, cluster, scheduled, optimizer_s, options, stages
):
    recompute, serial = options
    name, M = scheduled
    given = problem(
        replace(model, optimizer_s=float(optimizer_s)),
        cluster,
        schedule=name,
        microbatches=M,
        recompute="always" if recompute else "never",
        engine=WAITING if serial else Engine(),
        memory_bytes=1,  # is not looked at
        stages=min(stages, model.layers, cluster.devices),
    )
    if not cluster.levels[0].bus:
        assert priced(given).slowest_s(planned(given)) == pytest.approx(least_s(given), rel=1e-9)


@pytest.mark.slow
@examples(30)
@given(chains(), SCHEDULES, st.data())
def test_takes_exactly_the_stages_asked_for(model, scheduled, data):
    K = data.draw(st.integers(1, model.layers))
    name, M = scheduled
    given = problem(model, topology((8, 2.0)), stages=K, schedule=name, microbatches=M)
    assert planned(given).stages == K


def test_takes_as_many_stages_as_help_and_no_more():
    """Layers of 4, 1, 1, 1 and 1 s: two stages of 4 s each are as fast as five."""
    given = problem(chain([2, 1, 1, 1, 1], [2, 0, 0, 0, 0], [0] * 4, [0] * 5), topology((5, 1.0)))
    found = planned(given)
    assert (priced(given).slowest_s(found), found.stages) == (4.0, 2)
