"""How many examples hypothesis draws: as many as a test says, in a nightly run many more.

`HYPOTHESIS_PROFILE` chooses `dev`, `ci` (half as many, the same every time; the default where `CI`
is set), `nightly`, or `faults`: `dev`'s, the same every time, and the first failure is enough.
"""

from __future__ import annotations

import os
from typing import Any

from hypothesis import Phase, settings

PROFILE = os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "dev")
FACTORS = {"dev": 1, "ci": 0.5, "faults": 1, "nightly": 20}


def load_profile() -> None:
    """Register the profiles and load the chosen one. No profile has deadlines: the first call of a
    function may compile it.
    """
    settings.register_profile("dev", deadline=None)
    settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
    drawn = [Phase.explicit, Phase.generate]
    settings.register_profile("faults", deadline=None, derandomize=True, phases=drawn)
    settings.register_profile(
        "nightly", deadline=None, max_examples=round(FACTORS["nightly"] * 100), print_blob=True
    )
    settings.load_profile(PROFILE)


def examples(count: int, **options: Any) -> settings:
    """Settings for `count` examples, times the factor of the profile."""
    return settings(max_examples=max(1, round(count * FACTORS[PROFILE])), **options)
