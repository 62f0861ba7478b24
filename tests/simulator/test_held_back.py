"""What memory costs a plan that is held back by it: the number is one of the simulator's."""

import re

import pytest
from msgspec.structs import replace

import partopt as po
from partopt.report.plan import render
from partopt.simulator.advice import held_back
from tests.helpers import chain_profile, flat


def solved(memory_bytes, last_s=1e-3, schedule="1f1b-eager", **options):
    """Four stages of 3 ms, whose messages take 1 ms and whose microbatches 10 MB each."""
    profile = chain_profile(
        [1e-3] * 3 + [last_s], output_bytes=[10**7] * 4, parameter_bytes=[4] * 4
    )
    job = po.Job(
        profile,
        flat(4, 1e10, memory_bytes=memory_bytes),
        schedule=schedule,
        microbatches=None if schedule == "pipedream" else 16,
        cuts=[1, 2, 3],
        **options,
    )
    return po.solve(job).plan


def held_in_words(plan):
    """The line `binds` of the plan's page, and the texts of its advice."""
    page = " ".join(render(plan).split())
    advice = [(each.severity, each.text) for each in po.simulate(plan).document.advice]
    return re.search(r"binds (.*?) (?:slack|memory [0-9])", page)[1], advice


@pytest.mark.parametrize(
    ("schedule", "megabytes", "text"),
    [
        ("1f1b-eager", 50, "2 in flight on stage 0 in place of 7, to fit: 273% slower"),
        ("1f1b-eager", 120, "2 in flight on stage 1 in place of 5, to fit: 132% slower"),
        ("pipedream", 60, "2 in flight on stage 0 in place of 4, to fit: 186% slower"),
    ],
)
def test_fewer_microbatches_in_flight_are_named_with_what_they_cost(schedule, megabytes, text):
    plan = solved(megabytes * 10**6, schedule=schedule)
    roomy = solved(10**12, schedule=schedule)
    usual = [int(each) - 1 for each in ([7, 5, 3, 1] if schedule == "1f1b-eager" else [4, 3, 2, 1])]
    then = po.simulate(roomy, warmup=usual).document.period_s
    found = held_back(plan)
    assert found.text == text
    assert found.slower == pytest.approx(plan.predicted.period_s / then - 1)
    binds, advice = held_in_words(plan)
    assert binds == f"memory: {text}"
    assert any(severity == "loss" and told.startswith(text) for severity, told in advice)
    assert not any(severity == "risk" and "needs" in told for severity, told in advice)


@pytest.mark.parametrize(
    ("memory_bytes", "last_s"),
    [(10**12, 1e-3), (None, 1e-3), (140 * 10**6, 1e-3), (100 * 10**6, 4e-3), (30 * 10**6, 1e-3)],
    ids=["room", "no limit", "messages cost more", "a slow stage paces it", "it does not fit"],
)
def test_what_is_not_held_back_names_another_cause(memory_bytes, last_s):
    plan = solved(memory_bytes, last_s)
    assert held_back(plan) is None
    assert not held_in_words(plan)[0].startswith("memory:")


@pytest.mark.parametrize(("megabytes", "last_s"), [(100, 2e-3), (140, 1e-3)])
def test_messages_that_cost_more_than_memory_are_not_blamed_on_it(megabytes, last_s):
    """Without messages the first is 51 % faster, with its schedule's warm-up 40 %."""
    plan = solved(megabytes * 10**6, last_s)
    assert plan.stages[0].in_flight < 7
    assert held_back(plan) is None


def test_recomputation_to_fit_is_named():
    profile = chain_profile(
        [1e-3] * 8,
        output_bytes=[10**6] * 8,
        parameter_bytes=[4] * 8,
        stash_groups=[([n], 2 * 10**7) for n in range(8)],
    )
    job = po.Job(
        profile, flat(4, 1e12, memory_bytes=10**8), schedule="1f1b", microbatches=32,
        recompute="auto", planner="optimal", stages=4, replication="none",
    )  # fmt: skip
    plan = po.solve(job).plan
    assert any(stage.recompute for stage in plan.stages)
    found = held_back(plan)
    assert re.match(r"recomputation of stages? [0-9, and]+, to fit: [0-9]+% slower", found.text)
    asked = replace(plan, request=replace(plan.request, recompute="always"))
    assert held_back(asked) is None


def test_a_long_plan_is_not_simulated_again():
    plan = replace(solved(50 * 10**6), microbatches=10**6)
    assert held_back(plan) is None
