"""How long devices wait under a schedule, in closed form, and where that form holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

# P   devices of a pipeline; v   stages on a device; M   microbatches that pass through it


class Times(NamedTuple):
    """What the actions of one stage take: a forward, and the two parts of its backward."""

    F: float
    I: float  # noqa: E741
    W: float

    @property
    def B(self) -> float:
        """A whole backward."""
        return self.I + self.W


SLOTS = Times(1, 1, 1)  # in slots, the time of a forward


@dataclass(frozen=True)
class Bubble:
    """The time in an iteration for which each device waits, of equal stages.

    Messages take no time. `text` is the formula as papers print it, `condition` where it holds, if
    not everywhere; `of` and `holds` compute them from P, v, M and the times of a stage. Of an
    asynchronous schedule it is the waiting in its steady state.
    """

    text: str
    of: Callable[[int, int, int, Times], float]
    condition: str = ""
    holds: Callable[[int, int, int, Times], bool] = lambda P, v, M, t: True


# a pipeline fills and drains once
FLUSH = Bubble("(P-1)(F+B)", lambda P, v, M, t: (P - 1) * (t.F + t.B))
# the same through several stages of a device, which too few microbatches do not keep busy
LOOPED_FLUSH = Bubble(FLUSH.text, FLUSH.of, "M >= P", lambda P, v, M, t: M >= P)
# gradients of the weights fill the drain
FILLED_DRAIN = Bubble(
    "(P-1)(F+I-W)",
    lambda P, v, M, t: (P - 1) * (t.F + t.I - t.W),
    "M >= P and W <= F, I",
    lambda P, v, M, t: M >= P and min(t.F, t.I) >= t.W,
)


def are_equal(t: Times) -> bool:
    """Whether forwards and both parts of backwards take equally long."""
    return t.F == t.I == t.W
