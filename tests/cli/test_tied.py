"""`partopt plan --tied`."""

import pytest

from tests.helpers import chain_profile


@pytest.fixture
def planned(partopt, profile_file, topology_file):
    """Plans six equal layers, of which the first shares its weight with the third, on four
    devices.
    """
    path = profile_file(
        chain_profile([1e-3] * 6, None, [10**3] * 6, [10**6] * 6, shared=[("wte", [0, 2], 500_000)])
    )
    return lambda *options: partopt("plan", path, "--topology", topology_file(), *options)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ["--replication", "none"],
        ["--schedule", "1f1b", "--microbatches", 8, "--planner", "straight"],
    ],
)
def test_tied_layers_are_parted_or_kept_together(planned, options):
    stages = planned(*options, "--json").document["stages"]
    assert [stage["start"] for stage in stages if stage["tied_exchange_s"] > 0] != []
    kept = planned(*options, "--tied", "together", "--json").document["stages"]
    assert kept[0]["stop"] >= 3
    assert {stage["tied_exchange_s"] for stage in kept} == {0.0}


@pytest.mark.slow
def test_a_chosen_schedule_keeps_them_together(planned):
    kept = planned(
        "--schedule", "auto", "--microbatches", 8, "--tied", "together", "--json"
    ).document["stages"]
    assert not {stage["start"] for stage in kept} & {1, 2}


def test_a_split_that_parts_them_is_refused(planned):
    outcome = planned("--cuts", "2", "--tied", "together")
    assert (outcome.code, outcome.errors) == (
        2,
        ["--cuts 2: 2 parts layers 0 to 2, which share wte"],
    )
    assert planned("--cuts", "3", "--tied", "together").code == 0


def test_an_unknown_way_is_refused(planned):
    assert planned("--tied", "apart").code == 2
