"""A plan predicts what its execution shows."""

from collections.abc import Sequence

import pytest

from partopt import planners
from partopt.cost.problem import problem_of
from partopt.documents.files import find_shipped
from partopt.documents.profile import Profile
from partopt.documents.topology import Topology
from partopt.schedules import SCHEDULES
from partopt.simulator import execute, simulate_plan
from tests.helpers import chain_profile, flat, two_level

PROFILE = Profile.load(find_shipped("gpt.cpu.float32", "profiles"))
CLUSTER = Topology.load(find_shipped("v100-pcie", "topologies"), 1)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", SCHEDULES)
def test_its_memory_is_that_of_the_fullest_rank_its_period_and_bubble_those_of_the_run(
    name, recompute
):
    M = None if SCHEDULES[name].asynchronous else 16
    plan = simulate_plan(
        planners.plan(
            "gpipe",
            problem_of(PROFILE, CLUSTER, schedule=name, microbatches=M, recompute=recompute),
        )
    )
    simulation = execute(plan)
    assert plan.peak_memory_bytes == simulation.peak_memory_bytes.max()
    assert plan.predicted.period_s == pytest.approx(simulation.period_s, rel=1e-12)
    assert plan.predicted.bubble == pytest.approx(simulation.bubble, abs=1e-12)


def bound_by(
    bytes_between: int,
    replicas: Sequence[int] = (1, 1, 1),
    weights: int = 0,
    latency: float = 0.0,
    cluster: Topology | None = None,
) -> str:
    """Of stages of 3 ms behind links of 1 GB/s."""
    S = len(replicas)
    content = chain_profile([1e-3] * S, [2e-3] * S, [bytes_between] * S, [weights] * S)
    cluster = cluster or flat(sum(replicas), latency=latency)
    problem = problem_of(content, cluster, cuts=range(1, S), replicas=replicas)
    return simulate_plan(planners.plan("manual", problem)).predicted.bound_by


def test_what_binds_is_what_is_always_busy():
    """Each message of 10 MB takes 10 ms, and the middle device sends two of them for each
    microbatch through its one port out. With two replicas each port has a message and a ring of 10
    MB every second microbatch. Behind 15 devices on four servers of four stands one whose server's
    port takes 12 of 15 messages.
    """
    assert bound_by(0).startswith("compute of stage")
    assert bound_by(10**7) == "ports of stage 1"
    assert bound_by(10**7, (2, 2), weights=10**7) == "ports of stage 0"
    assert bound_by(10**7, (15, 1), cluster=two_level(4, 4, 1e9, 1e9)) == "cut before stage 1"
    assert bound_by(0, latency=1e-2) == "microbatches in flight"
