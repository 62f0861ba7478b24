"""What rules a bound out for all families of plans at once.

The relaxed probe is that of a problem whose ranks may lie anywhere: it has one level, takes little
time, and where it finds nothing no family has anything.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from partopt.cost.relaxed import relax
from partopt.planners.optimal.contiguous.probe import ContiguousProbe
from partopt.planners.optimal.probes import Counts


class RelaxedProbe:
    """The probe of any ranks, which remembers what it has refuted."""

    def __init__(self, contiguous: ContiguousProbe) -> None:
        problem, shapes = contiguous.problem, contiguous.shapes
        relaxed = relax(shapes, problem.exchange_topology)
        self.probe = ContiguousProbe(problem, relaxed, contiguous.blocks)
        self.refuted: dict[Counts, float] = {}  # the largest bound that has no plan
        # bounds within which it found something: the devices behind each cut at the least
        self.devices: dict[Counts, dict[float, NDArray[np.float64]]] = {}

    def refutes(self, T: float, counts: Counts) -> bool:
        """Whether no plan of any family takes `T` seconds or less."""
        if self.refuted_s(counts) >= T:
            return True
        known = self.devices.setdefault(counts, {})
        if T not in known:
            answer = self.probe.find(T, counts, None, self.min_devices_after(T, counts))
            if answer.plan is None or answer.devices_after is None:
                if answer.complete:
                    self.refuted[counts] = T
                return answer.complete
            known[T] = answer.devices_after
        return False

    def min_devices_after(self, T: float, counts: Counts) -> NDArray[np.float64] | None:
        """The fewest devices behind each cut, shape (N+1,), `None` where nothing is known.

        They come from what was found within the least bound that is no less than `T`.
        """
        known = self.devices.get(counts, {})
        return known[min(looser)] if (looser := [own for own in known if own >= T]) else None

    def refuted_s(self, counts: Counts) -> float:
        """The largest bound that it has refuted; 0 where there is none."""
        return self.refuted.get(counts, 0.0)
