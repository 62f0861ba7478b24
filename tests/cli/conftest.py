"""Plans in files, made by the command line."""

import pytest

from tests.helpers import uniform_profile


@pytest.fixture
def plan_file(partopt, profile_file, topology_file, tmp_path):
    """Plans eight equal layers on four devices with the options that the test gives, and gives the
    path of the plan.
    """

    def write(*given, name="plan.json", cluster=None):
        arguments = (
            profile_file(uniform_profile(8)),
            "--topology",
            topology_file(cluster),
            "-o",
            tmp_path / name,
            "--force",
        )
        assert partopt("plan", *arguments, *(given or ("--planner", "straight"))).code == 0
        return str(tmp_path / name)

    return write


@pytest.fixture
def synchronous(plan_file):
    return plan_file(
        "--planner", "straight", "--schedule", "1f1b", "--microbatches", 16, name="sync.json"
    )
