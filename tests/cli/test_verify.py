"""`partopt show --verify`."""

import json
from pathlib import Path

import pytest

from tests.helpers import chain_profile, changed, uniform_profile

CHECKS = ["profile", "numbers", "memory", "request", "objective", "bound", "status"]


@pytest.fixture
def planned(partopt, tmp_path):
    """Plans a shipped profile with the options that the test gives, and gives the path of the
    plan.
    """

    def write(*given):
        path = tmp_path / "plan.json"
        arguments = "mlp.cpu.float32", "--topology", "v100-pcie", *given, "-o", path, "--force"
        assert partopt("plan", *arguments).code == 0
        return path

    return write


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "claim"),
    [
        (
            (),
            (
                "optimal among plans under pipedream, any warm-up, microbatches of 256,\n"
                "          16 GB a device"
            ),
        ),
        (
            ("--planner", "pipedream"),
            "optimal for PipeDream's recurrence (links modelled as buses), among\n"
            "          nested plans, as the recurrence prices them",
        ),
        (
            ("--planner", "gpipe", "--cost", "parameters"),
            "the plan is as it says; gpipe proves no bound",
        ),
        (("--cuts", "3", "--replicas", "2,1"), "the plan is as it says; manual proves no bound"),
        (
            ("--schedule", "zbv", "--global-batch", "256"),
            "the plan is as it says; grid proves no bound",
        ),
        (("--planner", "optimal", "--cut-at", "*2*"), None),
        (
            (
                "--planner",
                "optimal",
                "--schedule",
                "1f1b",
                "--microbatches",
                "8",
                "--recompute",
                "auto",
                "--cut-at",
                "*",
            ),
            None,
        ),
    ],
)
def test_a_plan_of_a_shipped_profile_needs_nothing_else(partopt, planned, given, claim):
    path = planned(*given)
    outcome = partopt("show", "--verify", path)
    assert outcome.code == 0
    assert [line.split()[:2] for line in outcome.out.splitlines() if line[0] not in " v"] == [
        [check, "ok"] for check in CHECKS
    ]
    assert claim is None or outcome.out.endswith(f"\nverified: {claim}\n")
    assert max(map(len, outcome.out.splitlines())) <= 80
    assert outcome.err == f"next:    partopt simulate {path}\n"


@pytest.mark.slow
def test_an_altered_plan_fails_with_the_reason(partopt, planned, tmp_path):
    content = planned().read_bytes()
    (tmp_path / "altered.json").write_bytes(changed(content, "noam", to=7))
    outcome = partopt("show", "--verify", tmp_path / "altered.json")
    assert (outcome.code, outcome.errors) == (
        1,
        [f"{tmp_path / 'altered.json'}: not verified: numbers"],
    )
    assert "numbers   FAILED  1 of" in outcome.out
    assert f"\n          noam: 7 recorded, {json.loads(content)['noam']} found\n" in outcome.out
    assert [line.split()[0] for line in outcome.out.splitlines() if line[0] != " "] == CHECKS


@pytest.mark.slow
def test_the_checks_as_a_document(partopt, planned, tmp_path):
    path = planned()
    outcome = partopt("show", "--verify", path, "--json")
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.document["schema"] == "partopt.verification/1"
    assert outcome.document["verified"] is True
    assert outcome.document["claim"].startswith("optimal among")
    assert [(row["check"], row["passed"]) for row in outcome.document["checks"]] == [
        (check, True) for check in CHECKS
    ]
    (tmp_path / "altered.json").write_bytes(
        changed(path.read_bytes(), "predicted", "bubble", to=0.9)
    )
    outcome = partopt("show", "--verify", tmp_path / "altered.json", "--json")
    assert (outcome.code, outcome.document["verified"], outcome.document["claim"]) == (1, False, "")
    assert outcome.document["checks"][1]["differences"][0].startswith(
        "predicted.bubble: 0.9 recorded, "
    )


def test_a_profile_of_ones_own_is_given(partopt, profile_file, plan_file):
    path = plan_file("--planner", "straight")
    without = partopt("show", "--verify", path)
    assert (without.code, without.out) == (2, "")
    assert without.errors == [f"{path}: its profile, of chain, does not come with partopt"]
    assert without.hints == ["say where it is: --profile FILE"]
    assert (
        partopt("show", "--verify", path, "--profile", profile_file(uniform_profile(8))).code == 0
    )
    assert (
        partopt(
            "show",
            "--verify",
            "-",
            "--profile",
            profile_file(uniform_profile(8)),
            stdin=Path(path).read_bytes(),
        ).code
        == 0
    )


def test_another_profile_fails(partopt, profile_file, plan_file):
    other = profile_file(
        chain_profile([1e-3] * 8, [2e-3] * 7 + [3e-3], [10**6] * 8, [10**6] * 8), name="other.json"
    )
    outcome = partopt("show", "--verify", plan_file("--planner", "straight"), "--profile", other)
    assert outcome.code == 1
    assert outcome.errors[0].endswith("not verified: profile, numbers")
    assert outcome.hints == ["give the plan's own: --profile FILE"]


def test_only_plans_are_verified(partopt, plan_file):
    assert partopt("show", "--verify", "v100-pcie").errors == ["--verify: v100-pcie is a topology"]
    assert partopt("show", "--verify", "mlp.cpu.float32").code == 2
    assert partopt("show", plan_file(), "--profile", "mlp.cpu.float32").errors == [
        "--profile: goes with --verify or -o"
    ]
