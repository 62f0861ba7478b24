"""Naive model parallelism: one microbatch at a time goes forward and back, and one device works."""

from __future__ import annotations

from partopt.schedules.bubble import Bubble
from partopt.schedules.entry import Schedule, StageCounts, only_one
from partopt.schedules.layout import STRAIGHT, Place
from partopt.schedules.order import Row, spell


def row(place: Place) -> Row:
    """A device's row: F0 B0 F1 B1 .."""
    return spell("FB" * place.M)


SCHEDULE = Schedule(
    name="naive",
    summary="one microbatch at a time, one device at work",
    row=row,
    shape=STRAIGHT,
    asynchronous=False,
    split=False,
    uneven=True,
    recomputes=False,
    one_at_a_time=True,
    counts=StageCounts(
        in_flight=lambda s, replicas, M: 1,
        begun=only_one,
        warmup=lambda s, replicas, M: 0,
        takes_warmup=False,
        kernel=None,
    ),
    weight_versions=1,
    bubble=Bubble("M(P-1)(F+B)", lambda P, v, M, t: M * (P - 1) * (t.F + t.B)),
    comm="overlap",
    comm_source="one device works at a time: there is nothing to overlap",
    tried_by_auto=True,
    data_parallel=False,
)
