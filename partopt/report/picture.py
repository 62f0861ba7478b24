"""A document as a picture: SVG, PDF or PNG."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial

from partopt import documents
from partopt.documents.comparison import Comparison
from partopt.documents.group_comparison import GroupComparison
from partopt.documents.plan import Plan
from partopt.documents.profile import Profile
from partopt.documents.run import Run
from partopt.documents.scaling import Scaling
from partopt.errors import PartoptError
from partopt.report.pictures import comparison, look, plan, run, scaling
from partopt.report.pictures import profile as layers
from partopt.report.pictures.look import Picture

Drawable = Profile | Plan | Comparison | GroupComparison | Scaling | Run
KINDS = ("profile", "plan", "comparison", "groups", "scaling", "run")


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
    problem. Raises PartoptError for a document without a picture, for other extensions, without
    matplotlib, for a `profile` that is not the plan's, and over an existing file unless `force`.
    """
    path = os.fspath(path)
    check(path, force)
    content = render(document, look.form_of(path), profile=profile, alternatives=alternatives)
    documents.write_bytes(path, content, force)


def check(path: str, force: bool = False, beside: Sequence[str] = ()) -> None:
    """Refuse, before any work is done, a path at which no picture could be written.

    `beside` are other forms, which the hint names.
    """
    look.form_of(path, beside)
    look.require_matplotlib()
    documents.check_writable(path, force)


def render(
    document: Drawable,
    form: str,
    *,
    profile: Profile | None = None,
    alternatives: Sequence[Plan] = (),
) -> bytes:
    """The picture as "svg", "pdf" or "png"; the same document gives the same bytes. As `draw`."""
    return picture_of(document, profile, alternatives).render(form)


def picture_of(
    document: Drawable, profile: Profile | None = None, alternatives: Sequence[Plan] = ()
) -> Picture:
    """The picture of a document. Raises PartoptError where it has none."""
    if isinstance(document, Profile):
        return Picture(layers.heading(document), partial(layers.draw, document))
    if isinstance(document, Plan):
        drawn = partial(plan.draw, document, profile=profile, alternatives=alternatives)
        return Picture(plan.heading(document), drawn)
    if isinstance(document, Comparison | GroupComparison):
        return Picture(comparison.heading(document), partial(comparison.draw, document))
    if isinstance(document, Scaling):
        return Picture(scaling.heading(document), partial(scaling.draw, document))
    if isinstance(document, Run):
        return Picture(run.heading(document), partial(run.draw, document))
    raise PartoptError(
        f"a {type(document).__name__} has no picture",
        f"these have one: {', '.join(KINDS)}",
        code="no-picture",
    )
