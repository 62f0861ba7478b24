"""Interleaved 1F1B with the backward in two parts, as ZB-H1 splits it: the "ZB1P" of torch, after
Qi et al., ICLR 2024.

Groups of microbatches go through the v chunks as in `interleaved`. A warm-up of one forward for
each device downstream is enough, for the gradients of the inputs come back twice as fast; every
device holds v P chunks, until their W.
"""

from __future__ import annotations

from partopt.schedules.interleaved import group, grouped
from partopt.schedules.layout import Place
from partopt.schedules.order import Row
from partopt.schedules.order import row as spelled
from partopt.schedules.zb_h1 import delayed


def row(place: Place) -> Row:
    """A device's row: that of ZB-H1 over v M chunks of work, with a warm-up of (v-1)G + P-1-p."""
    own = place.v * place.M
    warmup = min((place.v - 1) * group(place) + place.P - 1 - place.p, own)
    return grouped(spelled(delayed("F" * warmup, own, place.p)), place)
