"""Plans on more devices than a layout has places: one is found where one fits, and the best."""

from __future__ import annotations

import pytest

from partopt import Job, solve
from partopt.cost.memory import memory_table
from partopt.cost.problem import Problem
from partopt.planners import optimal
from partopt.schedules import SCHEDULES
from partopt.search.variants import ANY, variants_of
from tests.helpers import chain_profile, two_level

LAYERS, SERVERS = 72, 10
WEIGHTS, STASH = [4 * 10**6] * LAYERS, 10**6


def job(memory_bytes: int, name: str = "1f1b", **options: object) -> Job:
    """Equal blocks, which keep as much for every microbatch, on 80 devices."""
    profile = chain_profile(
        [1e-3] * LAYERS,
        [2e-3] * LAYERS,
        [10**4] * LAYERS,
        WEIGHTS,
        stash_groups=[([layer], STASH) for layer in range(LAYERS)],
    )
    M = None if SCHEDULES[name].asynchronous else 96
    return Job(
        profile,
        two_level(8, SERVERS, 1e11, 1e10),
        schedule=name,
        microbatches=M,
        memory=memory_bytes,
        **options,
    )


def least_bytes(problem: Problem) -> int:
    """What the fullest device of the deepest pipelines needs, of a stage for every layer."""
    entry, replicas = SCHEDULES[problem.schedule], [1] * LAYERS
    held = [entry.counts(s, replicas, problem.microbatches).held for s in range(LAYERS)]
    needs = [memory_table(problem, many, 1, True)[s, s + 1] for s, many in enumerate(held)]
    return round(max(needs))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
def test_the_deepest_pipeline_is_found_where_nothing_else_fits(name):
    """72 of 80 devices have work; with a byte less nothing fits."""
    enough = least_bytes(job(10**12, name, recompute="always").problem)
    found = solve(job(enough, name, recompute="auto"), levers=False).plan
    assert found.fits and len(found.stages) == LAYERS
    assert {stage.replicas for stage in found.stages} == {1}
    assert not solve(job(enough - 1, name, recompute="auto"), levers=False).plan.fits


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "pipedream-2bw"])
def test_plans_on_many_devices_begin_with_equal_pipelines_of_all_layers(name):
    variant, *_ = variants_of(job(10**12, name), name, ANY)
    assert optimal.are_many(variant.problem)
    assert variant.coarse[0].chain.layers == LAYERS
    equal = [shape for shape in variant.starts if len(set(map(len, shape.ranks))) == 1]
    assert {len(shape.ranks[0]) for shape in equal} >= {80}
