"""The checks of a plan: a line each, and the fields that differ."""

from __future__ import annotations

import textwrap
from collections.abc import Callable

from partopt.documents.verification import Verification
from partopt.report.basis import basis_lines
from partopt.report.table import label_lines
from partopt.report.width import columns
from partopt.units import format_seconds

_NOTED_S = 1e-3


def render(verification: Verification, spell: Callable[[str], str] = str) -> str:
    """A line for each check, and what is claimed where all hold.

    A check that took a noticeable time is shown with it. Options that the texts name are
    written as `spell` does.
    """
    lines = []
    for row in verification.checks:
        took = f" ({format_seconds(row.took_s)})" if row.took_s > _NOTED_S else ""
        verdict = "ok" if row.passed else "FAILED"
        lines.append((row.check, f"{verdict:8}{spell(row.text)}{took}"))
        lines += [("", difference) for difference in row.differences]
    lines += basis_lines(verification.estimated)
    if not verification.verified:
        return label_lines(lines)
    return f"{label_lines(lines)}\n{_claim(spell(verification.claim))}"


def _claim(text: str) -> str:
    begin = "verified: "
    return textwrap.fill(
        begin + text, columns(), subsequent_indent=" " * len(begin), break_on_hyphens=False
    )
