"""Pictures of documents and of timelines: SVG, PDF and PNG, drawn with matplotlib in one look."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, get_args

from partopt import documents
from partopt.documents.kinds import DOCUMENTS
from partopt.documents.plan import Plan
from partopt.documents.profile import Profile
from partopt.documents.tables import Comparison, Scaling
from partopt.documents.training_run import Run
from partopt.errors import PartoptError

if TYPE_CHECKING:
    from partopt.report.pictures.sheet import Picture
    from partopt.simulator.execution import Execution

Drawable = Profile | Plan | Comparison | Scaling | Run
KINDS = [kind for kind, document in DOCUMENTS.items() if document in get_args(Drawable)]
FORMS = ("svg", "pdf", "png")


def draw(
    document: Drawable,
    path: str | os.PathLike[str],
    *,
    profile: Profile | None = None,
    alternatives: Sequence[Plan] = (),
    force: bool = False,
) -> None:
    """Draw a document, and write it whole or not at all; the extension of `path` chooses the form.

    It is `.svg`, `.pdf` or `.png`. A plan is drawn with the layers of its `profile`, or without it
    with its stages alone; and with the speed and memory of `alternatives`, plans of the same
    problem. Raises PartoptError for a document without a picture, for other extensions, for a
    `profile` that is not the plan's, and over an existing file unless `force`.
    """
    path = os.fspath(path)
    form = check(path, force)
    documents.write_bytes(path, picture_of(document, profile, alternatives).render(form), force)


def check(path: str, force: bool = False, beside: Sequence[str] = ()) -> str:
    """The form of a picture at `path`; refuses, before any work, one that could not be written.

    `beside` are other forms, which the hint names.
    """
    hint = f"choose {', '.join(f'.{name}' for name in (*beside, *FORMS))}"
    form = documents.check_form(path, [f".{form}" for form in FORMS], hint)
    documents.check_writable(path, force)
    return form.removeprefix(".")


def check_kind(kind: str, file: str, more: str = "") -> None:
    """Refuse a kind of document, in `file`, that has no picture; `more` ends the hint."""
    if kind not in KINDS:
        raise PartoptError(
            f"{file}: a {kind} has no picture",
            f"these have one: {', '.join(KINDS)}{more}",
            code="no-picture",
            kind=kind,
        )


def picture_of(
    document: Drawable,
    profile: Profile | None = None,
    alternatives: Sequence[Plan] = (),
) -> Picture:
    """The picture of a document. Raises PartoptError as `draw` does."""
    from partopt.report.pictures import plan_sheet, scaling_sheet, tables
    from partopt.report.pictures import profile_sheet as layers

    draw: dict[type, Callable[[Any], Picture]] = {
        Plan: lambda plan: plan_sheet.picture(plan, profile, alternatives),
        Profile: layers.picture,
        Comparison: tables.comparison_picture,
        Scaling: scaling_sheet.picture,
        Run: tables.run_picture,
    }
    if type(document) not in draw:
        check_kind(type(document).__name__, "draw")
    return draw[type(document)](document)


def draw_timeline(
    execution: Execution, form: str, window: tuple[float, float] | None = None
) -> bytes:
    """The timeline of an execution, or the seconds of it in `window`, as "svg", "pdf" or "png".

    Raises PartoptError for another form, and where there is nothing or too much to draw.
    """
    from partopt.report.pictures import timeline_sheet as timeline

    if form not in FORMS:
        raise PartoptError(
            f"unsupported format '.{form}' of a figure",
            f"choose {', '.join(f'.{name}' for name in FORMS)}",
            code="unsupported-format",
            form=form,
        )
    return timeline.picture(execution, window).render(form)
