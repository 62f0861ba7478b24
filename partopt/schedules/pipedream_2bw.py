"""PipeDream-2BW (Narayanan et al., ICML 2021, section 3.1): two weight versions.

The paper is "Memory-efficient pipeline-parallel DNN training". The actions are PipeDream's. What
differs is which weights they use: the newest version and the one before it, whatever is in flight.
The paper lets gradients of several microbatches, at least P, add up between updates; here they are
exchanged after every round, as PipeDream's are.
"""

from __future__ import annotations

from dataclasses import replace

from partopt.schedules import pipedream

SCHEDULE = replace(
    pipedream.SCHEDULE,
    name="pipedream-2bw",
    summary="PipeDream-2BW: asynchronous, two weight versions",
    weight_versions=2,
)
