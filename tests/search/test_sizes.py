"""Every measured microbatch size competes, and only those that cannot be faster are left out."""

import pytest
from click import unstyle

from partopt import solve
from partopt.errors import PartoptError
from partopt.job import Job
from partopt.search import rows
from partopt.search.compare import compare
from partopt.search.scaling import scale_plans
from partopt.search.variants import least_s
from tests.helpers import flat, measurement, profile_of

# seconds a sample of each layer on one device: 3, 2.5 and 2 ms
SIZES = profile_of(
    [
        measurement(
            [each * size] * 6, [2 * each * size] * 6, [10**6 * size] * 6, size, stash_groups=kept
        )
        for size, each in ((1, 1e-3), (2, 2.5e-3 / 3), (4, 2e-3 / 3))
        for kept in [[((layer,), 10**9 * size) for layer in range(6)]]
    ],
    [10**6] * 6,
)


@pytest.mark.slow
@pytest.mark.parametrize("memory", ["7 GB", "13 GB", "25 GB", "100 GB"])
@pytest.mark.parametrize("batch", [{}, {"schedule": "1f1b", "global_batch": 12}])
def test_the_best_size_is_taken(memory, batch):
    job = Job(SIZES, flat(4), memory=memory, **batch)
    fitting = []
    for size in job.sizes:
        plan = solve(job.with_(microbatch_size=size)).plan
        fitting += [plan.predicted.samples_per_s] if plan.fits else []
    plan = solve(job).plan
    assert plan.fits and plan.predicted.samples_per_s == max(fitting)


@pytest.mark.slow
def test_sizes_are_tried_the_most_promising_first_and_no_longer_than_they_may_win(monkeypatch):
    planned = []

    def of_variant(names, variant, *rest, made=rows.Contest):
        planned.append(variant.problem.chain.microbatch_size)
        return made(names, variant, *rest)

    monkeypatch.setattr(rows, "Contest", of_variant)
    result = solve(Job(SIZES, flat(4)))
    assert planned == [4]  # data parallelism computes all the time
    assert result.by_size == (result.plan,)
    planned.clear()
    result = solve(Job(SIZES, flat(4), memory="20 GB"))
    assert set(planned) == {4, 2}  # at which data parallelism fits
    assert [plan.fits for plan in result.by_size] == sorted(
        (plan.fits for plan in result.by_size), reverse=True
    )
    assert result.plan is result.by_size[0]


@pytest.mark.slow
def test_more_memory_is_never_slower():
    """Where the estimate of a size is too good to be true, another is tried."""
    rates = [
        solve(Job(SIZES, flat(4), memory=f"{size} GB")).plan.predicted.samples_per_s
        for size in range(5, 26)
    ]
    assert rates == sorted(rates)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("schedule", ["pipedream", "1f1b"])
def test_no_plan_is_faster_than_all_devices_computing_all_the_time(size, schedule):
    batch = {} if schedule == "pipedream" else {"microbatches": 8}
    job = Job(SIZES, flat(4), schedule=schedule, microbatch_size=size, **batch)
    assert solve(job).plan.predicted.samples_per_s * least_s(job.problem) <= 1


def test_sizes_that_the_batch_is_no_multiple_of_are_not_tried():
    job = Job(SIZES, flat(4), schedule="1f1b", global_batch=6)
    assert [each.microbatch_size for each in job.at_each_size()] == [1, 2]
    assert solve(job).plan.microbatch_size in (1, 2)


@pytest.mark.slow
def test_comparisons_and_scaling_take_the_best_size_too():
    job = Job(SIZES, flat(4), memory="13 GB")
    best = solve(job).plan
    assert compare(job)[0].microbatch_size == best.microbatch_size
    assert scale_plans(job, [4])[0].predicted.samples_per_s == best.predicted.samples_per_s


def test_where_all_sizes_are_refused_each_reason_is_given_once():
    with pytest.raises(PartoptError, match="no plan fits") as raised:
        solve(Job(SIZES, flat(2), planner="optimal", memory=1))
    assert len(raised.value.parts) == 1


@pytest.mark.slow
def test_progress_says_which_size():
    told = []
    solve(Job(SIZES, flat(4), memory="20 GB"), lambda what, done, total: told.append(what))
    sizes = {what.split(":")[0] for what in told if "estimating grids" not in what}
    assert sizes == {f"microbatch {size}" for size in (2, 4)}  # 1 is not searched


def test_the_page_has_a_line_of_them(partopt, profile_file, topology_file):
    options = ["plan", profile_file(SIZES), "--topology", topology_file(), "--memory", "20 GB"]
    out = unstyle(partopt(*options).out)
    assert "tried" in out and "microbatch 2: " in out and "microbatch 4: " in out
    assert "tried" not in unstyle(partopt(*options, "--microbatch-size", 2).out)
