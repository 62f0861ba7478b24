"""DualPipeV: DualPipe (DeepSeek-V3 technical report, 2024, section 3.2.1) cut in half.

No stage is held twice. The cut is Sea AI Lab's ("DualPipe could be better without the dual", 2025).
Device p holds stages p and 2P-1-p. In the steady state a forward of one chunk and a backward of the
other run at once, in one slot, so that each one's communication hides behind the other.
"""

from __future__ import annotations

from partopt.errors import PartoptError
from partopt.schedules.bubble import Bubble, are_equal
from partopt.schedules.entry import DeviceCounts, Schedule
from partopt.schedules.layout import VEE, Place
from partopt.schedules.order import Row, spell


def row(place: Place) -> Row:
    """A device's row."""
    if place.M < 2 * place.P:
        raise PartoptError(
            f"{place.M} microbatches do not fill {2 * place.P} stages",
            f"use `microbatches={2 * place.P}` or more",
            code="too-few-microbatches",
            microbatches=place.M,
            minimum=2 * place.P,
        )
    return spell(overlap_chunks(place.p, place.P, place.M))


def overlap_chunks(p: int, P: int, M: int) -> str:
    """What the device at place p of P on one side of a V does with M microbatches.

    Each microbatch passes the device twice. On the device at the turn the first forward and
    backward of the steady state stay apart: its backward need not wait for the forward. Of the last
    backwards those of its second half are in two parts, and the weights' part waits until nothing
    else is to be done.
    """
    steady = "&Fb&fB" * (M - 2 * P + p + 1)
    ending = "bB" * (p + 1)
    split = "iI" * (p + 1) + "I" * (P - 1 - p)
    last = split[p + 1 :]
    weights = last.replace("i", "w").replace("I", "W")
    return (
        "F" * (2 * (P - 1 - p))
        + "Ff" * (p + 1)
        + "iwf" * (P - 1 - p)
        + (steady[1:] if p == P - 1 else steady)
        + "b&fB" * (P - 1 - p)
        + ending[: p + 1]
        + last[: p + 1]
        + "".join(weight + "I" for weight in weights[: P - 1 - p])
        + weights[P - 1 - p :]
    )


SCHEDULE = Schedule(
    name="dualpipev",
    summary="DualPipeV: DualPipe cut in half, two chunks a device in a V",
    row=row,
    shape=VEE,
    asynchronous=False,
    split=True,
    uneven=False,
    recomputes=False,
    one_at_a_time=False,
    counts=DeviceCounts(lambda p, P, v, M: 2 * P + 1),
    weight_versions=1,
    bubble=Bubble(
        "(P-1)(F&B+B-3W)",  # F&B, a forward and a backward at once, takes F+B here
        lambda P, v, M, t: (P - 1) * (t.F + 2 * t.B - 3 * t.W),
        "F = I = W",
        lambda P, v, M, t: are_equal(t),
    ),
    comm="overlap",
    comm_source=(
        "torch 2.13 `_PipelineScheduleRuntime` posts sends and receives and waits where"
        " it needs one"
    ),
    tried_by_auto=True,
    data_parallel=False,
)
