"""PipeDream's 1F1B-RR (Narayanan et al., SOSP 2019, section 3.2): asynchronous 1F1B, replicas of a
stage taking microbatches in turn.

Nothing is flushed: as many microbatches as the warm-up and one more are in flight for as long as
training lasts, and a backward uses the weights that its forward used. An order holds a finite
stretch of it, from an empty pipeline to an empty one.
"""

from __future__ import annotations

from partopt.schedules.one_f_one_b import row

__all__ = ["row"]
