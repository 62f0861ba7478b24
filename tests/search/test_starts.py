"""Starts on a coarse chain beside every partition of whole groups, and what they bring."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from partopt.cost.capacity import shapes_of
from partopt.cost.iteration import objective_s
from partopt.cost.problem import CONTIGUOUS, Assignment, Partition, Problem, problem_of
from partopt.documents.topology import Topology
from partopt.search import contest, starts
from partopt.search.evaluate import Value
from partopt.search.starts import CELLS, coarse_starts, keep_whole_groups, simulated_starts
from tests.examples import examples
from tests.helpers import chain_profile, flat, two_level

NOTHING = Value(2**63, math.inf)


def slow(layers: int, topology: Topology, seed: int = 0, **options: object) -> Problem:
    """Activations that decay and weights that grow along the chain, as in most of vision."""
    random, position = np.random.default_rng(seed), np.arange(layers) / layers
    forward = (random.lognormal(0, 0.5, layers) * 1e-3).tolist()
    outputs = 1e8 * np.exp(-3 * position) * random.lognormal(0, 0.3, layers)
    weights = 2e7 * np.exp(3 * position) * random.lognormal(0, 0.5, layers)
    profile = chain_profile(
        forward,
        [2 * seconds for seconds in forward],
        outputs.astype(int).tolist(),
        weights.astype(int).tolist(),
    )
    return problem_of(profile, topology, **options)


def fills_groups(ranks: range, topology: Topology) -> bool:
    """Whether no group of a level is cut through, but by an even share of its own members."""
    sizes = [topology.group_size(k) for k in range(len(topology.levels) + 1)]
    for inner, outer in itertools.pairwise(sizes):
        groups = {rank // inner for rank in ranks}
        whole = len(groups) * inner == len(ranks)
        first, last = min(groups), max(groups)
        members = outer // inner
        inside = first // members == last // members
        even = inside and members % len(groups) == 0 and first % len(groups) == 0
        if whole and (outer == topology.devices or even):
            return True
    return False


@pytest.mark.parametrize("topology", [flat(6), two_level(4, 3), two_level(6, 2)], ids=str)
def test_runs_that_exchange_gradients_are_whole_groups_or_an_even_share_of_one(topology):
    shapes = shapes_of(topology)
    latency, group = keep_whole_groups(shapes).latency, int(shapes.group[-2])
    for first in range(topology.devices):
        for r in range(1, topology.devices - first + 1):
            fills = fills_groups(range(first, first + r), topology)
            assert (latency[first % group, r] < math.inf) == fills


@examples(8, derandomize=True)
@given(st.integers(0, 100), st.sampled_from([2, 3]), st.sampled_from([None, 8]))
def test_no_partition_of_whole_groups_and_so_many_stages_is_better_by_the_formulas(
    seed, stages, microbatches
):
    """Anywhere on two servers of four."""
    topology, name = two_level(4, 2, 12e9, 1.25e9), "1f1b" if microbatches else "pipedream"
    problem = slow(4, topology, seed, schedule=name, microbatches=microbatches, stages=stages)
    (found,) = coarse_starts(problem)
    assert all(fills_groups(stage.ranks, topology) for stage in found.stages)
    every = [objective_s(each, problem) for each in whole_partitions(problem)]
    assert min(every) <= objective_s(found, problem) <= min(every) * 1.02


def whole_partitions(problem: Problem) -> list[Partition]:
    """Every partition of whole groups with the stages that are requested, on any ranks."""
    N, P, S = problem.chain.layers, problem.topology.devices, problem.stages
    runs = [
        [range(*pair) for pair in zip(ends[::2], ends[1::2], strict=True)]
        for ends in itertools.combinations_with_replacement(range(P + 1), 2 * S)
    ]
    places = [
        own for own in runs if all(ranks and fills_groups(ranks, problem.topology) for ranks in own)
    ]
    return [
        Partition(
            CONTIGUOUS,
            [
                Assignment(start, stop, ranks)
                for (start, stop), ranks in zip(itertools.pairwise(cuts), own, strict=True)
            ],
        )
        for inside in itertools.combinations(range(1, N), S - 1)
        for cuts in [(0, *inside, N)]
        for own in places
    ]


@pytest.mark.parametrize("asked", [{}, {"stages": 4}, {"cut_at": list(range(0, 150, 3))}], ids=str)
def test_starts_keep_to_the_request_and_to_few_places_to_cut(asked):
    problem = slow(150, two_level(4, 4, 12e9, 1.25e9), memory_bytes=6 * 10**10, **asked)
    found = list(coarse_starts(problem))
    assert found
    cuts = {stage.start for partition in found for stage in partition.stages}
    assert cuts <= set(problem.boundaries())
    assert len(cuts) <= CELLS
    for partition in found:
        assert partition.stages[-1].stop == 150
        assert len(partition.stages) == problem.stages or problem.stages is None


def test_starts_are_those_below_what_is_to_be_beaten():
    problem = slow(24, two_level(4, 4, 12e9, 1.25e9))
    seconds = [objective_s(each, problem) for each in coarse_starts(problem)]
    middle_s = sorted(seconds)[len(seconds) // 2]
    below = [objective_s(each, problem) for each in coarse_starts(problem, 0.0, lambda: middle_s)]
    slack_s = starts._SLACK * max(seconds)
    assert 0 < len(below) < len(seconds)
    assert max(below) < middle_s
    assert len(below) >= sum(each < middle_s - 4 * slack_s for each in seconds)


def test_a_large_problem_far_from_its_bound_has_a_faster_plan_with_them(monkeypatch):
    """24 layers on eight servers of four."""
    problem = slow(24, two_level(4, 8, 12e9, 1.25e9), memory_bytes=6 * 10**9, effort="quick")
    without = contest.plan_alone("optimal", problem)[0]
    monkeypatch.setattr(contest, "LARGE", starts.size(problem))
    plan = contest.plan_alone("optimal", problem)[0]
    assert plan.fits
    assert plan.predicted.period_s < 0.95 * without.predicted.period_s


def test_nothing_is_simulated_that_cannot_be_better_or_beyond_the_budget(monkeypatch):
    problem = slow(12, two_level(2, 2, 12e9, 1.25e9))
    assert simulated_starts(problem, Value(0, 0.0)) == []
    assert len(simulated_starts(problem, NOTHING)) > 1
    monkeypatch.setattr(starts, "BUDGET", 1)
    assert len(simulated_starts(problem, NOTHING)) == 1
