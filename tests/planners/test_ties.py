"""Which of several plans that are equally fast is taken: fewest stages, least memory, fewest
devices.
"""

from itertools import chain as joined

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partopt import planners
from partopt.cost.period import objective_s, parts_of_iteration
from partopt.cost.price import peak_memory_bytes
from partopt.cost.problem import CONTIGUOUS, Assignment, Partition, Problem
from partopt.errors import PartoptError
from tests.planners.exhaustive import nested, partitions
from tests.planners.problems import chain, chains, problem, topologies, topology

SAME = 1 + 1e-11
NEAR = 1 + 5e-4  # of the memory: less is not searched for
SCHEDULES = [("pipedream", None), ("pipedream-2bw", None), ("1f1b", 4), ("gpipe", 3)]


def bounds_of(partition: Partition, given: Problem) -> tuple[float, ...]:
    """What a plan takes: its period, or its iteration and what paces it and its largest update."""
    seconds = objective_s(partition, given)
    rest = () if given.microbatches is None else parts_of_iteration(partition, given)[1:]
    return (seconds, *rest)


def as_fast(best: Partition, given: Problem) -> list[tuple[int, int, int]]:
    """Stages, memory and devices of every plan that takes no more than `best` and fits."""
    limits = [seconds * SAME for seconds in bounds_of(best, given)]
    contiguous = (
        Partition(CONTIGUOUS, [Assignment(*stage) for stage in stages])
        for stages in partitions(given)
    )
    return [
        facts(other, given)
        for other in joined(contiguous, nested(given))
        if all(own <= most for own, most in zip(bounds_of(other, given), limits, strict=True))
        and (given.memory_bytes is None or peak_memory_bytes(other, given) <= given.memory_bytes)
    ]


def facts(partition: Partition, given: Problem) -> tuple[int, int, int]:
    """Stages, bytes on the fullest device, and devices."""
    devices = sum(len(stage.ranks) for stage in partition.stages)
    return len(partition.stages), peak_memory_bytes(partition, given), devices


@pytest.mark.parametrize(("schedule", "M"), SCHEDULES)
@settings(max_examples=80, deadline=None)
@given(
    chains(5),
    topologies(levels=2, devices=5),
    st.sampled_from([None, 100, 200]),
    st.sampled_from(["free", "free", "uniform"]),
)
def test_of_plans_as_fast_the_smallest(schedule, M, model, cluster, memory_bytes, replication):
    given = problem(
        model,
        cluster,
        schedule=schedule,
        microbatches=M,
        memory_bytes=memory_bytes,
        replication=replication,
    )
    try:
        best = planners.decide("optimal", given).partition
    except PartoptError:
        return
    check(best, given)


def check(best: Partition, given: Problem) -> None:
    """Nothing that is as fast has fewer stages, less memory with as few, or fewer devices with as
    little.
    """
    stages, memory, devices = facts(best, given)
    others = as_fast(best, given)
    assert (stages, memory, devices) in others
    assert stages == min(others)[0]
    assert memory <= min(other[1] for other in others if other[0] == stages) * NEAR + 1
    assert devices == min(other[2] for other in others if other[0] == stages and other[1] <= memory)


@pytest.mark.parametrize(("schedule", "M"), SCHEDULES)
@pytest.mark.parametrize(
    ("weights", "cut"), [([0, 100, 100], 2), ([100, 100, 0], 1)], ids=["behind", "ahead"]
)
def test_the_cut_that_shares_the_weights(schedule, M, weights, cut):
    """Layers of 2, 0 and 2 s on two devices, a stage each: the one in the middle takes no time on
    either, and lies with the lighter.
    """
    given = problem(
        chain([1, 0, 1], [1, 0, 1], [0, 0], weights),
        topology((2, 1.0)),
        schedule=schedule,
        microbatches=M,
    )
    partition = planners.decide("optimal", given).partition
    assert [stage.start for stage in partition.stages] == [0, cut]


@pytest.mark.parametrize(("schedule", "M"), SCHEDULES)
def test_devices_that_do_not_make_it_faster_stay_idle(schedule, M):
    """Layers of 4 and 2 s: the first, whose 800 bytes a replica would exchange, paces; a replica of
    the second does not make it faster.
    """
    given = problem(
        chain([2, 1], [2, 1], [0], [800, 0]), topology((3, 1.0)), schedule=schedule, microbatches=M
    )
    partition = planners.decide("optimal", given).partition
    assert [len(stage.ranks) for stage in partition.stages] == [1, 1]


@pytest.mark.parametrize("schedule", ["pipedream", "pipedream-2bw"])
def test_one_stage_where_two_are_no_faster(schedule):
    """Layers of 5 s on four devices: 10 / 4 s on all of them, and 5 / 2 s on two each."""
    given = problem(
        chain([1, 1], [4, 4], [0], [0, 0]),
        topology((4, 1.0)),
        schedule=schedule,
        replication="uniform",
    )
    partition = planners.decide("optimal", given).partition
    assert [len(stage.ranks) for stage in partition.stages] == [4]


def test_a_nested_plan_whose_second_stage_needs_no_more_devices():
    """Layers of 4 and 3 s on two servers of two pairs, 5 bytes between them: with four devices the
    second is no faster than with two.
    """
    model = chain([3, 3], [1, 0], [5], [0, 0])
    cluster = topology((2, 4.0), (2, 2.0), (2, 1.0), latency_s=1.0)
    given = problem(model, cluster, schedule="pipedream-2bw")
    best = planners.decide("optimal", given).partition
    check(best, given)
    assert [len(stage.ranks) for stage in best.stages] == [4, 2]
