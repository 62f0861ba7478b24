"""What searches find, and how much they look at: what it was is what it is.

`tests/golden/searches.jsonl` holds, a line a case, the plans that were found when it was written
and how often each step of the work was told of. Whoever changes a search on purpose runs `pytest
tests/search/test_recorded.py --update`, looks whether plans are slower, and says why.
"""

from __future__ import annotations

import json
import math
from collections import Counter

import numpy as np
import pytest

import partopt as po
from partopt.documents.plan import Plan
from partopt.documents.profile import Profile
from partopt.search.variants import ANY, least_s, variants_of
from tests.golden.records import differences
from tests.helpers import ROOT, flat, measurement, profile_of, two_level

pytestmark = pytest.mark.slow

FOUND = ROOT / "tests/golden/searches.jsonl"


def model(layers: int, seed: int, sizes: tuple[int, ...] = (1,), tied: bool = False) -> Profile:
    """Activations that decay and weights that grow along the layers, as in most of vision."""
    draw, position = np.random.default_rng(seed), np.arange(layers) / layers
    forward = draw.lognormal(0, 0.5, layers) * 1e-3
    outputs = (1e7 * np.exp(-3 * position) * draw.lognormal(0, 0.3, layers)).astype(int)
    weights = (2e6 * np.exp(3 * position) * draw.lognormal(0, 0.5, layers)).astype(int)
    measured = [
        measurement(
            (forward * b**0.8).tolist(),
            (2 * forward * b**0.8).tolist(),
            (b * outputs).tolist(),
            b,
            optimizer_s=2e-3,
            stash_groups=[((n,), int(3 * b * size)) for n, size in enumerate(outputs)],
        )
        for b in sizes
    ]
    shared = [("tied", [0, layers - 1], int(min(weights[0], weights[-1])))] if tied else []
    return profile_of(measured, weights.tolist(), shared=shared)


SERVERS = two_level(4, 2, 12e9, 1.25e9, memory_bytes=10**9)
SYNCHRONOUS = {"schedule": "1f1b", "microbatches": 16}
CASES = {
    "asynchronous": (model(24, 1), SERVERS, {}),
    "buffered twice": (model(10, 2), flat(4, 2e9), {"schedule": "pipedream-2bw"}),
    "1f1b": (model(14, 3), SERVERS, SYNCHRONOUS),
    "one is idle": (model(16, 4), flat(5, 3e9), SYNCHRONOUS),
    "of little memory": (model(16, 5), SERVERS, SYNCHRONOUS | {"memory": "90 MB"}),
    "some recompute": (
        model(16, 6),
        flat(4, 3e9, memory_bytes=10**8),
        SYNCHRONOUS | {"recompute": "auto"},
    ),
    "of shares": (model(16, 7), SERVERS, SYNCHRONOUS | {"shard": "gradients"}),
    "tied": (model(12, 8, tied=True), flat(4, 3e9), SYNCHRONOUS | {"tied": "together"}),
    "alike": (model(20, 9), SERVERS, SYNCHRONOUS | {"replication": "uniform"}),
    "no replicas": (model(20, 9), flat(6, 1e9), SYNCHRONOUS | {"replication": "none"}),
    "gpipe": (model(12, 10), flat(4, 2e9), {"schedule": "gpipe", "microbatches": 12}),
    "split": (model(14, 11), flat(4, 2e9), {"schedule": "zb-h1", "microbatches": 8}),
    "interleaved": (model(24, 12), SERVERS, {"schedule": "interleaved", "microbatches": 16}),
    "vee": (model(20, 13), flat(4, 3e9), {"schedule": "zbv", "microbatches": 8}),
    "every schedule": (model(10, 14), flat(3, 3e9), {"schedule": "auto", "microbatches": 6}),
    "every size": (
        model(14, 15, (1, 2, 4)),
        SERVERS,
        {"schedule": "1f1b", "global_batch": 32, "memory": "200 MB"},
    ),
    "longer": (model(16, 16), flat(4, 2e9), SYNCHRONOUS | {"effort": "normal"}),
    "many devices": (model(16, 17), two_level(8, 4, 50e9, 5e9), SYNCHRONOUS),
}


def short(plan: Plan) -> dict[str, object]:
    """Where a plan is cut, on which ranks, and what it takes."""
    return {
        "planner": plan.planner,
        "schedule": plan.schedule,
        "microbatch_size": plan.microbatch_size,
        "starts": [stage.start for stage in plan.stages],
        "ranks": [[stage.ranks[0], stage.ranks[-1], len(stage.ranks)] for stage in plan.stages],
        "warmups": [stage.warmup for stage in plan.stages],
        "recompute": [stage.recompute for stage in plan.stages],
        "period_s": plan.predicted.period_s,
        "memory_bytes": plan.peak_memory_bytes,
        "lower_bound_s": plan.certificate.lower_bound_s if plan.certificate else None,
    }


def search(name: str) -> dict[str, object]:
    """All that a search finds, and how often it tells of its steps."""
    profile, topology, options = CASES[name]
    told: Counter[str] = Counter()
    job = po.Job(profile, topology, **{"effort": "quick"} | options)
    result = po.solve(job, lambda what, done, total: told.update([what]))
    plans = [result.plan, *result.alternatives, *result.by_size]
    return {
        "plans": [short(plan) for plan in plans],
        "notes": [note.code for note in result.notes],
        "told": dict(told),
    }


# options of jobs whose pipelines side by side are estimated, each under several schedules
ESTIMATED = {
    "plain": (model(14, 21), SERVERS, {}),
    "of little memory": (model(14, 22), SERVERS, {"memory": "70 MB", "recompute": "auto"}),
    "of shares": (model(10, 23), SERVERS, {"shard": "parameters"}),
    "small": (model(8, 24), flat(4, 1e9), {"memory": "60 MB", "stages": 4}),
    "of waits": (
        model(8, 25, tied=True),
        two_level(2, 2, 1e9, 1e8, outer_latency=1e-3),
        {"facts": {"waits": "1f1b,gpipe,interleaved", "allreduce": "blocking"}},
    ),
    "without replicas": (model(8, 26), flat(6, 1e9), {"replication": "none"}),
    "of a layout": (model(12, 27), SERVERS, {"layout": po.Layout(dp=2)}),
    "every size": (model(8, 28, (1, 2)), flat(4, 1e9), {"memory": "90 MB", "recompute": "auto"}),
}
SCHEDULES = ("1f1b", "gpipe", "interleaved", "zbv", "dualpipe")


def finite(value: float) -> float | str:
    return value if math.isfinite(value) else "infinite"


def estimates(name: str) -> dict[str, object]:
    """What is estimated of every variant and of its grids under each schedule."""
    profile, topology, options = ESTIMATED[name]
    found: dict[str, object] = {}
    for schedule in SCHEDULES:
        job = po.Job(profile, topology, schedule="1f1b", global_batch=16, **options)
        rows = []
        for variant in variants_of(job, schedule, ANY):
            row = [variant.estimate_s, variant.least_bytes, least_s(variant.problem)]
            flags = [variant.is_limited, variant.is_roomy]
            grids = [
                [own.grid.p, own.grid.d, own.grid.v, own.grid.family, list(own.bounds)]
                + [finite(each) for each in (own.estimate_s, own.limited_s)]
                + [[float(each) for each in own.needs_bytes], own.held]
                for own in variant.grids[:8]
            ]
            rows.append([*map(finite, row), *flags, len(variant.grids), grids])
        found[schedule] = rows
    return found


@pytest.fixture(scope="module")
def recorded(request):
    """The lines by their cases; written where they are updated."""
    if request.config.getoption("--update"):
        found = [{"name": name, "search": search(name)} for name in CASES]
        found += [{"name": name, "estimates": estimates(name)} for name in ESTIMATED]
        FOUND.write_text("".join(json.dumps(line) + "\n" for line in found))
    lines = map(json.loads, FOUND.read_text().splitlines())
    return {(line.pop("name"), *line): next(iter(line.values())) for line in lines}


@pytest.mark.full_effort
@pytest.mark.parametrize("name", CASES)
def test_a_search_finds_what_it_found(name, recorded):
    assert differences(search(name), recorded[name, "search"]) == {}


@pytest.mark.parametrize("name", ESTIMATED)
def test_estimates_are_what_they_were(name, recorded):
    assert differences(estimates(name), recorded[name, "estimates"]) == {}
