"""Partitions of whole groups annealed in short runs, held to simulations in full."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest

from partopt.cost.problem import CONTIGUOUS, Partition, Problem, consecutive
from partopt.search import annealing
from partopt.search.annealing import anneal, kinds, unit_of
from partopt.search.evaluate import Evaluator, Value
from partopt.search.moves import frozen
from tests.helpers import flat, two_level
from tests.search.test_starts import slow


@pytest.fixture(autouse=True)
def little_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(annealing, "BUDGET", 300.0)


def tight(**options: object) -> Problem:
    """Forty layers on eight servers of four, where one microbatch in flight nearly fills memory."""
    cluster = two_level(4, 8, 12e9, 1.25e9)
    return slow(40, cluster, memory_bytes=6 * 10**9, schedule="pipedream", **options)


def start_of(problem: Problem) -> tuple[Partition, Value]:
    """Two stages, and what the simulator says of them."""
    stages = consecutive([0, 20, 40], [16, 16])
    partition = frozen(Partition(CONTIGUOUS, tuple(stages)))
    return partition, Evaluator(problem).value(partition)


def test_what_is_found_is_simulated_in_full_and_the_same_each_time():
    problem = tight()
    start, value = start_of(problem)
    found = anneal([start], problem, value)
    assert found == anneal([start], problem, value)
    assert min(each.seconds for _, each in found if each.over == 0) < 0.9 * value.seconds
    for partition, each in found:
        whole = Evaluator(problem).value(partition)
        assert each == whole  # at the best warm-up
    near = Value(0, 1.001 * min(each.seconds for _, each in found if each.over == 0))
    for partition, each in anneal([start], problem, near):
        assert each == Evaluator(problem).value(partition)  # however little better it is


def test_stages_begin_and_end_with_whole_groups_or_halves():
    problem = tight()
    start, value = start_of(problem)
    for partition, _ in anneal([start], problem, value):
        assert all(len(stage.ranks) % 2 == 0 for stage in partition.stages)
        assert all(a.ranks.stop <= b.ranks.start for a, b in pairwise(partition.stages))


@pytest.mark.parametrize(
    "options", [{"schedule": "1f1b", "microbatches": 8}, {"replication": "uniform"}]
)
def test_problems_that_it_is_not_for(options):
    cluster = two_level(4, 8, 12e9, 1.25e9)
    problem = slow(40, cluster, memory_bytes=6 * 10**9, **({"schedule": "pipedream"} | options))
    assert anneal([], problem, Value(0, math.inf)) == []


def test_units_are_whole_servers_and_kinds_use_all_of_them():
    assert unit_of(tight()) == 4
    assert unit_of(slow(4, flat(64))) == 2  # of 64 alike no more than 32
    for units in (8, 32):
        assert all(sum(each) == units and min(each) > 0 for each in kinds(units))
        assert (units,) in kinds(units)


def test_more_rounds_go_on_from_the_best_of_those_before():
    problem = tight()
    start, value = start_of(problem)
    once, longer = (
        min(each.seconds for _, each in anneal([start], replace(problem, effort=effort), value))
        for effort in ("normal", "thorough")
    )
    assert longer < once
    assert anneal([start], replace(problem, effort="quick"), value) == []


def test_where_the_starts_take_all_of_the_work_they_are_what_is_found(monkeypatch):
    monkeypatch.setattr(annealing, "BUDGET", 1.0)
    problem = tight()
    start, value = start_of(problem)
    found = anneal([start], problem, value)
    assert min(each.seconds for _, each in found if each.over == 0) < value.seconds
