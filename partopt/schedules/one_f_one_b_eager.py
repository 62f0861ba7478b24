"""Eager 1F1B: twice the warm-up of 1F1B, which hides the latency of links at the price of memory.

Zhuang et al., "On optimizing the communication of model parallelism", MLSys 2023, section 4
("eager-1F1B"). A gradient comes back to a device two transfers for each device downstream after its
forward left; 2(P-1-p) forwards in warm-up keep it at work meanwhile. Of a replicated stage each
replica does its share of those: twice the devices downstream over its own, rounded up.
"""

from __future__ import annotations

from partopt.schedules.one_f_one_b import row

__all__ = ["row"]
