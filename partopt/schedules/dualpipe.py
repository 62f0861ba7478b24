"""DualPipe (DeepSeek-V3 technical report, 2024, section 3.2.1), and DualPipeV, which is half of it.

In the steady state a forward of one stage of a device and a backward of the other run at once, in
one slot, so that the communication of either hides behind the other.

- `dualpipe`: a pipeline fed from both ends. Device p holds stage p of the copy that starts at
  device 0 and stage P-1-p of the one that starts at device P-1; half of the microbatches pass
  through either. Both halves of the devices do what DualPipeV's do; where the V turns, the two
  copies end.
- `dualpipev`: no stage is held twice (Sea AI Lab, "DualPipe could be better without the dual",
  2025). Device p holds stages p and 2P-1-p.
"""

from __future__ import annotations

from partopt.errors import PartoptError
from partopt.schedules.entry import Bubble, Schedule
from partopt.schedules.order import Row, spell
from partopt.schedules.placement import MIRRORED, VEE, Place


def row(place: Place) -> Row:
    """A device's row; `place.M` microbatches pass through either copy."""
    if place.P % 2:
        raise PartoptError(
            f"{place.P} devices do not divide into two equal halves",
            f"use {place.P + 1} devices, or `schedule=dualpipev`",
            code="odd-devices",
        )
    if place.M < place.P:
        raise _too_few(2 * place.M, 2 * place.P, f"two copies of {place.P} stages")
    nearer = min(place.p, place.P - 1 - place.p)
    text = overlap_chunks(nearer, place.P // 2, place.M)
    return spell(text if place.p == nearer else text.swapcase())


def vee_row(place: Place) -> Row:
    """A device's row."""
    if place.M < 2 * place.P:
        raise _too_few(place.M, 2 * place.P, f"{2 * place.P} stages")
    return spell(overlap_chunks(place.p, place.P, place.M))


def _too_few(microbatches: int, minimum: int, what: str) -> PartoptError:
    return PartoptError(
        f"{microbatches} microbatches do not fill {what}",
        f"use `microbatches={minimum}` or more",
        code="too-few-microbatches",
    )


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


DUALPIPE = Schedule(
    name="dualpipe",
    summary="DualPipe: two copies of the model, fed from both ends",
    row=row,
    shape=MIRRORED,
    split=True,
    in_flight=lambda p, P, v, M: P + 1,
    bubble=Bubble(
        "(P/2-1)(F&B+B-3W)",  # F&B, a forward and a backward at once, takes F+B here
        lambda P, v, M, t: (P // 2 - 1) * (t.F + 2 * t.B - 3 * t.W),
        "F = I = W",
        lambda P, v, M, t: t.F == t.I == t.W,
    ),
)

DUALPIPEV = Schedule(
    name="dualpipev",
    summary="DualPipeV: DualPipe cut in half, two chunks a device in a V",
    row=vee_row,
    shape=VEE,
    split=True,
    in_flight=lambda p, P, v, M: 2 * P + 1,
    bubble=Bubble(
        "(P-1)(F&B+B-3W)",
        lambda P, v, M, t: (P - 1) * (t.F + 2 * t.B - 3 * t.W),
        "F = I = W",
        lambda P, v, M, t: t.F == t.I == t.W,
    ),
)
