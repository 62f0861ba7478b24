"""Interleaved 1F1B over v chunks a device, with whole backwards and with backwards in two parts.

Narayanan et al., "Efficient large-scale language model training on GPU clusters", SC 2021, section
2.2. Microbatches go through the chunks of a device in groups: G through chunk 0, the same G through
chunk 1, and so on; backwards likewise from the last chunk. The paper has G = P; as in torch, M need
not be a multiple of P: there are as many groups as fit, of equal size.

`interleaved-zb` splits backwards as ZB-H1 does (Qi et al., ICLR 2024); it is the "ZB1P" of torch. A
warm-up of one forward for every device downstream is enough, because the gradients of the inputs
come back twice as fast; every device holds v P chunks, until their W.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from partopt.documents.actions import F
from partopt.errors import PartoptError
from partopt.schedules.entry import FILLED_DRAIN, FLUSH, Bubble, Schedule
from partopt.schedules.one_f_one_b import delay_weights
from partopt.schedules.order import Row, microbatch_numbers, spell
from partopt.schedules.placement import LOOPED, Place

# G   microbatches of a group


def row(place: Place) -> Row:
    """A device's row: that of 1F1B over v M chunks of work, with a warm-up of (v-1)G + 2(P-1-p)."""
    vM = place.v * place.M
    warmup = min((place.v - 1) * group_size(place.P, place.M) + 2 * (place.P - 1 - place.p), vM)
    return spread_over_chunks(spell("F" * warmup + "FB" * (vM - warmup) + "B" * warmup), place)


def split_row(place: Place) -> Row:
    """A device's row: that of ZB-H1 over v M chunks of work, with a warm-up of (v-1)G + P-1-p."""
    vM = place.v * place.M
    warmup = min((place.v - 1) * group_size(place.P, place.M) + place.P - 1 - place.p, vM)
    return spread_over_chunks(spell(delay_weights("F" * warmup, vM, place.p)), place)


def group_size(P: int, M: int) -> int:
    """G: M over max(1, M // P) rounds, which must come out even."""
    rounds = max(1, M // P)
    if M % rounds:
        raise PartoptError(
            f"{M} microbatches do not divide into {rounds} equal groups, one for each time that "
            f"they fill {P} devices",
            f"use a multiple of {P}, for example `microbatches={M // P * P}`",
            code="microbatches-not-divisible",
        )
    return M // rounds


def spread_over_chunks(row: Row, place: Place) -> Row:
    """The row with every action given to its chunk.

    Forwards go up through the chunks, group by group, and the others down.
    """
    turn = microbatch_numbers(row) // group_size(place.P, place.M) % place.v
    chunk: NDArray[np.int32] = np.where(row.kind == F, turn, place.v - 1 - turn).astype(np.int32)
    return row._replace(chunk=chunk)


INTERLEAVED = Schedule(
    name="interleaved",
    summary="1F1B over several chunks a device: a bubble as much smaller",
    row=row,
    shape=LOOPED,
    in_flight=lambda p, P, v, M: min(v * M, (v - 1) * group_size(P, M) + 2 * (P - 1 - p) + 1),
    # too few microbatches do not keep the stages of a device busy
    bubble=Bubble(FLUSH.text, FLUSH.of, "M >= P", lambda P, v, M, t: M >= P),
)

INTERLEAVED_ZB = Schedule(
    name="interleaved-zb",
    summary="ZB-H1 over several chunks a device",
    row=split_row,
    shape=LOOPED,
    split=True,
    in_flight=lambda p, P, v, M: min(v * M, (v - 1) * group_size(P, M) + P),
    bubble=FILLED_DRAIN,
)
