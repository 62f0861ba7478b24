"""What a simulation found: every action, transfer and all-reduce with its start and its end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from partopt.schedules.order import Order

Times = NDArray[Any]  # seconds: float64, or Fractions of the exact reference


@dataclass(frozen=True, eq=False)
class Transfers:
    """Activations (kind F) and gradients (kind B) between two ranks, n of them.

    They are ordered by kind, stage and microbatch of the sender.
    """

    kind: NDArray[np.int8]  # shape (n,)
    stage: NDArray[np.int32]  # of the sender
    microbatch: NDArray[np.int32]
    source: NDArray[np.int32]  # ranks
    destination: NDArray[np.int32]
    start: Times  # on the wire, after the ports were free
    end: Times  # arrival, latency included


@dataclass(frozen=True, eq=False)
class Collectives:
    """All-reduces of gradients, ordered by stage and round; n of them."""

    stage: NDArray[np.int32]  # shape (n,)
    round: NDArray[np.int32]
    start: Times
    end: Times


@dataclass(frozen=True, eq=False)
class Timeline:
    """An executed order; `start` and `end` are of its actions, from 0 s, shape (actions,)."""

    order: Order
    start: Times
    end: Times
    transfers: Transfers
    collectives: Collectives

    @property
    def makespan(self) -> Any:
        """Seconds from the first start to the last end."""
        return max(self.end.max(), self.collectives.end.max(initial=0)) if len(self.end) else 0.0
