"""A number of bytes against the limit of a device, as people read it."""

from __future__ import annotations

from partopt.report.table import DOES_NOT_FIT
from partopt.units import format_bytes


def against_limit(peak_bytes: int, limit_bytes: int | None) -> str:
    """What follows a number of bytes: how it stands to the limit."""
    if limit_bytes is None:
        return "; no limit is known"
    limit = format_bytes(limit_bytes)
    if peak_bytes > limit_bytes:
        over = format_bytes(peak_bytes - limit_bytes)
        return f": {DOES_NOT_FIT} {limit}, over by {over}"
    return f", {peak_bytes / limit_bytes:.0%} of {limit}"
