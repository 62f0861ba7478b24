"""PipeDream-2BW (Narayanan et al., ICML 2021, section 3.1): two weight versions.

The paper is "Memory-efficient pipeline-parallel DNN training". The actions are PipeDream's. What
differs is which weights they use: the newest version and the one before it, whatever is in flight.
The paper lets gradients of several microbatches, at least P, add up between updates; here they are
exchanged after every round, as PipeDream's are.
"""

from __future__ import annotations

from partopt.schedules.entry import Schedule, downstream
from partopt.schedules.layout import STRAIGHT
from partopt.schedules.one_f_one_b import row

SCHEDULE = Schedule(
    name="pipedream-2bw",
    summary="PipeDream-2BW: asynchronous, two weight versions",
    row=row,
    shape=STRAIGHT,
    asynchronous=True,
    split=False,
    uneven=True,
    recomputes=False,
    one_at_a_time=False,
    counts=downstream(1),
    weight_versions=2,
    bubble=lambda P, v, M: 0,
    auto_chunks=(),
    data_parallel=False,
)
