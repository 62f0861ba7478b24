"""1F1B with a flush (PipeDream-flush; Narayanan et al., ICML 2021).

A short warm-up comes first, then one forward and one backward in turn.
"""

from __future__ import annotations

from partopt.schedules import bubble
from partopt.schedules.entry import Schedule, downstream
from partopt.schedules.layout import STRAIGHT, Place
from partopt.schedules.order import Row, spell


def row(place: Place) -> Row:
    """A device's row: its warm-up of forwards, F B in turn, then the backwards that are left."""
    warmup = min(place.warmup, place.M)
    return spell("F" * warmup + "FB" * (place.M - warmup) + "B" * warmup)


SCHEDULE = Schedule(
    name="1f1b",
    summary="PipeDream-flush: one forward, one backward in turn, then a flush",
    row=row,
    shape=STRAIGHT,
    asynchronous=False,
    split=False,
    uneven=True,
    recomputes=False,
    one_at_a_time=False,
    counts=downstream(1, takes_warmup=False),
    weight_versions=1,
    bubble=bubble.FLUSH,
    comm="serial",
    comm_source=(
        "Megatron-LM `send_forward_recv_backward`, DeepSpeed `p2p.send` and `p2p.recv`,"
        " torch `Schedule1F1B`: all wait"
    ),
    tried_by_auto=True,
    data_parallel=True,
)
