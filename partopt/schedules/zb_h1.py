"""ZB-H1 (Qi et al., "Zero bubble pipeline parallelism", ICLR 2024, section 2.1): 1F1B with the
backward in two parts.

The gradient of the inputs goes upstream at once; that of the weights waits, longer on later
devices, and fills the drain. Every device then holds as much as 1F1B's first: P microbatches.
"""

from __future__ import annotations

from partopt.schedules.layout import Place
from partopt.schedules.order import Row
from partopt.schedules.order import row as spelled


def row(place: Place) -> Row:
    """A device's row: 1F1B's with I for B, and the W of each one p backwards after its I."""
    return spelled(delayed("F" * min(place.P - 1 - place.p, place.M), place.M, place.p))


def delayed(warmup: str, forwards: int, lag: int) -> str:
    """1F1B of `forwards` forwards after the forwards of `warmup`, each W `lag` backwards after its
    I.
    """
    first = len(warmup)
    steps = ["FI"] * (forwards - first) + ["I"] * first
    return (
        warmup
        + "".join(steps[:lag])
        + "".join(step + "W" for step in steps[lag:])
        + "W" * min(lag, forwards)
    )
