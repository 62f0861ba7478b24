"""Eager 1F1B: twice the warm-up of 1F1B, which hides the latency of links at the price of memory.

Zhuang et al., "On optimizing the communication of model parallelism", MLSys 2023, section 4
("eager-1F1B"). A gradient comes back to a device two transfers for each device downstream after its
forward left; 2(P-1-p) forwards in warm-up keep it at work meanwhile. Of a replicated stage each
replica does its share of those: twice the devices downstream over its own, rounded up.
"""

from __future__ import annotations

from partopt.schedules.entry import Schedule, downstream
from partopt.schedules.layout import STRAIGHT
from partopt.schedules.one_f_one_b import row

SCHEDULE = Schedule(
    name="1f1b-eager",
    summary="1F1B with twice the warm-up, which hides the links' latency",
    row=row,
    shape=STRAIGHT,
    asynchronous=False,
    split=False,
    uneven=True,
    recomputes=False,
    one_at_a_time=False,
    counts=downstream(2),
    weight_versions=1,
    bubble=lambda P, v, M: 3 * (P - 1),
    auto_chunks=(1,),
    data_parallel=False,
)
