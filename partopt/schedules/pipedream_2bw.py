"""PipeDream-2BW (Narayanan et al., "Memory-efficient pipeline-parallel DNN training", ICML 2021,
section 3.1): two weight versions.

The actions are PipeDream's. What differs is which weights they use: the newest version and the one
before it, whatever is in flight. The paper lets gradients of several microbatches, at least P, add
up between updates; here they are exchanged after every round, as PipeDream's are.
"""

from __future__ import annotations

from partopt.schedules.one_f_one_b import row

__all__ = ["row"]
