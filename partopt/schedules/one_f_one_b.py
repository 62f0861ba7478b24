"""1F1B with a flush (PipeDream-flush; Narayanan et al., ICML 2021): a short warm-up, then one
forward and one backward in turn.
"""

from __future__ import annotations

from partopt.schedules.layout import Place
from partopt.schedules.order import Row
from partopt.schedules.order import row as spelled


def row(place: Place) -> Row:
    """A device's row: its warm-up of forwards, F B in turn, then the backwards that are left."""
    warmup = min(place.warmup, place.M)
    return spelled("F" * warmup + "FB" * (place.M - warmup) + "B" * warmup)
