"""ZB-V (Qi et al., ICLR 2024, section 6): backwards in two parts on a V of 2P half-chunks.

The paper is "Zero bubble pipeline parallelism". It is the "V-ZB" of their "Pipeline parallelism
with controllable memory", NeurIPS 2024, where its memory is derived from its building block. Device
p holds stages p and 2P-1-p, so that the last stage shares a device with the first. A microbatch
that has come back up the V is taken through its backward at once. With F = I = W and M >= 2P a
device waits only until its first microbatch comes, and after its last.
"""

from __future__ import annotations

from partopt.schedules.bubble import FILLED_DRAIN, Bubble, are_equal
from partopt.schedules.entry import DeviceCounts, Schedule
from partopt.schedules.layout import VEE, Place
from partopt.schedules.order import Row, microbatch_numbers, spell


def row(place: Place) -> Row:
    """A device's row. Of fewer than 2P-1 microbatches it is what a row of 2P-1 does with those."""
    p, P, M = place.p, place.P, max(place.M, 2 * place.P - 1)
    whole = spell(
        "F" * (2 * (P - p) - 1)
        + "fF" * p
        + "fiw" * (P - p)
        + "FIWfiw" * (M - 2 * P + p + 1)
        + "IWfiw" * (P - p - 1)
        + "Ii" * p
        + "IW" * (P - p)
        + "w" * p
        + "W" * p
    )
    kept = microbatch_numbers(whole) < place.M
    return Row(whole.kind[kept], whole.chunk[kept], whole.joined[kept])


SCHEDULE = Schedule(
    name="zbv",
    summary="ZB-V: two chunks a device in a V, backwards in two parts, 1F1B's memory",
    row=row,
    shape=VEE,
    asynchronous=False,
    split=True,
    uneven=False,
    recomputes=False,
    one_at_a_time=False,
    counts=DeviceCounts(lambda p, P, v, M: min(2 * M, M + 1 + p, 2 * P)),
    weight_versions=1,
    bubble=Bubble(
        "(P-1)(F+I-W)",
        FILLED_DRAIN.of,
        "M >= 2P and F = I = W",
        lambda P, v, M, t: M >= 2 * P and are_equal(t),
    ),
    comm="overlap",
    comm_source=(
        "torch 2.13 `_PipelineScheduleRuntime` posts sends and receives and waits where"
        " it needs one"
    ),
    tried_by_auto=True,
    data_parallel=False,
)
