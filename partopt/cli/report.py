"""`partopt report`."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

import click

import partopt
from partopt.cli import options
from partopt.cli.words import change_command

if TYPE_CHECKING:
    from partopt.report.pictures import Drawable

_PAGE = "report.html"


@click.command()
@click.argument("plan", type=options.FILE)
@click.argument("documents", metavar="[DOCUMENT]...", nargs=-1, type=options.FILE)
@options.option(
    "--profile",
    "FILE|NAME",
    "The plan's profile, to draw its layers (default: the shipped one of its digest).",
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
    from partopt.documents import check_writable, read_bytes
    from partopt.documents.kinds import read_document
    from partopt.report.pictures import check_kind

    def load(file: str) -> Drawable:
        kind, document = read_document(read_bytes(file), file)
        check_kind(kind, file)
        return document  # type: ignore[no-any-return]

    path = output or _PAGE
    check_writable(path, force, [".html", ".htm"])
    loaded = partopt.Plan.load(plan)
    partopt.write_report(
        loaded,
        path,
        profile=options.profile_to_draw(loaded, profile),
        beside=[load(file) for file in documents],
        force=force,
        command=partial(change_command, plan),
        commands=list(_checks(plan, profile)),
    )
    options.say_wrote(path)


def _checks(plan: str, profile: str | None) -> Iterator[str]:
    """Commands that compute again what the page says."""
    given = [] if profile is None else ["--profile", profile]
    yield shlex.join(["partopt", "show", "--verify", plan, *given])
    yield shlex.join(["partopt", "simulate", plan, "-o", "trace.json"])
    yield shlex.join(["partopt", "report", plan, *given])
