"""`schedule="auto"` beside every plan that there is, all judged by the simulator."""

import random
from collections.abc import Iterator
from itertools import combinations, product

import pytest

from partopt import solve
from partopt.cost.pricing import price
from partopt.cost.problem import CONTIGUOUS, NESTED, Assignment, Partition, Problem, consecutive
from partopt.documents.plan import Plan
from partopt.errors import PartoptError
from partopt.job import Job
from partopt.planners.placing import stage_multiple, stages_a_device
from partopt.schedules import SCHEDULES, refusal
from partopt.schedules.entry import Schedule
from partopt.schedules.placement import CHUNKS, STRAIGHT, ranks_of
from partopt.search.ranking import is_as_good, order_of
from partopt.search.variants import Within, variants_of
from partopt.simulator.execution import simulate_plan
from tests.helpers import flat, measurement, profile_of, two_level


def draw_job(seed: int, share: float | None) -> Job:
    """A job of 4 to 6 layers on up to 4 devices, with a share of the memory of it all."""
    draw = random.Random(seed)
    layers = range(draw.randint(4, 6))
    forward = [draw.uniform(0.5e-3, 3e-3) for _ in layers]
    outputs, weights, stash = (
        [round(draw.uniform(0.1, 1) * draw.choice(sizes)) for _ in layers]
        for sizes in ((10**4, 10**6, 5 * 10**6), (10**5, 10**7), (10**7,))
    )
    measured = [
        measurement(
            [size * speed * each for each in forward],
            [size * speed * each * 2 for each in forward],
            [size * each for each in outputs],
            size,
            stash_groups=[((layer,), size * each) for layer, each in enumerate(stash)],
        )
        for size, speed in ((1, 1.0), (2, draw.uniform(0.75, 1.0)))
    ]
    cluster = draw.choice([flat(3, 1e9), flat(4, 1e10, 1e-4), two_level(2, 2, 1e10, 1e9)])
    memory = None if share is None else round(share * (4 * sum(weights) + 2 * sum(stash)))
    profile = profile_of(measured, weights)
    return Job(profile, cluster, schedule="auto", global_batch=draw.choice([4, 8]), memory=memory)


def grids_of(p: int, entry: Schedule, v: int, problem: Problem) -> Iterator[tuple[str, list]]:
    """The families and ranks of the stages of pipelines of p devices."""
    P, M = problem.topology.devices, problem.microbatches
    for d in range(1, P // p + 1):
        if (M % d == 0 or (entry.uneven and d < M)) and not refusal(entry.name, p, v, M // d):
            ranks = ranks_of(entry.shape, p, v, d)
            straight = entry.shape == STRAIGHT
            yield CONTIGUOUS if straight else entry.shape, ranks
            nested = [[rank % d * p + rank // d for rank in own] for own in ranks]
            yield NESTED if straight else entry.shape, nested
    for counts in product(range(1, P + 1), repeat=p) if entry.uneven else ():
        if sum(counts) <= P and max(counts) <= M:
            yield CONTIGUOUS, [stage.ranks for stage in consecutive(range(p + 1), counts)]


def everything(problem: Problem) -> Iterator[tuple[Problem, Partition]]:
    """Every partition under every synchronous schedule."""
    N = problem.chain.layers
    for name, entry in SCHEDULES.items():
        sizes = range(1, problem.topology.devices + 1) if not entry.asynchronous else ()
        for p in sizes:
            chunks = [CHUNKS[entry.shape]] if entry.shape in CHUNKS else range(2, N // p + 1)
            for v in chunks:
                own = problem.with_(schedule=name, chunks=v)
                S = p * stages_a_device(own)
                if S > N or S % stage_multiple(own) or (p == 1 and entry.shape != STRAIGHT):
                    continue
                for family, ranks in grids_of(p, entry, v, own):
                    for inside in combinations(range(1, N), S - 1):
                        bounds = zip((0, *inside), (*inside, N), ranks, strict=True)
                        yield own, Partition(family, [Assignment(*each) for each in bounds])


def fastest(job: Job) -> float:
    """Samples/s of the best plan that fits; 0 where none does."""
    best = 0.0
    variants = variants_of(job, "1f1b", Within(alike=True))
    for problem in (variant.problem for variant in variants):
        for own, partition in everything(problem):
            plan: Plan = price(partition, own, "grid")
            try:
                plan = simulate_plan(plan)
            except PartoptError:
                continue
            best = max(best, plan.predicted.samples_per_s if plan.fits else 0.0)
    return best


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "share"), [(0, 0.6), (3, None), (4, 0.6), (7, None)])
def test_no_plan_is_more_than_a_percent_faster(seed, share):
    job = draw_job(seed, share)
    result = solve(job)
    best, found = fastest(job), min(result.plan, *result.alternatives, key=order_of)
    assert best > 0 and found.predicted.samples_per_s >= 0.99 * best
    assert is_as_good(result.plan, found)
