"""Eager 1F1B: twice the warm-up of 1F1B, which hides the latency of links at the price of memory.

Zhuang et al., "On optimizing the communication of model parallelism", MLSys 2023, section 4
("eager-1F1B"). A gradient comes back to a device two transfers for each device downstream after its
forward left; 2(P-1-p) forwards in warm-up keep it at work meanwhile. Of a replicated stage each
replica does its share of those: twice the devices downstream over its own, rounded up.
"""

from __future__ import annotations

from dataclasses import replace

from partopt.schedules import one_f_one_b
from partopt.schedules.entry import downstream

SCHEDULE = replace(
    one_f_one_b.SCHEDULE,
    name="1f1b-eager",
    summary="1F1B with twice the warm-up, which hides the links' latency",
    counts=downstream(2, takes_warmup=True),
    comm="overlap",
    comm_source="Zhuang et al. (MLSys 2023), section 4: deeper warm-ups so that messages overlap",
    data_parallel=False,
)
