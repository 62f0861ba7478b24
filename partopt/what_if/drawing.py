"""Documents as pictures, of profiles and of plans with what their layers take of a microbatch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from partopt import documents
from partopt.cost.chain import chain_of
from partopt.documents.plan import Plan
from partopt.documents.profile import Profile
from partopt.errors import PartoptError
from partopt.report import pictures
from partopt.report.pictures import Drawable, Layers

if TYPE_CHECKING:
    from partopt.report.pictures.sheet import Picture


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
    form = pictures.check(path, force)
    documents.write_bytes(path, picture_of(document, profile, alternatives).render(form), force)


def picture_of(
    document: Drawable, profile: Profile | None = None, alternatives: Sequence[Plan] = ()
) -> Picture:
    """The picture of a document. Raises PartoptError as `draw` does."""
    layers = None
    if isinstance(document, Profile):
        layers = layers_of(document)
    elif isinstance(document, Plan) and profile is not None:
        if profile.sha256() != document.profile.sha256:
            raise PartoptError(
                f"the plan was not made from this profile of {profile.model.name}",
                "give the plan's own `profile`, or none",
                code="plan-of-another-profile",
            )
        layers = layers_of(profile, document.microbatch_size)
    return pictures.picture_of(document, layers, alternatives)


def layers_of(profile: Profile, microbatch_size: int | None = None) -> Layers:
    """What the layers take at a microbatch size, by default the best that was measured."""
    chain = chain_of(profile, microbatch_size)
    ranges = [(n, n + 1) for n in range(chain.layers)]
    return Layers(
        microbatch_size=chain.microbatch_size,
        forward_s=chain.f,
        backward_s=chain.g,
        parameter_bytes=np.array([chain.parameter_bytes(*layer) for layer in ranges]),
        stash_bytes=np.array([chain.stash_bytes(*layer) for layer in ranges]),
        sent_bytes=chain.a[1:],
        compute_s=chain.compute_s(0, chain.layers),
    )
