"""Plans whose stages have equally many replicas, or one each, against exhaustive search."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partopt import planners
from partopt.cost.iteration import objective_s
from partopt.cost.problem import Problem
from partopt.cost.ranges import RangeSum
from partopt.errors import PartoptError
from tests.planners import exhaustive
from tests.planners.problems import chain, chains, problem, proven, topologies, topology

SYNCHRONOUS = st.sampled_from(["1f1b", "1f1b-eager", "gpipe", "zb-h1"])


def check(given: Problem) -> None:
    """The planner proves the shortest iteration that there is, with a plan that has it."""
    best = exhaustive.best(given)
    if best is None:
        with pytest.raises(PartoptError, match="no plan fits"):
            planners.decide("optimal", given)
        return
    partition, certificate = proven(planners.decide("optimal", given))
    seconds = objective_s(partition, given)
    assert seconds == pytest.approx(best.seconds, rel=1e-11)
    # what all stages take together may be longer
    assert certificate.objective_s == max(seconds, certificate.lower_bound_s)
    assert certificate.status == "optimal"
    assert exhaustive.holds(partition, given)
    assert len({len(stage.ranks) for stage in partition.stages}) == 1


@pytest.mark.parametrize("replication", ["uniform", "none"])
@settings(max_examples=150, deadline=None)
@given(
    chains(4),
    topologies(levels=2, devices=4),
    SYNCHRONOUS,
    st.sampled_from([1, 2, 3, 8]),
    st.sampled_from([None, 60, 150]),
    st.booleans(),
    st.sampled_from(["never", "always", "auto"]),
    st.data(),
)
def test_the_shortest_iteration_of_synchronous_schedules(
    replication, model, cluster, schedule, M, memory_bytes, serial, recompute, data
):
    stash = [float(data.draw(st.integers(1, 12))) for _ in range(model.layers)]
    given = problem(
        replace(model, optimizer_s=3.0, stash_bytes=RangeSum(stash)),
        cluster,
        recompute=recompute == "always",
        recompute_per_stage=recompute == "auto",
        schedule=schedule,
        microbatches=M,
        memory_bytes=memory_bytes,
        serial_transfers=serial,
        replication=replication,
    )
    check(given)


@pytest.mark.parametrize(
    "schedule, executed_s", [("1f1b", 3.0), ("1f1b-eager", 3.0), ("gpipe", 4.0), ("zb-h1", 3.5)]
)
@pytest.mark.parametrize("replication", ["uniform", "none"])
def test_the_slowest_stage_adds_its_time_for_all_microbatches_but_the_first(
    replication, schedule, executed_s
):
    """Layers of 1 s, a stage each: a pass of 2 s and 1 s for the second microbatch, against 4 s on
    one device. What the slowest stage adds is 1 s, not the 2 s of both microbatches. Replicas would
    exchange 16 bytes at 1 byte/s.
    """
    model = chain([1, 0], [0, 1], [0], [8, 8])
    given = problem(
        model, topology((2, 1.0)), schedule=schedule, microbatches=2, replication=replication
    )
    partition, certificate = proven(planners.decide("optimal", given))
    assert objective_s(partition, given) == 3.0
    # the certificate also knows the order in which each schedule executes them
    assert certificate.lower_bound_s == pytest.approx(executed_s)
    assert certificate.status == "optimal"
