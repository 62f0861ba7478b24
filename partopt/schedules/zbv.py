"""ZB-V (Qi et al., "Pipeline parallelism with controllable memory", NeurIPS 2024, section 3.2): a V of 2P half-chunks, no flush bubble.

Device p holds stages p and 2P-1-p, so that the last stage shares a device with the first. A microbatch that has come back up the V is
taken through its backward at once. With F = I = W the devices do not wait from M = 2P on.
"""

from __future__ import annotations

from partopt.schedules.layout import Place
from partopt.schedules.order import Row, counted
from partopt.schedules.order import row as spelled


def row(place: Place) -> Row:
    """A device's row. Of fewer than 2P-1 microbatches it is what a row of 2P-1 does with those."""
    p, P, M = place.p, place.P, max(place.M, 2 * place.P - 1)
    whole = spelled(
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
    kept = counted(whole) < place.M
    return Row(whole.kind[kept], whole.chunk[kept], whole.joined[kept])
