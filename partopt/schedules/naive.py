"""Naive model parallelism: one microbatch at a time goes forward and back, and one device works."""

from __future__ import annotations

from partopt.schedules.layout import Place
from partopt.schedules.order import Row
from partopt.schedules.order import row as spelled


def row(place: Place) -> Row:
    """A device's row: F0 B0 F1 B1 .."""
    return spelled("FB" * place.M)
