"""The costs of PipeDream's published recurrence: every level a bus without latency.

Narayanan et al., SOSP 2019, section 3.1. Compiled, because the planner's inner loop calls them; `B`
is beta_k * links_k of the level.
"""

from __future__ import annotations

from partopt.cost.compiled import compiled


@compiled(inline="always")
def stage_s(inner_s: float, weight_bytes: float, m: int, B: float) -> float:
    """T: seconds per microbatch of one stage replicated m times.

    The slower of its compute and its weight exchange, over m.
    """
    return max(inner_s, 2.0 * (m - 1) * weight_bytes / B) / m


@compiled(inline="always")
def cut_s(cut_bytes: float, B: float) -> float:
    """Seconds for the activation and its gradient across a cut, on a bus."""
    return 2.0 * cut_bytes / B
