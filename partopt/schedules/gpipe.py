"""GPipe (Huang et al., NeurIPS 2019, section 2.3): all forwards, then all backwards.

With re-materialisation a device computes a forward once more before its backward, and begins while
it waits for the gradient.
"""

from __future__ import annotations

from partopt.schedules import bubble
from partopt.schedules.entry import OWN, Kernel, Schedule, StageCounts, all_own, only_one
from partopt.schedules.layout import STRAIGHT, Place
from partopt.schedules.order import Row, spell


def row(place: Place) -> Row:
    """A device's row: F0 F1 .. B0 B1 .."""
    return spell("F" * place.M + ("RB" if place.recompute else "B") * place.M)


SCHEDULE = Schedule(
    name="gpipe",
    summary="GPipe: all forwards, then all backwards",
    row=row,
    shape=STRAIGHT,
    asynchronous=False,
    split=False,
    uneven=True,
    recomputes=True,
    one_at_a_time=False,
    counts=StageCounts(all_own, only_one, all_own, takes_warmup=False, kernel=Kernel(OWN)),
    weight_versions=1,
    bubble=bubble.FLUSH,
    comm="overlap",
    comm_source="torch 2.13 `ScheduleGPipe` posts sends and waits for them at the end",
    tried_by_auto=True,
    data_parallel=True,
)
