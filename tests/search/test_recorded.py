"""What searches find, and how much they look at: what it was is what it is.

`tests/golden/searches.jsonl` holds, a line a case, the plans that were found when it was written,
how many were simulated on the way and their seconds together, and how often each step of the work
was told of. Whoever changes a search on purpose runs `pytest
tests/search/test_recorded.py --update`, looks whether plans are slower, and says why.
"""

from __future__ import annotations

import math
from collections import Counter

import pytest

import partopt as po
from partopt.documents.plan import Plan
from partopt.search import warmup
from partopt.search.simulations import Simulations
from partopt.search.variants import ANY, least_s, variants_of
from tests.golden.jobs import SERVERS, SYNCHRONOUS, model, slow_messages
from tests.golden.records import record_test
from tests.helpers import ROOT, flat, two_level

pytestmark = pytest.mark.slow


CASES = {
    "asynchronous": (model(24, 1), SERVERS, {}),
    "buffered twice": (model(10, 2), flat(4, 2e9), {"schedule": "pipedream-2bw"}),
    "1f1b": (model(14, 3), SERVERS, SYNCHRONOUS),
    "one is idle": (model(16, 4), flat(5, 3e9), SYNCHRONOUS),
    "of too little memory": (model(16, 5), SERVERS, SYNCHRONOUS | {"memory": "90 MB"}),
    "of little memory": (
        model(16, 5),
        SERVERS,
        SYNCHRONOUS | {"memory": "290 MB", "recompute": "never"},
    ),
    "some recompute": (model(16, 5), SERVERS, SYNCHRONOUS | {"memory": "200 MB"}),
    "asynchronous, of little memory": (model(14, 5), SERVERS, {"memory": "290 MB"}),
    "on slow links": (
        model(16, 18),
        slow_messages(two_level(2, 3, 2e9, 4e8, outer_latency=1e-4, inner_bus=True)),
        SYNCHRONOUS | {"facts": {"waits": "1f1b"}},
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
    """All that a search finds, what it simulates, and how often it tells of its steps."""
    profile, topology, options = CASES[name]
    told: Counter[str] = Counter()
    job = po.Job(profile, topology, **{"effort": "quick"} | options)
    with pytest.MonkeyPatch.context() as patched:
        simulated = [
            seconds_of(patched, owner, method)
            for owner, method in [(Simulations, "seconds"), (warmup, "try_warmup")]
        ]
        result = po.solve(job, lambda what, done, total: told.update([what]))
    plans = [result.plan, *result.alternatives, *result.by_size]
    return {
        "plans": [short(plan) for plan in plans],
        "notes": [note.code for note in result.notes],
        "told": dict(told),
        "simulated": [
            [len(each), sum(own for own in each if own < math.inf)] for each in simulated
        ],
    }


def seconds_of(patched: pytest.MonkeyPatch, owner: object, method: str) -> list[float]:
    """The seconds of a microbatch of every plan that a method simulates from now on."""
    simulate, seconds = getattr(owner, method), list[float]()

    def listed(*arguments: object) -> object:
        found = simulate(*arguments)
        own = math.inf if found is None else getattr(found, "period_s", found)
        seconds.append(own)
        return found

    patched.setattr(owner, method, listed)
    return seconds


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


def found_of(case: str) -> object:
    kind, name = case.split(": ")
    return search(name) if kind == "search" else estimates(name)


NAMES = [*(f"search: {name}" for name in CASES), *(f"estimates: {name}" for name in ESTIMATED)]


test_what_is_found_is_what_was_found = pytest.mark.full_effort(
    record_test(ROOT / "tests/golden/searches.jsonl", NAMES, found_of)
)
