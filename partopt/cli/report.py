"""`partopt report`."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from partopt.cli import options
from partopt.cli.terminal import say
from partopt.cli.words import as_flags, flags_of
from partopt.errors import PartoptError

if TYPE_CHECKING:
    from partopt.documents.simulation import Finding
    from partopt.report.picture import Drawable

_PAGE = "report.html"


@click.command(short_help="a plan as one page of HTML")
@click.argument("plan")
@click.argument("documents", metavar="[DOCUMENT]...", nargs=-1)
@click.option(
    "--profile",
    metavar="FILE|NAME",
    help="The plan's profile, to draw its layers (default: the shipped one of its digest).",
)
@options.output_options(f"the page ({_PAGE})")
def command(
    plan: str, documents: tuple[str, ...], profile: str | None, output: str | None, force: bool
) -> None:
    """Write all that there is to know of PLAN as one page of HTML.

    It has the cut, the cluster, the timeline to zoom into, where time and memory go, what is proved
    and how to check it. Each DOCUMENT has a picture there, too: a comparison, a scaling, a run.
    The page needs no other file, and requests nothing from a network.

    \b
    Example:
      partopt report plan.json
      partopt compare gpt.json --topology dgx-a100 -o comparison.json
      partopt report plan.json comparison.json -o gpt.html
    """
    import partopt
    from partopt.cli.verifying import find_shipped
    from partopt.documents import check_writable

    path = output or _PAGE
    check_writable(path, force)
    loaded = partopt.Plan.load(plan)
    own = find_shipped(loaded) if profile is None else partopt.Profile.load(profile)
    if own is None:
        say("note:    stages are drawn without their layers: add --profile", err=True)
    partopt.write_report(
        loaded,
        path,
        profile=own,
        beside=[_load(file) for file in documents],
        force=force,
        spell=as_flags,
        command=lambda finding: _change(plan, finding),
        commands=list(_checks(plan, profile)),
    )
    if path != "-":
        say(f"Wrote {path}", err=True)


def _load(file: str) -> Drawable:
    """A document that has a picture."""
    from partopt.documents import read_bytes
    from partopt.documents.kinds import DOCUMENTS, kind_of
    from partopt.report.picture import KINDS

    content = read_bytes(file)
    kind = kind_of(content, file)
    if kind not in KINDS:
        raise PartoptError(
            f"{file}: a {kind} has no picture",
            f"these have one: {', '.join(KINDS)}",
            code="no-picture",
            kind=kind,
        )
    document: Any = DOCUMENTS[kind]
    return document.parse(content, file)  # type: ignore[no-any-return]


def _change(plan: str, finding: Finding) -> str:
    return shlex.join(["partopt", "simulate", plan, *flags_of(finding.options)])


def _checks(plan: str, profile: str | None) -> Iterator[str]:
    """Commands that compute again what the page says."""
    given = [] if profile is None else ["--profile", profile]
    yield shlex.join(["partopt", "show", "--verify", plan, *given])
    yield shlex.join(["partopt", "simulate", plan, "-o", "trace.json"])
    yield shlex.join(["partopt", "report", plan, *given])
