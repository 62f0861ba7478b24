"""Of plans that are as good as the fastest the simplest is first; what is shared is chosen."""

from __future__ import annotations

import random

import pytest

from partopt import solve, verify
from partopt.errors import PartoptError
from partopt.job import Job
from partopt.runtime.run import check_plan
from partopt.schedules import SCHEDULES, rank
from partopt.search.bound import lower_bound_s, proved_s
from partopt.search.ranking import SEARCHED, TIE, complexity, first_of, is_as_good, order_of, rate
from tests.helpers import chain_profile, two_level

SIMPLER = [
    {"schedule": "1f1b", "planner": "data_parallel"},
    {"schedule": "1f1b"},
    {"schedule": "gpipe"},
    {"shard": "none"},
]


def drawn(seed: int, schedule: str = "auto") -> Job:
    """Blocks on devices that hold a share of them, and an optimizer whose step takes long."""
    rng = random.Random(seed)
    scale = rng.choice([10**5, 10**7])
    weights = [scale * rng.randrange(1, 5) for _ in range(8)]
    kept = [10**7 * rng.randrange(1, 9) for _ in range(8)]
    profile = chain_profile(
        [1e-3 * rng.uniform(0.5, 2) for _ in range(8)],
        parameter_bytes=weights,
        output_bytes=[10**6] * 8,
        stash_groups=[((layer,), size) for layer, size in enumerate(kept)],
        optimizer_s=rng.choice([0.0, 1e-3, 1e-2]),
    )
    share = rng.choice([None, 0.3, 0.5, 0.8])
    limit = None if share is None else int(share * (4 * sum(weights) + 2 * sum(kept)))
    topology = two_level(2, 2, 1e10, rng.choice([1e9, 1e8]), memory_bytes=limit)
    M = None if schedule != "auto" and SCHEDULES[schedule].asynchronous else rng.choice([8, 48])
    return Job(profile, topology, schedule=schedule, microbatches=M)


@pytest.mark.parametrize("seed", [1, 3, 4, 6, 8])
def test_no_narrower_question_has_a_simpler_plan_that_is_as_good(seed):
    job = drawn(seed)
    found = solve(job)
    fastest = min([found.plan, *found.alternatives], key=order_of)
    assert is_as_good(found.plan, fastest)
    assert verify(found.document, job.profile).verified
    for part in SIMPLER:
        try:
            narrower = solve(job.with_(**part)).plan
        except PartoptError:  # it fits nowhere with that
            continue
        if is_as_good(narrower, fastest):
            assert complexity(found.plan)[:4] <= complexity(narrower)[:4], part
        assert rate(narrower) * (1 - TIE) <= rate(fastest) or not narrower.fits, part


@pytest.mark.parametrize("schedule", ["pipedream", "pipedream-2bw"])
@pytest.mark.parametrize("seed", range(4))
def test_replicas_that_share_in_an_asynchronous_plan_never_wait_for_ever(schedule, seed):
    """The simulator runs it with exchanges that block."""
    plan = solve(drawn(seed, schedule).with_(shard="optimizer")).plan
    assert len({stage.replicas for stage in plan.stages}) == 1
    check_plan(plan)


@pytest.mark.parametrize("seed", range(4))
def test_the_proof_holds_whatever_is_shared(seed):
    job = drawn(seed, "1f1b")
    found = solve(job)
    stated = job.problem.with_(any_shard=True)
    bounds = [lower_bound_s(job.with_(shard=shard).problem) for shard in ("none", "optimizer")]
    assert proved_s(stated) == min(bounds)
    proved = found.certificate
    if proved is None:
        assert not found.fits
        return
    assert "whatever replicas share" in proved.scope
    for shard in ("none", "optimizer"):
        other = solve(job.with_(shard=shard)).plan
        if other.fits and other.microbatch_size == found.plan.microbatch_size:
            assert other.predicted.iteration_s >= proved.lower_bound_s * (1 - 1e-9)


def test_data_parallelism_is_simplest_then_schedules_in_their_order():
    names = list(SCHEDULES)
    assert {rank(name, 1) for name in names} == {0}
    ranks = [rank(name, 2) for name in names]
    assert ranks == sorted(ranks) and min(ranks) > 0
    order = ["1f1b", "gpipe", "interleaved", "zb-h1", "interleaved-zb", "zbv", "dualpipe"]
    assert sorted(order, key=names.index) == order


def test_the_first_is_the_simplest_of_those_that_fit_and_are_as_good():
    results = [solve(drawn(seed)) for seed in range(3)]
    plans = [plan for result in results for plan in (result.plan, *result.alternatives)]
    first, fastest = first_of(plans), min(plans, key=order_of)
    good = [plan for plan in plans if plan.fits and rate(plan) >= (1 - TIE) * rate(fastest)]
    searched = [plan for plan in good if plan.planner in SEARCHED]
    assert complexity(first) == min(map(complexity, searched))
