"""Interleaved 1F1B with the backward in two parts, as ZB-H1 splits it (Qi et al., ICLR 2024).

It is the "ZB1P" of torch. Groups of microbatches go through the v chunks as in `interleaved`. A
warm-up of one forward for each device downstream is enough, because the gradients of the inputs
come back twice as fast; every device holds v P chunks, until their W.
"""

from __future__ import annotations

from partopt.schedules import bubble
from partopt.schedules.entry import DeviceCounts, Schedule
from partopt.schedules.interleaved import group_size, spread_over_chunks
from partopt.schedules.layout import LOOPED, Place
from partopt.schedules.order import Row, spell
from partopt.schedules.zb_h1 import delay_weights


def row(place: Place) -> Row:
    """A device's row: that of ZB-H1 over v M chunks of work, with a warm-up of (v-1)G + P-1-p."""
    own = place.v * place.M
    warmup = min((place.v - 1) * group_size(place.P, place.M) + place.P - 1 - place.p, own)
    return spread_over_chunks(spell(delay_weights("F" * warmup, own, place.p)), place)


def _in_flight(p: int, P: int, v: int, M: int) -> int:
    return min(v * M, (v - 1) * group_size(P, M) + P)


SCHEDULE = Schedule(
    name="interleaved-zb",
    summary="ZB-H1 over several chunks a device",
    row=row,
    shape=LOOPED,
    asynchronous=False,
    split=True,
    uneven=False,
    recomputes=False,
    one_at_a_time=False,
    counts=DeviceCounts(_in_flight),
    weight_versions=1,
    bubble=bubble.FILLED_DRAIN,
    comm="overlap",
    comm_source=(
        "torch 2.13 `_PipelineScheduleRuntime` posts sends and receives and waits where"
        " it needs one"
    ),
    tried_by_auto=True,
    data_parallel=False,
)
