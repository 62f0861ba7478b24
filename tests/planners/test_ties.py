"""Which of several plans that are equally fast is taken: fewest stages, then of those that the
probes find one with least memory, then one with fewest devices.
"""

from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partopt import planners
from partopt.cost.problem import CONTIGUOUS, Assignment, Partition, Problem, consecutive
from partopt.errors import PartoptError
from partopt.planners.optimal import ties
from tests.planners import exhaustive
from tests.planners.problems import chain, chains, problem, topologies, topology

SCHEDULES = [("pipedream", None), ("pipedream-2bw", None), ("1f1b", 4), ("gpipe", 3)]


@pytest.mark.parametrize(("schedule", "M"), SCHEDULES)
@settings(max_examples=60, deadline=None)
@given(
    chains(5),
    topologies(levels=2, devices=5),
    st.sampled_from([None, 100, 200]),
    st.sampled_from(["free", "free", "uniform"]),
)
def test_of_plans_as_fast_one_with_the_fewest_stages(
    schedule, M, model, cluster, memory_bytes, replication
):
    given = problem(
        model,
        cluster,
        schedule=schedule,
        microbatches=M,
        memory_bytes=memory_bytes,
        replication=replication,
    )
    best = exhaustive.best(given)
    try:
        partition = planners.decide("optimal", given).partition
    except PartoptError:
        assert best is None
        return
    assert best is not None
    assert len(partition.stages) == best.stages


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


class Finds(NamedTuple):
    """A probe that finds one plan, of as many stages as that has."""

    problem: Problem
    plan: Partition

    def find(self, T, counts, stages):
        return self.plan if len(self.plan.stages) == stages else None


def three_layers(weights: list[int], **options: object) -> tuple[Problem, Partition]:
    """Layers of 4, 0 and 2 s on four devices with one microbatch, and a plan of a stage each."""
    given = problem(
        chain([1, 0, 1], [3, 0, 1], [0, 0], weights),
        topology((4, 1.0)),
        schedule="1f1b",
        microbatches=1,
        **options,
    )
    return given, Partition(CONTIGUOUS, consecutive([0, 1, 2, 3]))


@pytest.mark.parametrize(
    ("weights", "cut"), [([0, 100, 100], 2), ([100, 100, 0], 1)], ids=["behind", "ahead"]
)
@pytest.mark.parametrize("order", [1, -1])
def test_of_plans_found_with_fewer_stages_the_one_with_least_memory(weights, cut, order):
    """The layer that takes no time lies with the lighter of the others."""
    given, best = three_layers(weights)
    plans = [Partition(CONTIGUOUS, consecutive([0, c, 3])) for c in (1, 2)]
    probes = [Finds(given, plan) for plan in plans[::order]]
    assert ties.break_ties(best, probes).stages[1].start == cut


@pytest.mark.parametrize("order", [1, -1])
def test_of_plans_found_with_as_little_memory_the_one_with_fewest_devices(order):
    given, best = three_layers([0, 0, 0])
    plans = [Partition(CONTIGUOUS, consecutive([0, 1, 3], [1, r])) for r in (1, 2)]
    probes = [Finds(given, plan) for plan in plans[::order]]
    assert ties.break_ties(best, probes) == plans[0]


@pytest.mark.parametrize("order", [1, -1])
def test_of_plans_found_the_one_with_fewest_stages(order):
    given, best = three_layers([0, 0, 0])
    plans = [Partition(CONTIGUOUS, consecutive(cuts)) for cuts in ([0, 3], [0, 1, 3])]
    probes = [Finds(given, plan) for plan in plans[::order]]
    assert ties.break_ties(best, probes) == plans[0]


def test_a_plan_that_takes_longer_is_no_tie():
    """Of 6 s each, two probes: one plan has its update of 10 bytes besides."""
    given, best = three_layers([0, 0, 0])
    slow = Partition(CONTIGUOUS, [Assignment(0, 3, [0])])
    heavy, _ = three_layers([10, 0, 0])
    shared = Partition(CONTIGUOUS, [Assignment(0, 3, range(2))])
    assert ties.break_ties(best, [Finds(given, slow)]) == slow
    assert ties.break_ties(best, [Finds(heavy, shared)]) == best


def test_nothing_is_searched_for_where_stages_are_given():
    one = Partition(CONTIGUOUS, [Assignment(0, 3, [0])])
    for options, taken in (({}, 1), ({"stages": 3}, 3)):
        given, best = three_layers([0, 0, 0], **options)
        assert len(ties.break_ties(best, [Finds(given, one)]).stages) == taken


def test_nothing_is_searched_for_where_that_takes_long(monkeypatch):
    """Three layers, four devices and three stages."""
    given, best = three_layers([0, 0, 0])
    one = Partition(CONTIGUOUS, [Assignment(0, 3, [0])])
    for limit, taken in ((3 * 4 * 3, one), (3 * 4 * 3 - 1, best)):
        monkeypatch.setattr(ties, "LIMIT", limit)
        assert ties.break_ties(best, [Finds(given, one)]) == taken
