"""PipeDream-2BW (Narayanan et al., "Memory-efficient pipeline-parallel DNN training", ICML 2021, section 3.1): two weight versions.

The actions are PipeDream's. What differs is which weights they use: the newest version and the one before it, whatever is in flight.
"""

from __future__ import annotations

from partopt.schedules.one_f_one_b import row

__all__ = ["row"]
