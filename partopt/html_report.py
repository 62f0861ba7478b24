"""A plan and what belongs to it as one page of HTML."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

from partopt import documents
from partopt.documents.plan import Plan
from partopt.documents.simulation import Finding
from partopt.report import web
from partopt.simulation import simulate
from partopt.simulator.drawing import drawn_timeline, drawn_window

_ROWS = 64  # ranks of the timeline
_ACTIONS = 40_000  # of these ranks: 1 MB of the page


def write_report(
    plan: Plan,
    path: str,
    *,
    force: bool = False,
    spell: Callable[[str], str] = str,
    command: Callable[[Finding], str] | None = None,
    commands: Sequence[str] = (),
) -> None:
    """Simulate `plan` and write what there is to know of it to `path`, as one page of HTML.

    The page has all that it shows in itself. An existing file is replaced only with `force`.
    Options that its texts name are written as `spell` does, `command` gives that which makes a
    change, and `commands` are those to check the page with. Raises PartoptError where the plan
    cannot be simulated, or `path` not be written.
    """
    documents.check_writable(path, force)
    simulation = simulate(plan)
    execution = simulation.execution
    whole = (0.0, execution.makespan_s)
    drawn = [
        drawn_timeline(execution.timeline, window, _ROWS, _ACTIONS)
        for window in (whole, drawn_window(execution))
    ]
    contents = web.Contents(
        plan,
        simulation.document,
        next(filter(None, drawn), None),
        {},
        [],
        commands,
        [("plan", hashlib.sha256(documents.encode(plan)).hexdigest())],
    )
    page = web.render(contents, spell, command)
    documents.write_bytes(path, page.encode(), force)
