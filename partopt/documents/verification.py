"""The verification: the checks of one plan (`partopt.verification/1`)."""

from __future__ import annotations

from partopt import documents
from partopt.documents.profile import Seconds


class VerificationRow(documents.Part, frozen=True, kw_only=True):
    """One check: the time it took, its numbers, and the fields that differ, with both values."""

    check: str
    passed: bool
    took_s: Seconds
    text: str
    differences: list[str]


class Verification(documents.Document, frozen=True, kw_only=True):
    """The checks of one plan; `claim` is what is known of it where all of them hold.

    `estimated` is as in the plan's profile.
    """

    schema: str = "partopt.verification/1"
    estimated: str | None = None
    verified: bool
    claim: str
    checks: list[VerificationRow]

    @property
    def ok(self) -> bool:
        """Whether all checks hold."""
        return self.verified

    @property
    def failed(self) -> list[str]:
        """The checks that do not hold."""
        return [row.check for row in self.checks if not row.passed]
