from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partopt.cost.period import objective_s
from partopt.cost.problem import CONTIGUOUS, Partition, Problem, consecutive
from partopt.planners import straight
from partopt.planners.placing import stage_count
from tests.examples import examples
from tests.planners.problems import chain, chains, problem, proven, topologies, topology

ASYNCHRONOUS = st.just(("pipedream", None))
SYNCHRONOUS = st.tuples(st.sampled_from(["1f1b", "gpipe", "zb-h1", "naive"]), st.integers(1, 6))


def least_objective(given: Problem, counts: range) -> float:
    """The least objective over every partition into one-device stages, by the common cost."""
    layers = given.chain.layers
    partitions = (
        Partition(CONTIGUOUS, consecutive([0, *cuts, layers]))
        for count in counts
        for cuts in combinations(range(1, layers), count - 1)
    )
    return min(objective_s(partition, given) for partition in partitions)


@examples(300)
@given(
    chains(),
    topologies(),
    st.one_of(ASYNCHRONOUS, SYNCHRONOUS),
    st.integers(0, 40),
    st.tuples(*[st.booleans()] * 3),
)
def test_equals_exhaustive_search_under_the_common_cost(
    model, cluster, scheduled, optimizer_s, options
):
    recompute, serial, bus = options
    cluster = topology(
        *[(level.size, level.bandwidth_bytes_per_s) for level in cluster.levels], bus=bus
    )
    name, M = scheduled
    given = problem(
        replace(model, optimizer_s=float(optimizer_s)),
        cluster,
        schedule=name,
        microbatches=M,
        recompute=recompute,
        serial_transfers=serial,
    )
    partition, certificate = proven(straight.plan(given))
    assert certificate.objective_s == pytest.approx(
        least_objective(given, range(1, stage_count(given) + 1)), rel=1e-12
    )
    assert objective_s(partition, given) == certificate.objective_s == certificate.lower_bound_s


@examples(50)
@given(chains(), st.one_of(ASYNCHRONOUS, SYNCHRONOUS), st.data())
def test_takes_exactly_the_stages_asked_for(model, scheduled, data):
    K = data.draw(st.integers(1, model.layers))
    name, M = scheduled
    given = problem(model, topology((8, 2.0)), stages=K, schedule=name, microbatches=M)
    partition, certificate = proven(straight.plan(given))
    assert len(partition.stages) == K
    assert certificate.objective_s == pytest.approx(
        least_objective(given, range(K, K + 1)), rel=1e-12
    )


def test_a_synchronous_iteration_trades_the_slowest_stage_for_the_largest_update():
    """Layers of 2, 3 and 2 s and weights of 1, 1 and 8; the optimizer takes 10 s for all of them.
    The fastest of two stages are [2 3] and [2] or [2] and [3 2], 5 s for all but the first of two
    microbatches; the first of them updates 8 rather than 9 tenths of the weights.
    """
    model = replace(chain([1, 1, 1], [1, 2, 1], [0, 0], [1, 1, 8]), optimizer_s=10.0)
    given = problem(model, topology((2, 1.0)), schedule="1f1b", microbatches=2)
    partition, certificate = proven(straight.plan(given))
    assert [stage.stop for stage in partition.stages] == [2, 3]
    assert certificate.objective_s == 7 + 5 + 8
