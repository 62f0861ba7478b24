"""The checks of a plan: a line each, and the fields that differ."""

from __future__ import annotations

from collections.abc import Iterable

from partopt import documents
from partopt.report.table import labelled


class Row(documents.Part, frozen=True):
    """One check, its numbers, and the fields that differ, each with both values."""

    check: str
    passed: bool
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


def verification(checks: Iterable[tuple[str, bool, str, list[str]]], claim: str) -> Verification:
    """The document of `checks`: name, whether it holds, its numbers, the fields that differ."""
    rows = [Row(*check) for check in checks]
    verified = all(row.passed for row in rows)
    return Verification(verified=verified, claim=claim if verified else "", checks=rows)


def render(found: Verification) -> str:
    """A line for each check; and what is claimed, where all hold."""
    lines = []
    for row in found.checks:
        lines.append((row.check, f"{'ok' if row.passed else 'FAILED':8}{row.text}"))
        lines += [("", difference) for difference in row.differences]
    return labelled([*lines, *([("verified:", found.claim)] if found.verified else [])])
