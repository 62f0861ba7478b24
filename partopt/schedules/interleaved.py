"""Interleaved 1F1B (Narayanan et al., SC 2021, section 2.2).

The paper is "Efficient large-scale language model training on GPU clusters". A device holds v
chunks. Microbatches go through them in groups: G through chunk 0, the same G through chunk 1, and
so on; backwards likewise from the last chunk. The paper has G = P; as in torch, M need not be a
multiple of P: there are as many groups as fit, of equal size.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from partopt.errors import PartoptError
from partopt.schedules import bubble
from partopt.schedules.entry import DeviceCounts, Schedule
from partopt.schedules.layout import LOOPED, Place
from partopt.schedules.order import F, Row, microbatch_numbers, spell

# G   microbatches of a group


def row(place: Place) -> Row:
    """A device's row: that of 1F1B over v M chunks of work, with a warm-up of (v-1)G + 2(P-1-p)."""
    own = place.v * place.M
    warmup = min((place.v - 1) * group_size(place.P, place.M) + 2 * (place.P - 1 - place.p), own)
    return spread_over_chunks(spell("F" * warmup + "FB" * (own - warmup) + "B" * warmup), place)


def group_size(P: int, M: int) -> int:
    """G: M over max(1, M // P) rounds, which must come out even."""
    rounds = max(1, M // P)
    if M % rounds:
        raise PartoptError(
            f"{M} microbatches do not divide into {rounds} equal groups, one for each time that "
            f"they fill {P} devices",
            f"use a multiple of {P}, for example `microbatches={M // P * P}`",
            code="microbatches-not-divisible",
            microbatches=M,
            devices=P,
        )
    return M // rounds


def spread_over_chunks(row: Row, place: Place) -> Row:
    """The row with each action given to its chunk.

    Forwards go up through the chunks, group by group, and the others down.
    """
    turn = microbatch_numbers(row) // group_size(place.P, place.M) % place.v
    chunk: NDArray[np.int32] = np.where(row.kind == F, turn, place.v - 1 - turn).astype(np.int32)
    return row._replace(chunk=chunk)


def _in_flight(p: int, P: int, v: int, M: int) -> int:
    return min(v * M, (v - 1) * group_size(P, M) + 2 * (P - 1 - p) + 1)


SCHEDULE = Schedule(
    name="interleaved",
    summary="1F1B over several chunks a device: a bubble as much smaller",
    row=row,
    shape=LOOPED,
    asynchronous=False,
    split=False,
    uneven=False,
    recomputes=False,
    one_at_a_time=False,
    counts=DeviceCounts(_in_flight),
    weight_versions=1,
    bubble=bubble.LOOPED_FLUSH,
    comm="overlap",
    comm_source=(
        "Megatron-LM `overlap_p2p_comm` (its default), and torch 2.13 `_PipelineScheduleRuntime` "
        "posts sends and receives and waits where it needs one"
    ),
    tried_by_auto=True,
    data_parallel=False,
)
