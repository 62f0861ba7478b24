"""The schedule search beside the simulation of everything that it could have chosen."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from partopt.search.candidates import candidates
from partopt.search.grid import stages_between
from partopt.search.schedule import best_by_schedule, replan, state_problems

from partopt import planners
from partopt.cost.problem import problem_of
from partopt.documents.plan import Plan
from partopt.errors import ANSWER_IS_NO, PartoptError
from partopt.job import Job
from partopt.schedules import SCHEDULES
from partopt.search import schedule as search
from partopt.search.solve import solve
from partopt.simulator.execution import execute
from partopt.simulator.prediction import simulate_plan
from tests.examples import examples
from tests.helpers import flat, measurement, profile_of, two_level, uniform_profile
from tests.search.problems import at_each_size, judged_candidate, problems, slow

BOTH = [False, True]


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


def same(found: dict[str, float], expected: dict[str, float]) -> bool:
    return found.keys() == expected.keys() and all(
        found[name] == pytest.approx(expected[name], rel=1e-8) for name in found
    )


@examples(3, derandomize=True)
@given(problems())
def test_pruning_loses_nothing_and_no_execution_goes_below_the_bound(stated):
    everything = list(candidates(stated))
    plans = [judged_candidate(candidate) for candidate in everything]
    for candidate, plan in zip(everything, plans, strict=True):
        assert candidate.least_s <= per_sample_s(plan) * (1 + 1e-9), (plan.schedule, plan.shape)
    if plans:
        assert same(best_of_each(best_by_schedule(stated)), best_of_each(plans))


@examples(25)
@given(problems(10), st.randoms(use_true_random=False))
def test_no_iteration_is_shorter_than_its_bound_wherever_it_is_cut(stated, draw):
    """Of every schedule, with cuts at random, on grids with any number of pipelines and chunks."""
    everything = list(candidates(stated))
    for candidate in draw.sample(everything, min(20, len(everything))):
        N, S = candidate.problem.chain.layers, len(candidate.grid.ranks)
        bounds = [0, *sorted(draw.sample(range(1, N), S - 1)), N]
        cut = replace(candidate, stages=stages_between(bounds, candidate.problem))
        for each in (candidate, cut):
            least_s, judged_s = each.least_s, per_sample_s(judged_candidate(each))
            assert least_s <= judged_s * (1 + 1e-9), (each.problem.schedule, bounds)
            assert each.floor_s <= least_s * (1 + 1e-9)


@examples(4, derandomize=True)
@given(problems(8))
def test_of_what_fits_nothing_is_lost_either(stated):
    plans = [judged_candidate(candidate) for candidate in candidates(stated)]
    for limit in (
        np.quantile([plan.peak_memory_bytes for plan in plans], [0.1, 0.5]) if plans else []
    ):
        found = best_by_schedule([replace(each, memory_bytes=int(limit)) for each in stated])
        assert same(best_of_each(found, int(limit)), best_of_each(plans, int(limit)))


def test_without_messages_the_bound_of_whole_backwards_is_what_they_take():
    """Equal stages: 1F1B and GPipe take (M + P - 1)(F + B), and the last device waits for nothing
    else.
    """
    problem = problem_of(uniform_profile(8), flat(4, 1e30), schedule="1f1b", microbatches=16)
    for candidate in candidates([problem]):
        balanced = len(set(np.diff(candidate.stages.bounds))) == 1
        if candidate.problem.schedule in ("1f1b", "gpipe") and balanced:
            assert candidate.least_s == pytest.approx(per_sample_s(judged_candidate(candidate)))
            assert candidate.estimate_s == pytest.approx(candidate.least_s)


def test_the_estimates_are_in_the_order_of_the_simulations():
    """Spearman's rank correlation on a cluster with slow links between servers."""
    profile = profile_of(
        [
            measurement([1e-3] * 16, [2e-3] * 16, [4 * 10**6] * 16),
            measurement([1.7e-3] * 16, [3.4e-3] * 16, [8 * 10**6] * 16, 2),
        ],
        [10**7] * 16,
    )
    stated = at_each_size(
        lambda b, again: problem_of(profile, two_level(4, 4, 50e9, 5e9), b, recompute=again), 64
    )
    everything = list(candidates(stated))
    ranks = [
        np.argsort(np.argsort(seconds))
        for seconds in (
            [c.estimate_s for c in everything],
            [per_sample_s(judged_candidate(c)) for c in everything],
        )
    ]
    assert len(everything) > 100
    assert np.corrcoef(*ranks)[0, 1] > 0.9


@pytest.mark.parametrize("layers", [5, 9, 24])
@pytest.mark.parametrize(
    "cluster", [flat(4, 1e9), two_level(2, 4, 1e9, 1e8)], ids=["flat", "servers"]
)
def test_never_slower_than_a_grid_of_ones_own(layers, cluster):
    """Also where a device holds so many stages that there are more of them than devices."""
    problem = problem_of(uniform_profile(layers), cluster, schedule="1f1b", microbatches=16)
    best = best_of_each(best_by_schedule([problem]))
    for name in best:
        for planner in ("gpipe", "data_parallel"):
            try:
                own = simulate_plan(planners.plan(planner, replace(problem, schedule=name)))
            except PartoptError:
                continue
            if planner == "gpipe" and not own.idle_ranks:
                assert best[name] <= per_sample_s(own) * (1 + 1e-9)
            assert min(best.values()) <= per_sample_s(own) * (1 + 1e-9)


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

    def plans(self, **changed: object) -> list[Plan]:
        problem = replace(self.PROBLEM, **changed)  # type: ignore[arg-type]
        return best_by_schedule([replace(problem, recompute=recompute) for recompute in BOTH])

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
        assert {plan.planner for plan in plans} == {"grid"}

    def test_what_a_plan_predicts_is_its_simulation(self):
        for plan in self.plans():
            simulation = execute(plan)
            assert plan.predicted.iteration_s == pytest.approx(simulation.makespan_s)
            assert plan.peak_memory_bytes >= simulation.peak_memory_bytes.max()

    def test_what_does_not_fit_comes_last(self):
        peaks = sorted(plan.peak_memory_bytes for plan in self.plans())
        limit = peaks[len(peaks) // 2] // 2
        plans = self.plans(memory_bytes=limit)
        assert [plan.fits for plan in plans] == sorted((plan.fits for plan in plans), reverse=True)
        assert {plan.fits for plan in plans} == {True, False}

    def test_where_nothing_fits_each_schedule_is_simulated_once(self, monkeypatch):
        simulated = []
        monkeypatch.setattr(
            search,
            "simulate_plan",
            lambda plan: simulated.append(plan.schedule) or simulate_plan(plan),
        )
        plans = self.plans(memory_bytes=1)
        assert sorted(simulated) == sorted(plan.schedule for plan in plans)

    def test_without_a_budget_the_best_estimate_of_each_schedule_is_simulated(self, monkeypatch):
        simulated = []
        monkeypatch.setattr(search, "LIMIT", -1)
        monkeypatch.setattr(search, "BUDGET", -1)
        monkeypatch.setattr(
            search,
            "simulate_plan",
            lambda plan: simulated.append(plan.schedule) or simulate_plan(plan),
        )
        assert len(self.plans()) == len(simulated) == len(set(simulated))

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
        )
        plan = next(plan for plan in best_by_schedule([problem]) if plan.schedule == "zb-h1")
        assert (plan.family, [list(stage.ranks) for stage in plan.stages]) == (
            "nested",
            [[0, 2], [1, 3]],
        )

    def test_chunks_may_lie_inside_servers_too(self):
        profile = profile_of([measurement([1e-3] * 4, [2e-3] * 4, [10**7] * 4)])
        problem = problem_of(profile, two_level(2, 2, 1e11, 1e8), schedule="1f1b", microbatches=16)
        plan = next(plan for plan in best_by_schedule([problem]) if plan.schedule == "zbv")
        assert [list(stage.ranks) for stage in plan.stages] == [[0, 2], [1, 3], [1, 3], [0, 2]]


def test_a_size_that_the_batch_does_not_divide_by_is_left_out():
    sizes = [measurement([1e-3] * 4, microbatch_size=size) for size in (1, 2)]
    job = Job(profile_of(sizes), flat(2), schedule="auto", global_batch=7)
    assert {each.chain.microbatch_size for each in state_problems(job)} == {1}
    with pytest.raises(PartoptError, match="not a multiple of the microbatch size 2"):
        state_problems(job.with_(microbatch_size=2))


def test_where_nothing_can_run_the_answer_is_no():
    problem = problem_of(uniform_profile(2), flat(67), schedule="1f1b", microbatches=3)
    with pytest.raises(PartoptError, match="no schedule can run this") as raised:
        best_by_schedule([problem])
    assert (raised.value.exit_code, raised.value.hint) == (
        ANSWER_IS_NO,
        "give more microbatches, or fewer devices",
    )


@pytest.mark.parametrize("seed", [0, 1])
def test_all_schedules_together_are_no_slower_than_each_alone(seed):
    """Engines of `1f1b` wait for slow messages and those of the others do not."""
    stated = slow(8, two_level(2, 2, 12e9, 1.25e9), seed)
    job = Job(stated.profile, stated.topology, schedule="auto", global_batch=8)
    together = solve(job)
    alone = {
        name: solve(job.with_(schedule=name)).plan.predicted.samples_per_s
        for name in ("1f1b", "1f1b-eager", "gpipe", "zb-h1")
    }
    assert together.plan.predicted.samples_per_s >= max(alone.values()) * (1 - 1e-9)
    assert alone["1f1b-eager"] > 1.01 * alone["1f1b"]
    assert {plan.schedule: plan.comm for plan in together.alternatives}["1f1b"] == "serial"
    assert together.plan.comm == "overlap"


def test_any_replicas_are_better_than_a_grid_where_layers_differ():
    """One layer takes as long as the other three; two stages with equal replicas, or one stage,
    exchange or wait for more.
    """
    profile = profile_of(
        [measurement([9e-3, 1e-3, 1e-3, 1e-3], [18e-3, 2e-3, 2e-3, 2e-3], [10**3] * 4)],
        [10**6, 10**6, 10**6, 4 * 10**8],
    )
    stated = at_each_size(
        lambda b, again: problem_of(profile, flat(4, 1e9), b, recompute=again), 12, [1], [False]
    )
    grids = best_by_schedule(stated)
    free = replan(grids, stated, recompute_per_stage=False)
    assert [plan.predicted.samples_per_s for plan in free] == sorted(
        (plan.predicted.samples_per_s for plan in free), reverse=True
    )
    assert free[0].shape == "3-1"
    assert free[0].planner == "optimal"
    assert per_sample_s(free[0]) < per_sample_s(grids[0])
