"""What rules a bound out for all families of plans at once.

The relaxed probe is that of a problem whose ranks may lie anywhere: it has one level, takes little
time, and where it finds nothing no family has anything.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from partopt.cost.relaxed import relax
from partopt.planners.optimal.bounds import Bounds, Counts, Region
from partopt.planners.optimal.contiguous.probe import ContiguousProbe


class RelaxedProbe:
    """The probe of any ranks, which remembers what it has refuted."""

    def __init__(self, contiguous: ContiguousProbe) -> None:
        problem, shapes = contiguous.problem, contiguous.shapes
        self.probe = ContiguousProbe(problem, relax(shapes, problem.topology), contiguous.blocks)
        # what holds for any plan: more devices behind a stage do not make room in it
        self.probe.layers = self.probe.layers._replace(rebuilds=False)
        self.refuted: dict[Counts, list[Bounds]] = {}
        # where the probe of contiguous plans alone found nothing
        self.open_regions: dict[Counts, list[Region]] = {}
        # bounds within which it found something: the devices behind each cut at the least
        self.devices: dict[Counts, dict[Bounds, NDArray[np.float64]]] = {}
        # bounds with one on recomputation that it has not refuted
        self.passed: set[tuple[Counts, Bounds]] = set()

    def refutes(self, bounds: Bounds, counts: Counts) -> bool:
        """Whether no plan of any family is within the bounds."""
        bounds = bounds if self.probe.bounds_recompute else bounds.with_any_recompute()
        if any(other.dominates(bounds) for other in self.refuted.get(counts, [])):
            return True
        loose, known = bounds.with_any_recompute(), self.devices.setdefault(counts, {})
        if loose not in known:
            answer = self.probe.find(loose, counts, None, self.min_devices_after(loose, counts))
            if answer.plan is None or answer.devices_after is None:
                return self._refute(loose, counts, answer.complete)
            known[loose] = answer.devices_after
        if bounds == loose or (counts, bounds) in self.passed:
            return False
        answer = self.probe.find(bounds, counts, None, known[loose])
        if answer.plan is None:
            return self._refute(bounds, counts, answer.complete)
        self.passed.add((counts, bounds))
        return False

    def _refute(self, bounds: Bounds, counts: Counts, complete: bool) -> bool:
        if complete:
            self.refuted.setdefault(counts, []).append(bounds)
        return complete

    def min_devices_after(self, bounds: Bounds, counts: Counts) -> NDArray[np.float64] | None:
        """The fewest devices behind each cut, shape (N+1,), `None` where nothing is known.

        They come from what was found within the tightest bounds that dominate these.
        """
        known = self.devices.get(counts, {})
        looser = [other for other in known if other.dominates(bounds)]
        return known[min(looser)] if looser else None

    def refuted_s(self, counts: Counts) -> float:
        """The largest period that it has refuted; 0 where there is none."""
        return max((bounds.pace_s for bounds in self.refuted.get(counts, [])), default=0.0)
