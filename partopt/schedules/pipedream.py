"""PipeDream's 1F1B-RR (Narayanan et al., SOSP 2019, section 3.2): asynchronous 1F1B.

Replicas of a stage take microbatches in turn. Nothing is flushed: one microbatch more than the
warm-up is in flight for as long as training lasts, and a backward uses the weights that its forward
used. An order holds a finite stretch of it, from an empty pipeline to an empty one.
"""

from __future__ import annotations

from partopt.schedules.bubble import Bubble
from partopt.schedules.entry import ALL_IN_FLIGHT, Schedule, downstream
from partopt.schedules.layout import STRAIGHT
from partopt.schedules.one_f_one_b import row

SCHEDULE = Schedule(
    name="pipedream",
    summary="PipeDream's 1F1B-RR: asynchronous, a weight version for every microbatch in flight",
    row=row,
    shape=STRAIGHT,
    asynchronous=True,
    split=False,
    uneven=True,
    recomputes=False,
    one_at_a_time=False,
    counts=downstream(1, takes_warmup=True),
    weight_versions=ALL_IN_FLIGHT,
    bubble=Bubble("0", lambda P, v, M, t: 0),
    comm="overlap",
    comm_source=(
        "PipeDream (SOSP 2019), section 4: its runtime sends and receives in threads of their own"
    ),
    tried_by_auto=False,
    data_parallel=False,
)
