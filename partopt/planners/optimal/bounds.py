"""The bounds that plans are asked to keep: on the period, or on what an iteration is made of."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

Counts = tuple[int, int]  # the least and the most replicas of every stage


@dataclass(frozen=True, order=True)
class Bounds:
    """Seconds that a plan may take; infinite where a bound is not set.

    Asynchronous: `pace_s` is of the period. Synchronous: of X, what the slowest stage adds to one
    microbatch's pass; `update_s` of U, the all-reduce and the optimizer's step of each stage, once
    an iteration; `recompute_s` of E, what stages that choose to recompute add to the pass.
    """

    pace_s: float
    update_s: float = math.inf
    recompute_s: float = math.inf

    def dominates(self, other: Bounds) -> bool:
        """Whether every plan within `other` is within these bounds."""
        return (
            self.pace_s >= other.pace_s
            and self.update_s >= other.update_s
            and self.recompute_s >= other.recompute_s
        )

    def with_any_recompute(self) -> Bounds:
        """The same bounds on X and U alone."""
        return replace(self, recompute_s=math.inf)


class Region(NamedTuple):
    """The plans with X in (`x`, `most_x`] and U in (`u`, `most_u`].

    None takes less than one pass and `bound`.
    """

    bound: float
    u: float
    most_u: float
    x: float
    most_x: float
    tries: int = 0  # targets that no plan has met
