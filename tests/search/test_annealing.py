"""Partitions annealed in short runs, held to simulations in full."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest

from partopt.cost.problem import CONTIGUOUS, Partition, Problem, consecutive
from partopt.search import annealing
from partopt.search.annealing import anneal, kinds, unit_of
from partopt.search.evaluate import Evaluator, Value
from partopt.search.moves import Moves, frozen, shape_of
from partopt.search.steps import Steps
from tests.helpers import flat, two_level
from tests.search.test_starts import slow

SYNCHRONOUS = [{"schedule": name, "microbatches": 8} for name in ("1f1b", "gpipe", "zb-h1")]
SMALL = [
    {"schedule": "pipedream"},
    {"schedule": "pipedream", "replication": "uniform"},
    {"schedule": "pipedream", "replication": "none"},
    {"schedule": "pipedream", "stages": 3},
    *SYNCHRONOUS,
]


@pytest.fixture(autouse=True)
def little_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(annealing, "BUDGET", 300.0)
    monkeypatch.setattr(annealing, "FINE", 300.0)


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is small counts as large."""
    monkeypatch.setattr(annealing, "LARGE", 0)


def tight(**options: object) -> Problem:
    """Forty layers on eight servers of four, where one microbatch in flight nearly fills memory."""
    cluster = two_level(4, 8, 12e9, 1.25e9)
    given = {"memory_bytes": 6 * 10**9, "schedule": "pipedream"} | options
    return slow(40, cluster, **given)


def start_of(problem: Problem) -> tuple[Partition, Value]:
    """Two stages, and what the simulator says of them."""
    stages = consecutive([0, 20, 40], [16, 16])
    partition = frozen(Partition(CONTIGUOUS, tuple(stages)))
    return partition, Evaluator(problem).value(partition)


def fastest_s(found: list[tuple[Partition, Value]]) -> float:
    """Seconds of the fastest partition that fits."""
    return min((value.seconds for _, value in found if value.over == 0), default=math.inf)


def check(problem: Problem) -> None:
    """What is found is simulated in full, is faster, and is the same each time."""
    start, value = start_of(problem)
    found = anneal([start], problem, value)
    assert found == anneal([start], problem, value)
    assert fastest_s(found) < 0.9 * value.seconds
    for partition, each in found:
        whole = Evaluator(problem).value(partition)
        assert each == whole  # at the best warm-up
    near = Value(0, 1.001 * fastest_s(found))
    for partition, each in anneal([start], problem, near):
        assert each == Evaluator(problem).value(partition)  # however little better it is


def test_what_is_found_of_a_large_problem_is_simulated_in_full_and_the_same_each_time(large):
    check(tight())


@pytest.mark.parametrize("options", SMALL[:1] + SYNCHRONOUS[:2])
def test_what_is_found_of_a_small_problem_is_simulated_in_full_and_the_same_each_time(options):
    check(tight(**options))


def test_stages_begin_and_end_with_whole_groups_or_halves(large):
    problem = tight()
    start, value = start_of(problem)
    for partition, _ in anneal([start], problem, value):
        assert all(len(stage.ranks) % 2 == 0 for stage in partition.stages)
        assert all(a.ranks.stop <= b.ranks.start for a, b in pairwise(partition.stages))


@pytest.mark.parametrize("options", [*SYNCHRONOUS, {"replication": "uniform"}])
def test_large_problems_that_it_is_not_for(options, large):
    assert anneal([], tight(**options), Value(0, math.inf)) == []


def test_it_is_not_for_stages_that_choose_to_recompute():
    assert anneal([], tight(recompute_per_stage=True), Value(0, math.inf)) == []


def test_units_are_whole_servers_and_kinds_use_all_of_them():
    assert unit_of(tight()) == 4
    assert unit_of(slow(4, flat(64))) == 2  # of 64 alike no more than 32
    for units in (8, 32):
        assert all(sum(each) == units and min(each) > 0 for each in kinds(units))
        assert (units,) in kinds(units)


@pytest.mark.parametrize("options", SMALL)
def test_all_steps_keep_to_the_request_and_all_kinds_of_partition_are_reached(options):
    problem = tight(**options)
    moves = Moves(problem)
    steps = Steps(moves, 1, fine=True)
    counts = (1, 1, 1) if options.get("replication") == "none" else (8, 8, 8)
    shape = shape_of(frozen(Partition(CONTIGUOUS, consecutive([0, 10, 20, 40], counts))))
    assert shape is not None
    seen = {shape}
    for _ in range(3_000):
        other = steps.near(shape, steps.random.random())
        if other is None:
            continue
        assert list(other.bounds) == sorted(set(other.bounds)) and other.bounds[-1] == 40
        assert moves.allows(other.replicas)
        assert sum(other.replicas) + sum(other.idle) <= moves.P
        shape = other
        seen.add(shape)
    stages = {len(each.replicas) for each in seen}
    assert stages == {3} if problem.stages else len(stages) > 3
    if options.get("replication") != "none":
        assert len({max(each.replicas) for each in seen}) > 3
    assert len({each.bounds for each in seen}) > 100


def test_coarse_steps_move_whole_units_between_as_many_stages():
    moves = Moves(tight())
    steps = Steps(moves, 4, fine=False)
    shape = shape_of(start_of(moves.problem)[0])
    for _ in range(1_000):
        other = steps.near(shape, steps.random.random())
        if other is not None:
            shape = other
            assert len(shape.replicas) == 2 and all(r % 2 == 0 for r in shape.replicas)


@pytest.mark.parametrize("scale", ["large", "small"])
def test_more_rounds_go_on_from_the_best_of_those_before(scale, request):
    if scale == "large":
        request.getfixturevalue("large")
    problem = tight()
    start, value = start_of(problem)
    once, longer = (
        fastest_s(anneal([start], replace(problem, effort=effort), value))
        for effort in ("normal", "thorough")
    )
    assert longer < once
    assert anneal([start], replace(problem, effort="quick"), value) == []


def test_where_the_starts_take_all_of_the_work_they_are_what_is_found(large, monkeypatch):
    monkeypatch.setattr(annealing, "BUDGET", 1.0)
    problem = tight()
    start, value = start_of(problem)
    assert fastest_s(anneal([start], problem, value)) < value.seconds
