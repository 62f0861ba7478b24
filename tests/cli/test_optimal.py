"""`partopt plan --planner optimal`."""

import pytest

from tests.helpers import chain_profile


@pytest.fixture
def planned(partopt, profile_file, topology_file):
    """Plans six equal layers on four devices with the options that the test gives."""
    return lambda *options: partopt("plan", profile_file(), "--topology", topology_file(), *options)


def test_it_prints_what_it_proved(planned):
    page = planned("--planner", "optimal").out
    proof = " ".join(page.split("\nproof")[1].split("\n\n")[0].split())
    assert proof == (
        "optimal among plans under pipedream, any warm-up, microbatches of 1, 16 GB a device"
    )
    assert "\nobjective" not in page


@pytest.mark.parametrize(
    ("options", "scope"),
    [
        (
            ["--stages", 2, "--replication", "uniform"],
            "16 GB a device, 2 stages, replication uniform",
        ),
        (
            ["--schedule", "gpipe", "--microbatches", 8],
            "gpipe, 8 microbatches of 1, 16 GB a device",
        ),
        (["--recompute", "auto", "--memory", "1 GB"], "1 GB a device, stages recompute or not"),
        (
            ["--recompute", "always", "--with", "waits=pipedream"],
            "all recomputed, serial transfers",
        ),
        (
            ["--with", "allreduce=blocking", "--cut-at", "layer[24]"],
            "blocking all-reduces, 2 places to cut",
        ),
    ],
)
def test_its_bound_says_of_which_plans_it_is(planned, options, scope):
    certificate = planned("--planner", "optimal", *options, "--json").document["certificate"]
    assert certificate["scope"].endswith(scope)


def test_where_nothing_fits_the_answer_is_no(planned):
    outcome = planned("--planner", "optimal", "--memory", "1 kB")
    assert (outcome.code, outcome.out, outcome.errors) == (
        1,
        "",
        ["optimal: no plan fits the memory"],
    )


def test_of_equal_plans_it_is_the_one_that_is_taken(planned):
    assert planned("--json").document["planner"] == "optimal"


@pytest.mark.slow
@pytest.mark.parametrize("replication, shapes", [("free", {4}), ("uniform", {4}), ("none", {1})])
def test_replication_is_kept_to(planned, replication, shapes):
    for options in ([], ["--planner", "optimal"]):
        stages = planned("--replication", replication, *options, "--json").document["stages"]
        assert {stage["replicas"] for stage in stages} == shapes


def test_it_chooses_the_stages_that_recompute(partopt, profile_file, topology_file):
    """Layers 0 and 1 recomputed and layers 2 and 3 as they are take 3 ms each; 1 GB is kept of the
    former, so that two microbatches in flight are all that fits.
    """
    path = profile_file(
        chain_profile(
            [1e-3, 1e-3, 1.5e-3, 1.5e-3],
            stash_groups=[((layer,), 10**8 * (1 + 9 * (layer < 2))) for layer in range(4)],
        )
    )
    options = [
        "--topology",
        topology_file(),
        "--recompute",
        "auto",
        "--replication",
        "none",
        "--memory",
        "2.5 GB",
    ]
    outcome = partopt("plan", path, *options, "--json")
    recomputed = [stage["recompute"] for stage in outcome.document["stages"]]
    assert recomputed == [True, True, False, False]
    assert outcome.document["predicted"]["period_s"] == pytest.approx(3e-3)
    assert "activations recomputed in stages 0 and 1" in partopt("plan", path, *options).out


@pytest.mark.parametrize("schedule", ["interleaved", "zbv"])
def test_schedules_that_it_does_not_plan_for_are_refused_and_left_to_others(planned, schedule):
    stated = "--schedule", schedule, "--microbatches", 8, "--stages", 4
    outcome = planned(*stated, "--planner", "optimal")
    assert (outcome.code, outcome.errors[0].partition(":")[0]) == (2, f"--schedule {schedule}")
    assert planned(*stated, "--json").err == ""
