"""What a probe is, and what it answers."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from partopt.cost.kernels import Layers
from partopt.cost.problem import Partition, Problem

Counts = tuple[int, int]  # the fewest and the most replicas of every stage


class Answer(NamedTuple):
    """Whether there is a plan within the seconds that were asked for, and which.

    Where there is none, that is a proof if the probe is `complete` (no entry was left out of a
    full cut) and did not give up. `devices_after` are the fewest devices that the layers behind
    each cut take in what it found, shape (N+1,).
    """

    plan: Partition | None
    complete: bool = True
    gave_up: bool = False
    devices_after: NDArray[np.float64] | None = None


class Probe(Protocol):
    """Tells whether a family has a plan within given seconds, and which."""

    family: str
    problem: Problem
    layers: Layers

    def find(
        self,
        T: float,
        counts: Counts,
        stages: int | None,
        min_devices_after: NDArray[np.float64] | None = None,
    ) -> Answer:
        """A plan within `T` seconds with as many replicas of each stage as `counts` allows.

        `counts` are the fewest and the most; the plan has exactly `stages` stages, `None` for any
        number. `min_devices_after` are devices that the layers behind each cut take at the least,
        shape (N+1,).
        """
        ...
