"""`partopt show --verify`: a plan checked again."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from partopt import Profile
from partopt.cli import options, progress
from partopt.cli.terminal import say
from partopt.cli.words import as_flags
from partopt.documents.files import shipped_names
from partopt.errors import ANSWER_IS_NO, PartoptError

if TYPE_CHECKING:
    from partopt import Plan


def verify(plan: Plan, file: str, profile: str | None, as_json: bool) -> None:
    """Print every check of `plan`, which `file` holds.

    PartoptError where one fails, or without `profile` no shipped one is its own.
    """
    import partopt
    from partopt.report.pages import render_verification

    loaded = find_shipped(plan) if profile is None else partopt.Profile.load(profile)
    if loaded is None:
        raise PartoptError(
            f"{file}: its profile, of {plan.profile.name}, does not come with partopt",
            "say where it is: --profile FILE",
            code="profile-needed",
        )
    with progress.shown() as tell:
        found = partopt.verify(plan, loaded, tell)
    if as_json:
        options.write_json(found)
    else:
        say(render_verification(found, as_flags))
    if not found.ok:
        hint = (
            "give the plan's own: --profile FILE"
            if "profile" in found.failed
            else "re-run partopt plan"
        )
        raise PartoptError(
            f"{file}: not verified: {', '.join(found.failed)}",
            hint,
            ANSWER_IS_NO,
            code="not-verified",
        )
    if not as_json:
        say(f"next:    partopt simulate {shlex.quote(file)}", err=True)


def find_shipped(plan: Plan) -> Profile | None:
    """The shipped profile that the plan was made from; None where it does not come with partopt."""
    loaded = (Profile.load(name) for name in shipped_names("profiles"))
    return next((each for each in loaded if each.sha256() == plan.profile.sha256), None)
