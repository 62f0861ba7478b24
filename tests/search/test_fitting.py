"""What is freed where nothing fits: in which order, and that the first that fits is the answer."""

import pytest

from partopt import solve
from partopt.cost.memory import STATE_BYTES
from partopt.documents.engine import Layout
from partopt.job import Job
from partopt.search import fitting
from partopt.search.fitting import find_fitting, list_tried
from partopt.search.rows import may_fit
from tests.helpers import chain_profile, flat, uniform_profile


def jobs_tried(job, **patches):
    """The jobs that are tried, in order, where none fits."""
    tried = []

    def ask(changed, *_, **__):
        tried.append(changed)
        return solve(job)

    with pytest.MonkeyPatch.context() as patched:
        for name, value in {"solve": ask, "solve_profile": ask, **patches}.items():
            patched.setattr(fitting, name, value)
        assert find_fitting(job) is None
    return tried


def job_of(devices=4, **options):
    return Job(uniform_profile(6), flat(devices), **{"memory": "1 MB", "effort": "quick"} | options)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", STATE_BYTES)
@pytest.mark.parametrize("devices", [1, 4])
def test_what_replicas_share_and_then_the_optimizer_take_ever_less(devices, optimizer):
    tried = jobs_tried(job_of(devices, optimizer=optimizer), may_fit=bool)
    shards = [own.shard for own in tried if own.optimizer == optimizer]
    assert shards == (["optimizer", "gradients", "parameters"] if devices > 1 else [])
    states = [STATE_BYTES[own.optimizer] for own in tried if own.optimizer != optimizer]
    assert states == sorted(states, reverse=True)
    assert len(states) == sum(size < STATE_BYTES[optimizer] for size in STATE_BYTES.values())
    assert {own.shard for own in tried[len(shards) :]} <= {shards[-1] if shards else None}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "freed"),
    [
        ({}, []),
        ({"recompute": "always"}, [{"recompute"}]),
        ({"planner": "gpipe"}, [{"recompute"}, {"planner"}]),
        ({"stages": 2, "microbatch_size": 1}, [{"microbatch_size"}, {"microbatch_size", "stages"}]),
        ({"cuts": [3], "planner": "manual"}, [{"recompute"}]),
    ],
)
def test_as_few_parts_as_will_do_are_freed(options, freed):
    """Before what replicas share: a planner that is named does not choose whether to recompute."""
    job = job_of(schedule="1f1b", microbatches=8, **options)
    given = [
        {name for name in ("recompute", *options) if getattr(own, name) != getattr(job, name)}
        for own in jobs_tried(job, may_fit=bool)
        if own.shard == job.shard
        and own.optimizer == job.optimizer
        and own.schedule == job.schedule
    ]
    assert given == freed
    assert ("`schedule=auto`" in list_tried(job)) == ("planner" not in options)


def test_a_layout_is_freed_with_the_numbers_of_replicas():
    job = job_of(schedule="1f1b", microbatches=8, layout=Layout(pp=2), replication="uniform")
    freed = [
        (own.layout == Layout(), own.replication == "free") for own in jobs_tried(job, may_fit=bool)
    ]
    assert freed == sorted(freed)
    assert (freed[0][0], freed[-1]) == (False, (True, True))
    assert "`layout`" in list_tried(job)


@pytest.mark.slow
def test_what_cannot_fit_is_not_searched():
    assert jobs_tried(job_of(schedule="auto", microbatches=8, recompute="never")) == []


def test_what_a_named_planner_may_fit_is_asked():
    """It is not counted in advance what it may fit."""
    assert {own.planner_name for own in jobs_tried(job_of(planner="gpipe"))} == {"gpipe"}


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1", "interleaved", "pipedream"])
def test_what_fits_may_fit(schedule):
    """Layers of 1 to 8 MB of parameters and as much of activations, with ever less memory."""
    sizes = [(k % 8 + 1) * 10**6 for k in range(6)]
    kept = [((k,), size) for k, size in enumerate(sizes)]
    profile = chain_profile([1e-3] * 6, parameter_bytes=sizes, stash_groups=kept)
    batch = {} if schedule == "pipedream" else {"microbatches": 4}
    fits = []
    for memory in ("90 MB", "70 MB", "50 MB", "40 MB", "10 MB"):
        job = Job(profile, flat(3), schedule=schedule, memory=memory, effort="quick", **batch)
        fits.append(solve(job).plan.fits)
        assert may_fit(job) >= fits[-1]
    assert fits[0] and not fits[-1]
    assert not may_fit(job)


def test_the_answer_is_the_first_that_fits_by_the_options_that_it_changes():
    """Stages of 1 GB of parameters, as much of gradients, and of state 4, 2 or 0 bytes for each."""
    heavy = chain_profile([1e-3] * 2, parameter_bytes=[10**9] * 2)
    for memory, optimizer in (
        ("3.1 GB", "momentum"),
        ("2.9 GB", "adam8bit"),
        ("2 GB", "adafactor"),
    ):
        job = Job(heavy, flat(2), memory=memory, cuts=[1], effort="quick")
        found = find_fitting(job)
        assert found.options == {"shard": "parameters", "optimizer": optimizer}
        plan = solve(job.with_(**found.options)).plan
        assert plan.fits and found.samples_per_s == plan.predicted.samples_per_s
