"""Frozen parameters take room and no time: plans are those of a model without them."""

import pytest
from msgspec.structs import asdict

from partopt.cost.problem import problem_of
from partopt.documents.plan import Plan
from partopt.search.contest import plan_alone
from tests.helpers import chain_profile, two_level, with_memory_of

SHARED, FROZEN = 4 * 10**5, [6 * 10**5, 10**5, 0, 5 * 10**5, 10**6, 0]  # of layers 0 and 3
PARAMETERS = [2 * 10**6, 10**6, 3 * 10**6, 10**6, 10**6, 5 * 10**5]
PLANNERS = ["optimal", "pipedream", "straight", "data_parallel"]


def plan_of(name: str, frozen: bool, schedule: str) -> Plan:
    """Six layers on two servers of two, with what is frozen or without it."""
    sizes = PARAMETERS if frozen else [w - z for w, z in zip(PARAMETERS, FROZEN, strict=True)]
    profile = chain_profile(
        [1e-3, 4e-3, 2e-3, 1e-3, 3e-3, 1e-3],
        output_bytes=[10**6] * 6,
        parameter_bytes=sizes,
        stash_groups=[((layer,), 10**7) for layer in range(6)],
        shared=[("table", [0, 3], SHARED)] if frozen else [],
        optimizer_s=1e-3,
    )
    if frozen:
        profile = with_memory_of(profile, FROZEN, [0] * 6, ["table"])
    M = None if schedule == "pipedream" else 8
    problem = problem_of(profile, two_level(2, 2), schedule=schedule, microbatches=M)
    return plan_alone(name, problem)[0]


@pytest.mark.parametrize("schedule", ["pipedream", "1f1b", "zb-h1"])
@pytest.mark.parametrize("name", PLANNERS)
def test_they_change_no_time_no_message_and_no_choice(name, schedule):
    plan, without = (plan_of(name, frozen, schedule) for frozen in (True, False))
    assert plan.predicted == without.predicted
    assert plan.certificate == without.certificate
    assert plan.communication == without.communication
    for stage, other in zip(plan.stages, without.stages, strict=True):
        once = sum(FROZEN[layer] for layer in stage.layers)
        once -= SHARED * (0 in stage.layers and 3 in stage.layers)
        assert (stage.ranks, stage.trained_bytes) == (other.ranks, other.parameter_bytes)
        assert stage.frozen_bytes == once
        more = {"parameters_bytes": once, "total_bytes": once}
        assert asdict(stage.memory) == {
            part: size + more.get(part, 0) for part, size in asdict(other.memory).items()
        }
