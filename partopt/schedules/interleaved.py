"""Interleaved 1F1B (Narayanan et al., "Efficient large-scale language model training on GPU
clusters", SC 2021, section 2.2).

A device holds v chunks. Microbatches go through them in groups: G through chunk 0, the same G
through chunk 1, and so on; backwards likewise from the last chunk. The paper has G = P; as torch
does, M need not be a multiple of P: the groups are as many as fit, and equal.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from partopt.errors import PartoptError
from partopt.schedules.layout import Place
from partopt.schedules.order import F, Row, counted
from partopt.schedules.order import row as spelled

# G   microbatches of a group


def row(place: Place) -> Row:
    """A device's row: that of 1F1B over v M chunks of work, with a warm-up of (v-1)G + 2(P-1-p)."""
    own = place.v * place.M
    warmup = min((place.v - 1) * group(place) + 2 * (place.P - 1 - place.p), own)
    return grouped(spelled("F" * warmup + "FB" * (own - warmup) + "B" * warmup), place)


def group(place: Place) -> int:
    """G: M over max(1, M // P) rounds, which must come out even."""
    rounds = max(1, place.M // place.P)
    if place.M % rounds:
        raise PartoptError(
            (
                f"{place.M} microbatches do not divide into {rounds} equal groups, one for "
                f"each time that they fill {place.P} devices"
            ),
            f"choose a multiple of {place.P}, for example {place.M // place.P * place.P}",
        )
    return place.M // rounds


def grouped(row: Row, place: Place) -> Row:
    """The row with each action given to its chunk: forwards go up through the chunks, group by
    group, and the others down.
    """
    turn = counted(row) // group(place) % place.v
    chunk: NDArray[np.int32] = np.where(row.kind == F, turn, place.v - 1 - turn).astype(np.int32)
    return row._replace(chunk=chunk)
