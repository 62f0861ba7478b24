"""DualPipeV: DualPipe (DeepSeek-V3 technical report, 2024, section 3.2.1) cut in half, so that no
stage is held twice.

The cut is Sea AI Lab's ("DualPipe could be better without the dual", 2025). Device p holds stages p
and 2P-1-p. In the steady state a forward of one chunk and a backward of the other run at once, in
one slot, so that each one's communication hides behind the other.
"""

from __future__ import annotations

from partopt.errors import PartoptError
from partopt.schedules.layout import Place
from partopt.schedules.order import Row
from partopt.schedules.order import row as spelled


def row(place: Place) -> Row:
    """A device's row."""
    if place.M < 2 * place.P:
        raise PartoptError(
            f"{place.M} microbatches do not fill {2 * place.P} stages",
            f"choose {2 * place.P} or more",
        )
    return spelled(overlapped(place.p, place.P, place.M))


def overlapped(p: int, P: int, M: int) -> str:
    """What the device at place p of P on one side of a V does with M microbatches, each passing it
    twice.

    On the device at the turn the first forward and backward of the steady state stay apart: its
    backward need not wait for the forward. Of the last backwards those of its second half are in
    two parts, and the weights' wait until nothing else is to be done.
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
