"""What no plan may use of a device."""

import msgspec
import pytest

from partopt import Job, solve
from partopt.cost.memory import reserve_of
from partopt.documents.profile import Device, Profile
from partopt.errors import PartoptError
from partopt.search.verify import verify
from tests.helpers import flat, measurement, profile_of, with_memory_of

GB = 10**9
MESSAGES_GB = (3 * 688e6 + 9 * 4 * 12 * 2**20) / GB  # three groups, nine directions of 4 channels
CLUSTER = flat(2, memory_bytes=40 * GB)


def profile(kind: str, peak_bytes: int | None = None) -> Profile:
    """Two layers of 3 GB of parameters that keep 1 GB."""
    made = profile_of(
        [measurement([1.0] * 2, stash_groups=[([0, 1], GB)], peak_memory_bytes=peak_bytes)],
        parameter_bytes=[GB, 2 * GB],
    )
    return msgspec.structs.replace(made, device=Device(name="device", type=kind))


@pytest.mark.parametrize(
    "kind, peak_gb, limit_gb, expected",
    [
        ("cuda", None, 40, (2.2 + MESSAGES_GB, "assumed")),
        (
            "cuda",
            8,
            40,
            (2.2 + MESSAGES_GB, "assumed"),
        ),  # 2 * 3 + 1 GB are the formulas': 1 GB beyond
        ("cuda", 10, 40, (3.0 + MESSAGES_GB, "measured")),
        ("cuda", 10, None, (0.0, "none")),
        ("cpu", 10, 40, (0.0, "none")),
        ("", None, 40, (0.0, "none")),
    ],
)
def test_the_default_is_a_share_of_the_device_or_what_was_measured(
    kind, peak_gb, limit_gb, expected
):
    peak, limit = (None if each is None else each * GB for each in (peak_gb, limit_gb))
    found = reserve_of(profile(kind, peak), limit)
    assert (found.size_bytes / GB, found.basis) == expected


def test_frozen_parameters_have_no_gradients_to_count():
    given = with_memory_of(profile("cuda", 10 * GB), [GB, 0], [GB // 2, 0])
    found = reserve_of(given, 40 * GB)
    # parameters and gradients of 2 GB, 1 GB frozen, 1 GB kept, and half of one for a moment
    assert found.size_bytes == round((10 - 4 - 1 - 1.5 + MESSAGES_GB) * GB)


@pytest.mark.parametrize(
    "options, usable, reserve",
    [
        ({}, 37.8 - MESSAGES_GB, "assumed"),
        ({"memory": "40 GB"}, 40, "none"),
        ({"facts": {"reserve": "5 GB"}}, 35, "given"),
        ({"memory": "20 GB", "facts": {"reserve": "5 GB"}}, 15, "given"),
        ({"facts": {"reserve": 0}}, 40, "given"),
    ],
)
def test_plans_may_use_what_is_left(options, usable, reserve):
    job = Job(profile("cuda"), CLUSTER, **options)
    plan = solve(job).plan
    assert job.problem.memory_bytes == plan.memory_limit_bytes == usable * GB
    assert plan.reserve.basis == reserve
    assert verify(plan, job.profile).verified


def test_a_plan_with_another_reserve_than_its_profile_gives_is_not_verified():
    job = Job(profile("cuda"), CLUSTER)
    plan = solve(job).plan
    reserve = msgspec.structs.replace(plan.reserve, size_bytes=GB)
    changed = verify(msgspec.structs.replace(plan, reserve=reserve), job.profile)
    assert [row.check for row in changed.checks if not row.passed] == ["memory"]


@pytest.mark.parametrize("given, message", [("50 GB", "leaves nothing"), (-1, "must be 0 or more")])
def test_a_reserve_that_cannot_be_is_refused(given, message):
    with pytest.raises(PartoptError, match=message):
        Job(profile("cuda"), CLUSTER, facts={"reserve": given})
