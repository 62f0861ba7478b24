"""Grids of pipelines side by side: where they are cut, and what is estimated of them."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given

from partopt.cost.problem import Problem, problem_of
from partopt.planners.grids import Grid, GridPlan, Splits, grids, grids_of
from partopt.schedules import SCHEDULES
from partopt.schedules.placement import LOOPED
from partopt.search import cuts
from partopt.search.annealing import anneal
from partopt.search.effort import SearchParams
from partopt.search.evaluator import CutEvaluator, Cuts, PlacedStages
from tests.examples import examples
from tests.helpers import chain_profile, flat, measurement, profile_of, two_level, with_memory_of
from tests.search.problems import at_each_size, problems

LIMITS = [n * 10**6 for n in (44, 48, 66)]
TAKEN = 10**8  # bytes of every layer's backward while it runs


def every_grid(problem: Problem) -> list[GridPlan]:
    """The grids of a problem under each schedule that gives a device several stages."""
    looped = (name for name, entry in SCHEDULES.items() if not entry.overlaps)
    return [each for name in looped for each in grids(problem.with_(schedule=name))]


def stated(taken: int = 0, limit: int = 25 * 10**6) -> Problem:
    """Eight unequal layers on four devices with room for `limit` bytes beside what is `taken`."""
    chain = chain_profile(
        [1e-3, 4e-3, 2e-3, 1e-3, 3e-3, 1e-3, 2e-3, 5e-3],
        output_bytes=[10**6] * 8,
        parameter_bytes=[10**6, 4 * 10**6] * 4,
        stash_groups=[((layer,), 10**6 * (1 + layer % 3)) for layer in range(8)],
    )
    on = flat(4, memory_bytes=limit + taken)
    return problem_of(
        with_memory_of(chain, [0] * 8, [taken] * 8), on, schedule="1f1b", microbatches=8
    )


def simulated(plan: GridPlan) -> tuple[float, CutEvaluator, Cuts]:
    """Simulated seconds of a microbatch, what says so, and the plan as that knows it."""
    evaluator = CutEvaluator(plan.splits.problem)
    found = Cuts(PlacedStages(plan.partition, evaluator.problem), plan.bounds)
    return evaluator.seconds(found), evaluator, found


def test_the_cuts_of_least_squares_beside_all_cuts():
    splits = Splits(stated())
    for S, bounds in splits.of_least_squares().items():
        every = ((0, *cuts, 8) for cuts in combinations(range(1, 8), S - 1))
        squares = [sum(np.diff(splits.C[list(own)]) ** 2) for own in every]
        assert sum(np.diff(splits.C[list(bounds)]) ** 2) == pytest.approx(min(squares))


def test_within_a_limit_every_stage_has_room():
    splits = Splits(stated())
    needs = splits.needs(4, 1)
    limit = float(np.quantile(needs[np.isfinite(needs)], 0.6))
    found = splits.of_least_squares(4, 1, limit)
    assert found and min(found) > 1
    for bounds in found.values():
        assert max(needs[cut] for cut in pairwise(bounds)) <= limit


@pytest.mark.parametrize(("shard", "gathers"), [("gradients", 0), ("parameters", 1)])
def test_what_replicas_exchange_in_every_microbatch_keeps_stages_busy(shard, gathers):
    """Half an all-reduce each: 1 MB a stage at 1 GB/s take 2 replicas half a millisecond. A layer
    takes 0.1 ms forward and 0.2 ms backward.
    """
    chain = chain_profile([1e-4] * 4, [2e-4] * 4, [0] * 4, [10**6] * 4)
    problem = problem_of(chain, flat(8, 1e9), schedule="1f1b", microbatches=8, shard=shard)
    [found] = [each for each in grids(problem) if (each.grid.p, each.grid.d) == (4, 2)]
    forward = max(1e-4, gathers * 5e-4)
    assert found.busy_s == pytest.approx([forward + max(2e-4, (gathers + 1) * 5e-4)] * 4)


def test_of_the_cuts_that_have_room_the_fastest_by_its_estimate_is_taken():
    """Where the plan itself has none, and the first of those that fit."""
    compared = 0
    for limit, each in ((m, own) for m in LIMITS for own in every_grid(stated(limit=m))):
        if each.needs_bytes.max() <= limit or len(each.bounds) < 3:
            continue
        ways = combinations(range(1, 8), len(each.bounds) - 2)
        others = [replace(each, bounds=(0, *cuts, 8)) for cuts in ways]
        fitting = [other for other in others if other.needs_bytes.max() <= limit]
        found = each.within(1.0)
        assert bool(found) == bool(fitting)
        if found:
            assert found[0].estimate_s == min(other.estimate_s for other in fitting)
            compared += len({other.estimate_s for other in fitting}) > 1
    assert compared


def test_what_every_backward_takes_counts_once_on_a_device():
    """So that grids need as much more, and are cut as they are without it on smaller devices."""
    pairs = list(zip(every_grid(stated(TAKEN)), every_grid(stated()), strict=True))
    assert len(pairs) > 10
    for loaded, light in pairs:
        assert loaded.needs_bytes == pytest.approx(light.needs_bytes + TAKEN)


@pytest.mark.parametrize(("bus", "seconds"), [(True, 6.0), (False, 3.0)])
def test_a_message_holds_a_bus_once_though_both_ends_sit_on_it(bus, seconds):
    """Three cuts between two devices, 1 s each way; a port of a switch carries one way alone."""
    (grid,) = grids_of(LOOPED, 2, 1, 2, flat(2, 1.0, bus=bus))
    assert grid.ports_s(np.ones(3), 1) == pytest.approx(seconds)


@pytest.mark.slow
def test_the_estimates_are_in_the_order_of_the_simulations():
    """Spearman's rank correlation on a cluster with slow links between servers."""
    profile = profile_of(
        [
            measurement([1e-3] * 16, [2e-3] * 16, [4 * 10**6] * 16),
            measurement([1.7e-3] * 16, [3.4e-3] * 16, [8 * 10**6] * 16, 2),
        ],
        [10**7] * 16,
    )
    sizes = at_each_size(
        lambda b, again: problem_of(profile, two_level(4, 4, 50e9, 5e9), b, recompute=again), 64
    )
    everything = [each for problem in sizes for each in every_grid(problem)]
    b = [each.problem.chain.microbatch_size for each in everything]
    judged = [simulated(each)[0] for each in everything]
    ranks = [
        np.argsort(np.argsort(seconds))
        for seconds in ([each.estimate_s for each in everything], np.divide(judged, b))
    ]
    assert len(everything) > 80
    assert np.corrcoef(*ranks)[0, 1] > 0.9


@pytest.mark.slow
@examples(15)
@given(problems(10))
def test_devices_that_compute_all_the_time_are_no_slower_than_a_simulation(given):
    for each in [each for problem in given for each in every_grid(problem)][::7]:
        seconds, evaluator, plan = simulated(each)
        assert evaluator.lower_bound_s(plan) <= seconds * (1 + 1e-9)


@pytest.mark.slow
def test_moved_cuts_are_never_worse_and_always_the_same():
    for each in every_grid(stated())[:6]:
        before_s, evaluator, begin = simulated(each)
        params = SearchParams.at("quick").grids.annealing.of_stages(begin.stages)
        found = []
        for _ in range(2):
            rng = random.Random(0)
            propose = lambda now, rng=rng: (rng.random(), cuts.neighbour(now, rng))  # noqa: E731
            found.append(anneal(begin, propose, CutEvaluator(evaluator.problem), params, 60.0))
        seconds, moved = found[0]
        assert evaluator.seconds(moved) == seconds <= before_s
        assert found[0] == found[1]


@pytest.mark.parametrize(("devices", "least"), [(60, 45), (64, 48), (72, 54)])
def test_three_quarters_of_the_devices_have_work(devices, least):
    """Of each number of pipelined devices the most pipelines that microbatches divide among."""
    M = 2520
    given = problem_of(chain_profile([1.0] * 8), flat(devices), schedule="1f1b", microbatches=M)
    found = every_grid(given)
    busy = {len({rank for own in each.grid.ranks for rank in own}) for each in found}
    most = {p: max(d for d in range(1, devices // p + 1) if M % d == 0) for p in range(2, 9)}
    assert busy == {p * d for p, d in most.items() if p * d >= least}
    assert min(busy) < devices


def grid_of(topology, *ranks: tuple[int, ...]) -> Grid:
    return Grid("looped", len(ranks), len(ranks[0]), 1, False, ranks, topology)


@pytest.mark.parametrize(
    ("topology", "ranks", "seconds"),
    [
        # 5 bytes at 1 byte/s: alone, and both ways on a bus
        (flat(2, 1.0), [(0,), (1,)], 5.0),
        (flat(2, 1.0, bus=True), [(0,), (1,)], 10.0),
        # the device in the middle has two cuts
        (flat(3, 1.0), [(0,), (1,), (2,)], 10.0),
        # two pipelines through one server port, which carries 2 bytes/s
        (two_level(2, 2, 8.0, 2.0), [(0, 1), (2, 3)], 5.0),
    ],
)
def test_how_long_messages_keep_the_busiest_port_busy(topology, ranks, seconds):
    grid = grid_of(topology, *ranks)
    assert grid.ports_s(np.full(len(ranks) - 1, 5.0), 1) == seconds
