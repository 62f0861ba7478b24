"""A plan and what belongs to it as one page of HTML."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Sequence

import click

from partopt import documents
from partopt.documents.plan import Plan
from partopt.documents.profile import Profile
from partopt.documents.simulation import Finding
from partopt.report import web
from partopt.report.pages import text_of
from partopt.report.pictures import Drawable
from partopt.what_if.document import drawn_timeline, drawn_windows
from partopt.what_if.drawing import picture_of
from partopt.what_if.simulation import simulate

_ROWS = 64  # ranks of the timeline
_ACTIONS = 40_000  # of these ranks: 1 MB of the page
_COLUMNS = (400, 200, 100, 50)  # of three windows as wide as the page


def write_report(
    plan: Plan,
    path: str | os.PathLike[str],
    *,
    profile: Profile | None = None,
    beside: Sequence[Drawable] = (),
    force: bool = False,
    command: Callable[[Finding], Sequence[str]] | None = None,
    commands: Sequence[str] = (),
) -> None:
    """Simulate `plan` and write what there is to know of it to `path`, as one page of HTML.

    The page has all that it shows in itself: with the layers of its `profile`, and documents
    `beside` the plan with their pictures and tables. An existing file is replaced only with
    `force`. `command` gives the words of the command that makes a change, and `commands` are those
    to check the page with. Raises PartoptError where the plan cannot be simulated, a document has
    no picture, or `path` cannot be written.
    """
    path = os.fspath(path)
    documents.check_writable(path, force)
    simulation = simulate(plan)
    # the timeline in as many columns as the page can hold, or not at all
    execution = simulation.execution
    drawn = (
        drawn_timeline(execution.timeline, drawn_windows(execution, columns), _ROWS, _ACTIONS)
        for columns in _COLUMNS
    )
    timeline = next((picture for picture in drawn if picture is not None), None)
    shown, seen = [], Counter[str]()
    for document in (plan, *([] if profile is None else [profile]), *beside):
        kind = document.schema.removeprefix("partopt.").partition("/")[0]
        seen[kind] += 1
        layers_of = profile if document is plan else None
        shown.append(
            web.Shown(
                kind if seen[kind] == 1 else f"{kind}-{seen[kind]}",
                picture_of(document, layers_of).render("svg"),
                click.unstyle(text_of(document)),
                _digest(document),
            )
        )
    advice = [web.advice_of(finding, command) for finding in simulation.document.advice]
    figure = simulation.draw("svg")
    page = web.render(plan, simulation.document, timeline, figure, shown, advice, commands)
    documents.write_bytes(path, page.encode(), force)


def _digest(document: Drawable) -> str:
    """What `sha256sum` prints of its file; of a profile, what plans refer to it by."""
    if isinstance(document, Profile):
        return document.sha256()
    return hashlib.sha256(documents.encode(document)).hexdigest()
