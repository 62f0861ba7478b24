"""`partopt show --verify`: a plan checked again."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

import click

from partopt.cli import options, progress
from partopt.documents import shipped
from partopt.errors import ANSWER_IS_NO, PartoptError

if TYPE_CHECKING:
    from partopt.documents.plan import Plan
    from partopt.documents.profile import Profile


def verify(plan: Plan, file: str, profile: str | None, as_json: bool) -> None:
    """Print every check of `plan`, which `file` holds.

    PartoptError where one fails, or without `profile` no shipped one is its own.
    """
    from partopt import documents
    from partopt.cli.words import as_flags
    from partopt.report.verification import render
    from partopt.search import verify as checking
    from partopt.search.tables import verification_of

    loaded = _shipped(plan, file) if profile is None else options.load_profile(profile)
    with progress.shown() as tell:
        found = verification_of(checking.verify(plan, loaded, tell), checking.claim(plan))
    if as_json:
        documents.write_bytes("-", documents.encode(found))
    else:
        click.echo(render(found, as_flags))
    if not found.verified:
        hint = (
            "give the plan's own: --profile FILE"
            if "profile" in found.failed
            else "plan it anew: partopt plan"
        )
        raise PartoptError(f"{file}: not verified: {', '.join(found.failed)}", hint, ANSWER_IS_NO)
    if not as_json:
        click.echo(f"next:    partopt simulate {shlex.quote(file)}", err=True)


def _shipped(plan: Plan, file: str) -> Profile:
    """The shipped profile that the plan was made from."""
    for name in shipped.names("profiles"):
        loaded = options.load_profile(name)
        if loaded.sha256() == plan.profile.sha256:
            return loaded
    raise PartoptError(
        f"{file}: its profile, of {plan.profile.name}, does not come with partopt",
        "say where it is: --profile FILE",
    )
