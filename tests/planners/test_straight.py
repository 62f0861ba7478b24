from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partopt.cost.period import binding
from partopt.cost.problem import CONTIGUOUS, Partition, Problem, consecutive
from partopt.planners import straight
from partopt.planners.placing import stage_count
from tests.examples import examples
from tests.planners.problems import chain, chains, problem, proven, topology
from tests.planners.test_optimal import clusters, stashed


def least_period(given: Problem, counts: range) -> float:
    """The least steady-state period over every partition into one-device stages, by the common
    cost.
    """
    layers = given.chain.layers
    partitions = (
        Partition(CONTIGUOUS, consecutive([0, *cuts, layers]))
        for count in counts
        for cuts in combinations(range(1, layers), count - 1)
    )
    return min(binding(partition, given).seconds for partition in partitions)


@examples(300)
@given(
    stashed(),
    clusters(),
    st.sampled_from([("pipedream", None), ("pipedream-2bw", None), ("1f1b", 4), ("naive", 4)]),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.sampled_from([None, 60, 150]),
)
def test_equals_exhaustive_search_under_the_common_cost(
    model, cluster, schedule, recompute, serial, blocking, memory_bytes
):
    name, M = schedule
    given = problem(
        model,
        cluster,
        schedule=name,
        microbatches=M,
        recompute=recompute,
        serial_transfers=serial,
        blocking_allreduce=blocking and M is None,
        memory_bytes=memory_bytes,
    )
    partition, certificate = proven(straight.plan(given))
    assert certificate.objective_s == pytest.approx(
        least_period(given, range(1, stage_count(given) + 1)), rel=1e-12
    )
    assert binding(partition, given).seconds == pytest.approx(certificate.objective_s, rel=1e-12)


@examples(50)
@given(chains(), st.data())
def test_takes_exactly_the_stages_asked_for(model, data):
    K = data.draw(st.integers(1, model.layers))
    given = problem(model, topology((8, 2.0)), stages=K)
    partition, certificate = proven(straight.plan(given))
    assert len(partition.stages) == K
    assert certificate.objective_s == pytest.approx(least_period(given, range(K, K + 1)), rel=1e-12)


def test_both_cuts_of_the_stage_in_the_middle_pass_its_port():
    """Layers of 12 s, a device each, 8 bytes between them at 1 byte/s."""
    given = problem(chain([4] * 3, [8] * 3, [8] * 2, [0] * 3), topology((3, 1.0)))
    partition, certificate = proven(straight.plan(given))
    assert len(partition.stages) == 3
    assert certificate.objective_s == binding(partition, given).seconds == 8 + 8
