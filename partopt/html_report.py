"""A plan and what belongs to it as one page of HTML."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import click

from partopt import documents
from partopt.documents.plan import Plan
from partopt.documents.profile import Profile
from partopt.documents.simulation import DrawnTimeline, Finding
from partopt.report import picture, web
from partopt.report.pages import text_of
from partopt.report.picture import Drawable
from partopt.report.pictures.look import require_matplotlib
from partopt.simulation import Simulation, simulate
from partopt.simulator.document import drawn_timeline, drawn_windows

_ROWS = 64  # ranks of the timeline
_ACTIONS = 40_000  # of these ranks: 1 MB of the page
_COLUMNS = (400, 200, 100, 50)  # of three windows, each as wide as the page


def write_report(
    plan: Plan,
    path: str | os.PathLike[str],
    *,
    profile: Profile | None = None,
    beside: Sequence[Drawable] = (),
    force: bool = False,
    spell: Callable[[str], str] = str,
    command: Callable[[Finding], Sequence[str]] | None = None,
    commands: Sequence[str] = (),
) -> None:
    """Simulate `plan` and write what there is to know of it to `path`, as one page of HTML.

    The page has all that it shows in itself: with the layers of its `profile`, and documents
    `beside` the plan with a picture and a table each. An existing file is replaced only with
    `force`. Options that its texts name are written as `spell` does, `command` gives the words of
    that which makes a change, and `commands` are those to check the page with. Raises PartoptError
    where the plan cannot be simulated, a document has no picture, or `path` cannot be written, and
    without matplotlib.
    """
    path = os.fspath(path)
    documents.check_writable(path, force)
    require_matplotlib()
    simulation = simulate(plan)
    found = [*([] if profile is None else [profile]), *beside]
    contents = web.Contents(
        plan,
        simulation.document,
        _timeline(simulation),
        {
            "picture": picture.render(plan, "svg", profile=profile),
            "figure": simulation.draw("svg"),
        },
        list(_beside(found, spell)),
        commands,
        [(_name(each), _digest(each)) for each in (plan, *found)],
    )
    page = web.render(contents, spell, command)
    documents.write_bytes(path, page.encode(), force)


def _timeline(simulation: Simulation) -> DrawnTimeline | None:
    """The timeline in as many columns as a page can hold; None where that are none."""
    execution = simulation.execution
    for columns in _COLUMNS:
        windows = drawn_windows(execution, columns)
        drawn = drawn_timeline(execution.timeline, windows, _ROWS, _ACTIONS)
        if drawn is not None:
            return drawn
    return None


def _beside(documents: Sequence[Drawable], spell: Callable[[str], str]) -> Iterator[web.Beside]:
    """Each document under its kind's name, the second of a kind with its number."""
    seen: Counter[str] = Counter()
    for each in documents:
        kind = _name(each)
        seen[kind] += 1
        name = kind if seen[kind] == 1 else f"{kind}-{seen[kind]}"
        text = click.unstyle(text_of(each, spell))
        yield web.Beside(name, kind.capitalize(), picture.render(each, "svg"), text)


def _name(document: Drawable) -> str:
    """`comparison`, as its schema says."""
    return document.schema.removeprefix("partopt.").partition("/")[0]


def _digest(document: Drawable) -> str:
    """What `sha256sum` prints of its file; of a profile, what plans refer to it by."""
    if isinstance(document, Profile):
        return document.sha256()
    return hashlib.sha256(documents.encode(document)).hexdigest()
