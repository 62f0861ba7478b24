"""DualPipe (DeepSeek-V3 technical report, 2024, section 3.2.1): two copies of the pipeline, fed
from both ends.

Device p holds stage p of the copy that starts at device 0 and stage P-1-p of the one that starts at
device P-1; half of the microbatches pass through each. Both halves of the devices do what
DualPipeV's do, the ends of the two copies in the place of the V's turn.
"""

from __future__ import annotations

from partopt.errors import PartoptError
from partopt.schedules.dualpipev import overlapped
from partopt.schedules.layout import Place
from partopt.schedules.order import Row
from partopt.schedules.order import row as spelled


def row(place: Place) -> Row:
    """A device's row; `place.M` microbatches pass through each copy."""
    if place.P % 2:
        raise PartoptError(
            f"{place.P} devices have no two equal halves",
            f"choose {place.P + 1} devices, or the schedule dualpipev",
        )
    if place.M < place.P:
        raise PartoptError(
            f"{2 * place.M} microbatches do not fill two copies of {place.P} stages",
            f"choose {2 * place.P} or more",
        )
    nearer = min(place.p, place.P - 1 - place.p)
    text = overlapped(nearer, place.P // 2, place.M)
    return spelled(text if place.p == nearer else text.swapcase())
