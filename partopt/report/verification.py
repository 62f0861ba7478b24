"""The checks of a plan: a line each, and the fields that differ."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

from partopt import documents
from partopt.report.table import WIDTH, labelled
from partopt.units import format_seconds

_NOTED_S = 1e-3


class Row(documents.Part, frozen=True):
    """One check, how long it took, its numbers, and the fields that differ, each with both
    values.
    """

    check: str
    passed: bool
    took_s: float
    text: str
    differences: list[str]


class Verification(documents.Part, frozen=True, kw_only=True):
    """The checks of one plan; `claim` is what is known of it where all of them hold."""

    schema: str = "partopt.verification/1"
    verified: bool
    claim: str
    checks: list[Row]

    @property
    def failed(self) -> list[str]:
        """The checks that do not hold."""
        return [row.check for row in self.checks if not row.passed]


def verification(
    checks: Iterable[tuple[str, bool, float, str, list[str]]], claim: str
) -> Verification:
    """The document of `checks`: name, whether it holds, seconds that it took, its numbers, the
    fields that differ.
    """
    rows = [Row(*check) for check in checks]
    verified = all(row.passed for row in rows)
    return Verification(verified=verified, claim=claim if verified else "", checks=rows)


def render(found: Verification) -> str:
    """A line for each check, with the time of those that took one; and what is claimed, where all
    hold.
    """
    lines = []
    for row in found.checks:
        took = f" ({format_seconds(row.took_s)})" if row.took_s > _NOTED_S else ""
        lines.append((row.check, f"{'ok' if row.passed else 'FAILED':8}{row.text}{took}"))
        lines += [("", difference) for difference in row.differences]
    claim = textwrap.fill(
        f"verified: {found.claim}", WIDTH, subsequent_indent=" " * 10, break_on_hyphens=False
    )
    return "\n".join([labelled(lines), *([claim] if found.verified else [])])
