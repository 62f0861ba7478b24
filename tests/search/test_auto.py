"""The schedule search beside the simulation of everything that it could have chosen."""

import functools

import pytest

from partopt import Profile, Topology, planners, solve
from partopt.cost.problem import ignore_progress, problem_of
from partopt.documents.engine import Engine
from partopt.documents.plan import Plan
from partopt.errors import PartoptError
from partopt.job import Job
from partopt.schedules import SCHEDULES
from partopt.search.contest import Contest
from partopt.search.effort import SearchParams
from partopt.search.rows import Search, search_rows
from partopt.search.simulations import Simulations
from partopt.search.variants import ANY, Within, variants_of
from partopt.simulator.execution import execute, simulate_plan
from tests.helpers import flat, measurement, profile_of, two_level, uniform_profile
from tests.search.problems import at_each_size, best_by_schedule, slow, spending
from tests.search.test_recorded import seconds_of

pytestmark = pytest.mark.any_effort

BOTH = ["never", "always"]


def per_sample_s(plan: Plan) -> float:
    return 1 / plan.predicted.samples_per_s


def best_of_each(plans: list[Plan], memory_bytes: int | None = None) -> dict[str, float]:
    """Seconds a sample of the fastest plan under each schedule, of those that fit."""
    fitting = [
        plan for plan in plans if memory_bytes is None or plan.peak_memory_bytes <= memory_bytes
    ]
    return {
        name: min(per_sample_s(plan) for plan in fitting if plan.schedule == name)
        for name in {plan.schedule for plan in fitting}
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layers", "cluster"),
    [(5, flat(4, 1e9)), (24, flat(4, 1e9)), (9, two_level(2, 3, 1e9, 1e8))],
    ids=["flat", "deep", "servers"],
)
def test_never_slower_than_a_grid_of_ones_own(layers, cluster):
    """Also where a device holds so many stages that there are more of them than devices."""
    problem = problem_of(uniform_profile(layers), cluster, schedule="1f1b", microbatches=16)
    best = best_of_each(best_by_schedule([problem]))
    for name in best:
        for planner in ("gpipe", "data_parallel"):
            try:
                own = simulate_plan(planners.plan(planner, problem.with_(schedule=name)))
            except PartoptError:
                continue
            if planner == "gpipe" and not own.idle_ranks:
                assert best[name] <= per_sample_s(own) * (1 + 1e-9)
            assert min(best.values()) <= per_sample_s(own) * (1 + 1e-9)


@pytest.mark.slow
def test_a_batch_that_does_not_divide_among_all_devices_may_be_data_parallel():
    problem = problem_of(uniform_profile(4), flat(4, 1e12), schedule="1f1b", microbatches=15)
    plan = next(plan for plan in best_by_schedule([problem]) if plan.schedule == "1f1b")
    assert plan.shape == "4"
    # 4 microbatches on the fullest of them
    assert plan.predicted.iteration_s == pytest.approx(4 * 4 * 3e-3, rel=1e-3)


class TestWhatIsReturned:
    PROBLEM = problem_of(
        uniform_profile(12), two_level(2, 2, 1e10, 1e9), schedule="1f1b", microbatches=16
    )

    @staticmethod
    @functools.cache
    def plans(**changed: object) -> list[Plan]:
        problem = TestWhatIsReturned.PROBLEM.with_(**changed)
        return best_by_schedule([problem.with_(recompute=recompute) for recompute in BOTH])

    @pytest.mark.slow
    def test_one_of_each_schedule_fastest_first(self):
        plans = self.plans()
        assert [plan.schedule for plan in plans] == list(
            dict.fromkeys(plan.schedule for plan in plans)
        )
        assert {plan.schedule for plan in plans} == {
            name for name, entry in SCHEDULES.items() if not entry.asynchronous
        }
        assert [per_sample_s(plan) for plan in plans] == sorted(
            per_sample_s(plan) for plan in plans
        )

    @pytest.mark.slow
    def test_what_a_plan_predicts_is_its_simulation(self):
        for plan in self.plans():
            simulation = execute(plan)
            assert plan.predicted.iteration_s == pytest.approx(simulation.makespan_s)
            assert plan.peak_memory_bytes >= simulation.peak_memory_bytes.max()

    @pytest.mark.slow
    def test_what_does_not_fit_comes_last(self):
        peaks = sorted(plan.peak_memory_bytes for plan in self.plans())
        limit = peaks[len(peaks) // 2] // 2
        plans = self.plans(memory_bytes=limit)
        assert [plan.fits for plan in plans] == sorted((plan.fits for plan in plans), reverse=True)
        assert {plan.fits for plan in plans} == {True, False}

    @pytest.mark.slow
    def test_where_nothing_fits_there_are_plans_all_the_same(self):
        plans = self.plans(memory_bytes=1)
        assert plans and not any(plan.fits for plan in plans)

    @pytest.mark.slow
    def test_pipelines_may_lie_inside_servers(self):
        """Messages are large and gradients none: pipelines keep to servers, replicas lie across."""
        profile = profile_of(
            [
                measurement(
                    [1e-3] * 2, [2e-3] * 2, [10**7] * 2, stash_groups=[((0,), 10**9), ((1,), 10**9)]
                )
            ]
        )
        problem = problem_of(
            profile,
            two_level(2, 2, 1e11, 1e8),
            schedule="1f1b",
            microbatches=16,
            memory_bytes=5 * 10**9,
            stages=2,
        )
        plan = next(plan for plan in best_by_schedule([problem]) if plan.schedule == "zb-h1")
        assert (plan.family, [list(stage.ranks) for stage in plan.stages]) == (
            "nested",
            [[0, 2], [1, 3]],
        )

    @pytest.mark.slow
    def test_chunks_may_lie_inside_servers_too(self):
        profile = profile_of([measurement([1e-3] * 4, [2e-3] * 4, [10**7] * 4)])
        problem = problem_of(profile, two_level(2, 2, 1e11, 1e8), schedule="1f1b", microbatches=16)
        plan = next(plan for plan in best_by_schedule([problem]) if plan.schedule == "zbv")
        assert [list(stage.ranks) for stage in plan.stages] == [[0, 2], [1, 3], [1, 3], [0, 2]]


def test_a_size_that_the_batch_does_not_divide_by_is_left_out():
    sizes = [measurement([1e-3] * 4, microbatch_size=size) for size in (1, 2)]
    job = Job(profile_of(sizes), flat(2), schedule="auto", global_batch=7)
    stated = variants_of(job, "1f1b", ANY)
    assert {each.problem.chain.microbatch_size for each in stated} == {1}
    with pytest.raises(PartoptError, match="not a multiple of the microbatch size 2"):
        solve(job.with_(microbatch_size=2))


def test_where_nothing_fits_one_device_there_is_a_plan_that_says_so():
    problem = problem_of(
        uniform_profile(2), flat(1), schedule="1f1b", microbatches=3, memory_bytes=1
    )
    plans = best_by_schedule([problem])
    assert plans and not any(plan.fits for plan in plans)


@pytest.mark.slow
def test_more_devices_than_microbatches_may_stay_idle():
    problem = problem_of(uniform_profile(2), flat(67), schedule="1f1b", microbatches=3)
    assert best_by_schedule([problem])[0].fits


@pytest.mark.slow
def test_all_schedules_together_are_no_slower_than_each_alone():
    """Engines of `1f1b` wait for slow messages and those of the others do not."""
    stated = slow(8, two_level(2, 2, 12e9, 1.25e9))
    facts = {"waits": "1f1b"}
    job = Job(stated.profile, stated.topology, schedule="auto", global_batch=8, facts=facts)
    together = solve(job)
    alone = {
        name: solve(job.with_(schedule=name)).plan.predicted.samples_per_s
        for name in ("1f1b", "1f1b-eager", "gpipe", "zb-h1")
    }
    assert together.plan.predicted.samples_per_s >= max(alone.values()) * (1 - 1e-9)
    assert alone["1f1b-eager"] > 1.01 * alone["1f1b"]
    assert {plan.schedule: plan.waits for plan in together.alternatives}["1f1b"]
    assert not together.plan.waits


@pytest.mark.slow
def test_schedules_begin_with_the_stages_of_one_another():
    """`1f1b-eager` may have the warm-up of `1f1b`; alone it finds slower stages of this model."""
    gnmt = Profile.load("gnmt.v100-published.float32")
    cluster = Topology.load("v100-pcie")
    job = Job(gnmt, cluster, schedule="auto", global_batch=1024, effort="quick")
    found = {row.best.schedule: row.best for row in search_rows(job, ANY, ignore_progress)}
    [alone] = search_rows(job.with_(schedule="1f1b-eager"), ANY, ignore_progress)
    eager_s, least_s = per_sample_s(found["1f1b-eager"]), per_sample_s(found["1f1b"])
    assert eager_s <= least_s < per_sample_s(alone.best)


@pytest.mark.slow
def test_any_replicas_are_better_than_a_grid_where_layers_differ():
    """One layer takes as long as the other three; two stages with equal replicas, or one stage,
    exchange or wait for more.
    """
    profile = profile_of(
        [measurement([9e-3, 1e-3, 1e-3, 1e-3], [18e-3, 2e-3, 2e-3, 2e-3], [10**3] * 4)],
        [10**6, 10**6, 10**6, 4 * 10**8],
    )
    stated = at_each_size(
        lambda b, again: problem_of(profile, flat(4, 1e9), b, recompute=again), 12, [1], ["never"]
    )
    plans = best_by_schedule(stated)
    assert [plan.predicted.samples_per_s for plan in plans] == sorted(
        (plan.predicted.samples_per_s for plan in plans), reverse=True
    )
    assert (plans[0].shape, plans[0].planner) == ("3-1", "optimal")


def variants(within, **options):
    given = {"schedule": "1f1b", "microbatches": 8} | options
    return [
        own.problem
        for own in variants_of(Job(uniform_profile(8), flat(4), **given), "1f1b", within)
    ]


@pytest.mark.parametrize(
    ("equal", "asked", "replication"),
    [(False, "free", "free"), (True, "free", "uniform"), (True, "none", "none")],
)
def test_replicas_are_as_a_trainer_and_the_job_have_them(equal, asked, replication):
    [own] = variants(Within(equal=equal, least_stages=3), replication=asked)
    assert (own.request.replication, own.least_stages) == (replication, 3)


@pytest.mark.parametrize(
    ("within", "options", "ways"),
    [
        (ANY, {}, ["never"]),
        (ANY, {"memory": "1 TB"}, ["never"]),  # of which there is enough
        (ANY, {"memory": "20 MB"}, ["auto"]),
        (Within(alike=True), {"memory": "20 MB"}, ["never", "always"]),
        (Within(alike=True), {"memory": "20 MB", "recompute": "auto"}, ["never", "always"]),
        (Within(alike=True), {"memory": "20 MB", "recompute": "always"}, ["always"]),
        (ANY, {"memory": "20 MB", "recompute": "never"}, ["never"]),
        (ANY, {"memory": "20 MB", "engine": Engine(recompute=("none",))}, ["never"]),
    ],
)
def test_recomputation_and_shares_are_tried_where_memory_is_short(within, options, ways):
    short = options.get("memory") == "20 MB" and "engine" not in options
    shares = ["none", *["optimizer"] * short]
    found = [(own.shard, own.request.recompute) for own in variants(within, **options)]
    assert found == [(shard, way) for shard in shares for way in ways]


def test_shares_that_are_stated_are_tried_where_nothing_is_estimated_to_fit():
    [own] = variants(ANY, memory="1 MB", shard="optimizer", recompute="never")
    assert own.shard == "optimizer"


def search_of(profile, cluster, **options):
    job = Job(profile, cluster, schedule="1f1b", microbatches=8, **options)
    return Search(variants_of(job, "1f1b", ANY))


@pytest.mark.slow
def test_a_search_goes_on_from_one_effort_to_the_next(monkeypatch):
    """Every stage is searched once, in its turn, however many are asked for at a time."""
    held, hold = [], Contest.plans_at
    quick, normal, thorough = SearchParams.at("thorough").stages
    monkeypatch.setattr(
        Contest,
        "plans_at",
        lambda own, *asked: held.append(asked[0]) or hold(own, quick, *asked[1:]),
    )
    search = search_of(uniform_profile(6), flat(4))
    begun = []
    for params in (quick, quick, normal, quick, thorough, thorough):
        search.best_row(params)
        begun.append(list(held))
    every = [quick, normal, thorough]
    assert begun == [every[:1], every[:1], every[:2], every[:2], every, every]
    held.clear()
    search_of(uniform_profile(6), flat(4)).best_row(thorough)
    assert held == every


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_stages_one_by_one_find_what_all_at_once_do(schedule, monkeypatch):
    """At the same steps: of plans with any replicas, and of equal pipelines."""
    thorough = spending(20.0, 60.0, 120.0)
    job = Job(slow(9, flat(4, 2e9)).profile, flat(4, 2e9), schedule=schedule, microbatches=8)
    steps, found = [], []
    for efforts in ([thorough], thorough.stages):
        search, count = Search(variants_of(job, schedule, ANY)), []
        with monkeypatch.context() as patched:
            count = seconds_of(patched, Simulations, "seconds")
            found.append([search.best_row(params).best for params in efforts][-1])
        steps.append(len(count))
    assert found[0] == found[1]
    assert steps[0] == steps[1]


def test_a_row_has_each_plan_once():
    row = search_of(uniform_profile(6), flat(4)).best_row(SearchParams.at("quick"))
    others = [plan for plan in row.plans.values() if plan is not row.best]
    assert [id(plan) for plan in row.every] == [id(plan) for plan in (row.best, *others)]
