"""GPipe (Huang et al., NeurIPS 2019, section 2.3): all forwards, then all backwards.

With re-materialisation a device computes a forward once more before its backward, and begins while
it waits for the gradient.
"""

from __future__ import annotations

from partopt.schedules.layout import Place
from partopt.schedules.order import Row
from partopt.schedules.order import row as spelled


def row(place: Place) -> Row:
    """A device's row: F0 F1 .. B0 B1 .."""
    return spelled("F" * place.M + ("RB" if place.recompute else "B") * place.M)
