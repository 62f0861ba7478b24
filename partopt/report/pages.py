"""The page of a document as text, of any kind but those that need more than the document."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from partopt.documents.comparison import Comparison
from partopt.documents.device import DeviceFile
from partopt.documents.flows import Flows
from partopt.documents.group_comparison import GroupComparison
from partopt.documents.plan import Plan
from partopt.documents.profile import Profile
from partopt.documents.run import Run
from partopt.documents.scaling import Scaling
from partopt.documents.verification import Verification
from partopt.report import (
    comparison,
    device,
    flows,
    groups,
    plan,
    profile,
    run,
    scaling,
    verification,
)

_PAGES: dict[type, Callable[[Any], str]] = {
    Comparison: comparison.render,
    DeviceFile: device.render,
    Flows: flows.render,
    GroupComparison: groups.render,
    Run: run.render,
    Scaling: scaling.render,
}


def text_of(
    document: Any,
    spell: Callable[[str], str] = str,
    ascii_only: bool = False,
    all_layers: bool = False,
) -> str:
    """The page of `document`, options that it names written as `spell` does.

    Layers of profiles that repeat are shown once, unless `all_layers` are asked for.
    """
    if isinstance(document, Profile):
        return profile.render(document, ascii_only, all_layers, spell)
    if isinstance(document, Plan):
        return plan.render(document, ascii_only, spell)
    if isinstance(document, Verification):
        return verification.render(document, spell)
    return _PAGES[type(document)](document)
