"""DualPipe (DeepSeek-V3 technical report, 2024, section 3.2.1): a pipeline fed from both ends.

There are two copies of the pipeline. Device p holds stage p of the copy that starts at device 0 and
stage P-1-p of the one that starts at device P-1; half of the microbatches pass through each. Both
halves of the devices do what DualPipeV's do; where the V turns, the two copies end.
"""

from __future__ import annotations

from partopt.errors import PartoptError
from partopt.schedules.bubble import Bubble, are_equal
from partopt.schedules.dualpipev import overlap_chunks
from partopt.schedules.entry import DeviceCounts, Schedule
from partopt.schedules.layout import MIRRORED, Place
from partopt.schedules.order import Row, spell


def row(place: Place) -> Row:
    """A device's row; `place.M` microbatches pass through each copy."""
    if place.P % 2:
        raise PartoptError(
            f"{place.P} devices do not divide into two equal halves",
            f"use {place.P + 1} devices, or `schedule=dualpipev`",
            code="odd-devices",
            devices=place.P,
        )
    if place.M < place.P:
        raise PartoptError(
            f"{2 * place.M} microbatches do not fill two copies of {place.P} stages",
            f"use `microbatches={2 * place.P}` or more",
            code="too-few-microbatches",
            microbatches=2 * place.M,
            minimum=2 * place.P,
        )
    nearer = min(place.p, place.P - 1 - place.p)
    text = overlap_chunks(nearer, place.P // 2, place.M)
    return spell(text if place.p == nearer else text.swapcase())


SCHEDULE = Schedule(
    name="dualpipe",
    summary="DualPipe: two copies of the model, fed from both ends",
    row=row,
    shape=MIRRORED,
    asynchronous=False,
    split=True,
    uneven=False,
    recomputes=False,
    one_at_a_time=False,
    counts=DeviceCounts(lambda p, P, v, M: P + 1),
    weight_versions=1,
    bubble=Bubble(
        "(P/2-1)(F&B+B-3W)",  # F&B, a forward and a backward at once, takes F+B here
        lambda P, v, M, t: (P // 2 - 1) * (t.F + 2 * t.B - 3 * t.W),
        "F = I = W",
        lambda P, v, M, t: are_equal(t),
    ),
    comm="overlap",
    comm_source="DeepSeek-V3 Technical Report, section 3.2.1: overlapping is its purpose",
    tried_by_auto=True,
    data_parallel=False,
)
