"""Pictures of documents and of timelines: SVG, PDF and PNG, drawn with matplotlib in one look."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from partopt import documents
from partopt.documents.kinds import DOCUMENTS
from partopt.documents.plan import Plan
from partopt.documents.profile import Profile
from partopt.documents.simulation import DrawnTimeline, SimulationDocument
from partopt.documents.tables import Comparison, Scaling
from partopt.documents.training_run import Run
from partopt.errors import PartoptError

if TYPE_CHECKING:
    from partopt.report.pictures.sheet import Picture

Drawable = Profile | Plan | Comparison | Scaling | Run
KINDS = [kind for kind, document in DOCUMENTS.items() if document in get_args(Drawable)]
FORMS = ("svg", "pdf", "png")


class Layers(NamedTuple):
    """What the layers of a profile take of a microbatch, one by one; shapes (N,).

    `sent_bytes` cross the cut after a layer; `compute_s` are the seconds of all.
    """

    microbatch_size: int
    forward_s: NDArray[np.float64]
    backward_s: NDArray[np.float64]
    parameter_bytes: NDArray[np.float64]
    stash_bytes: NDArray[np.float64]
    sent_bytes: NDArray[np.float64]
    compute_s: float


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
        )


def picture_of(
    document: Drawable, layers: Layers | None = None, alternatives: Sequence[Plan] = ()
) -> Picture:
    """The picture of a document, of a plan with `alternatives` and, as of a profile, its `layers`.

    Raises PartoptError for a document without a picture.
    """
    from partopt.report.pictures import plan_sheet, profile_sheet, scaling_sheet, tables

    draw: dict[type, Callable[[Any], Picture]] = {
        Plan: lambda plan: plan_sheet.picture(plan, layers, alternatives),
        Profile: lambda profile: profile_sheet.picture(profile, layers),  # type: ignore[arg-type]
        Comparison: tables.comparison_picture,
        Scaling: scaling_sheet.picture,
        Run: tables.run_picture,
    }
    if type(document) not in draw:
        check_kind(type(document).__name__, "draw")
    return draw[type(document)](document)


def draw_timeline(
    plan: Plan, simulation: SimulationDocument, drawn: DrawnTimeline, form: str
) -> bytes:
    """What is `drawn` of the timeline of a plan, as "svg", "pdf" or "png".

    Raises PartoptError for another form.
    """
    from partopt.report.pictures import timeline_sheet as timeline

    if form not in FORMS:
        raise PartoptError(
            f"unsupported format '.{form}' of a figure",
            f"choose {', '.join(f'.{name}' for name in FORMS)}",
            code="unsupported-format",
        )
    return timeline.picture(plan, simulation, drawn).render(form)
