"""The families of plans that the optimal planner searches, contiguous and nested ones.

A bound is first put to the relaxed probe, which stands for all families; where that does not refute
it, the family's own probe is asked.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from partopt.cost.problem import Partition, Problem
from partopt.planners.optimal.contiguous.probe import ContiguousProbe
from partopt.planners.optimal.nested.probe import NestedProbe, differs
from partopt.planners.optimal.probes import Counts, Probe
from partopt.planners.optimal.relaxed import RelaxedProbe

_NEAR = 1e-3  # relative: the interval that holds a refuted bound is halved until it is as narrow


class FamilyProbe:
    """A family's probe behind the relaxed one."""

    def __init__(self, probe: Probe, relaxed: RelaxedProbe | None) -> None:
        self.probe, self.relaxed = probe, relaxed
        self.problem, self.layers, self.family = probe.problem, probe.layers, probe.family
        self.probes = 0  # that have been asked for
        self.complete = True  # no answer left an entry out of a full cut
        # the probe has reached its limit of work: only the relaxed one still proves something
        self.gave_up = False

    def find(self, T: float, counts: Counts, stages: int | None) -> Partition | None:
        """A plan within `T` seconds, `None` where none was found."""
        self.probes += 1
        self.problem.progress(f"optimal: {self.family} plans, probe {self.probes}", 0, 1)
        if self.relaxed is not None and self.relaxed.refutes(T, counts):
            return None
        known = None if self.relaxed is None else self.relaxed.min_devices_after(T, counts)
        answer = self.probe.find(T, counts, stages, known)
        self.complete = self.complete and answer.complete
        self.gave_up = self.gave_up or answer.gave_up
        return answer.plan

    def refute_between(self, low: float, high: float, counts: Counts) -> None:
        """Find the largest bound between two finite ones that is refuted for all families."""
        while self.relaxed is not None and low < high * (1 - _NEAR) < math.inf:
            middle = (low + high) / 2
            refuted = self.relaxed.refutes(middle, counts)
            low, high = (middle, high) if refuted else (low, middle)

    def refuted_s(self, counts: Counts) -> float:
        """The largest bound refuted for all families; 0 where there is none."""
        return self.relaxed.refuted_s(counts) if self.relaxed is not None else 0.0


def families(problem: Problem) -> Iterator[FamilyProbe]:
    """The probes of the families that differ on the problem's topology: contiguous, then nested."""
    contiguous = ContiguousProbe(problem)
    if not differs(problem):
        yield FamilyProbe(contiguous, None)
        return
    relaxed = RelaxedProbe(contiguous)
    yield FamilyProbe(contiguous, relaxed)
    yield FamilyProbe(NestedProbe(problem), relaxed)
