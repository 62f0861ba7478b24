"""`partopt show -o`: a document as a picture."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from partopt.cli import verifying
from partopt.cli.terminal import say
from partopt.errors import PartoptError

if TYPE_CHECKING:
    from partopt import Plan, Profile


def check(output: str, force: bool, given: Mapping[str, object]) -> None:
    """Refuse, before anything is read, what does not go with a picture, or where none can be.

    `given` are the values of options by their names.
    """
    from partopt.report import pictures

    for name, value in given.items():
        if value:
            raise PartoptError(
                f"-o: draws one document, without {name}", f"drop {name} or -o", code="usage"
            )
    pictures.check(output, force)


def draw(
    kind: str, document: Any, file: str, output: str, force: bool, profile: str | None
) -> None:
    """Write the picture of the document in `file`, of a plan with its layers where known."""
    import partopt

    check_drawable(kind, file, "; partopt simulate PLAN -o draws a timeline")
    if profile is not None and kind != "plan":
        raise PartoptError(
            f"--profile: {file} is a {kind}", "drop --profile", code="not-a-plan", kind=kind
        )
    own = find_profile(document, profile) if kind == "plan" else None
    partopt.draw(document, output, profile=own, force=force)
    say(f"Wrote {output}", err=True)


def check_drawable(kind: str, file: str, more: str = "") -> None:
    """Refuse a kind of document that has no picture; `more` ends the hint."""
    from partopt.report.pictures import KINDS

    if kind not in KINDS:
        raise PartoptError(
            f"{file}: a {kind} has no picture",
            f"these have one: {', '.join(KINDS)}{more}",
            code="no-picture",
            kind=kind,
        )


def find_profile(plan: Plan, given: str | None) -> Profile | None:
    """The profile whose layers are drawn with `plan`: the one `given`, else a shipped one."""
    import partopt

    own = partopt.Profile.load(given) if given else verifying.find_shipped(plan)
    if own is None:
        say("note:    stages are drawn without their layers: add --profile", err=True)
    return own
