"""The families of plans that the optimal planner searches, contiguous and nested ones.

A bound is first put to the relaxed probe, which stands for all families; where that does not refute
it, the family's own probe is asked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from partopt.cost.problem import Partition, Problem
from partopt.planners.optimal.bounds import Bounds, Counts, Region
from partopt.planners.optimal.contiguous.probe import ContiguousProbe
from partopt.planners.optimal.nested.probe import NestedProbe, differs
from partopt.planners.optimal.probes import Probe
from partopt.planners.optimal.relaxed import RelaxedProbe

_Floors = Callable[[Counts], tuple[float, float]]


class FamilyProbe:
    """A family's probe behind the relaxed one.

    The family that is searched first records the regions that it refutes, and the others look at
    these alone. `floors_s` says what X and U of a synchronous plan do not go below.
    """

    def __init__(
        self, probe: Probe, floors_s: _Floors, relaxed: RelaxedProbe | None, first: bool
    ) -> None:
        self.probe, self.floors_s, self.relaxed, self.first = probe, floors_s, relaxed, first
        self.problem, self.layers, self.family = probe.problem, probe.layers, probe.family
        self.bounds_recompute = probe.bounds_recompute
        self.probes = 0  # that have been asked for
        self.complete = True  # no answer left an entry out of a full cut
        # the probe has reached its limit of work: only the relaxed one still proves something
        self.gave_up = False

    def find(self, bounds: Bounds, counts: Counts, stages: int | None) -> Partition | None:
        """A plan within the bounds, `None` where none was found.

        The bound on recomputation is kept only where `bounds_recompute`.
        """
        self.probes += 1
        self.problem.progress(f"optimal: {self.family} plans, probe {self.probes}", 0, 1)
        if self.relaxed is not None and self.relaxed.refutes(bounds, counts):
            return None
        known = None if self.relaxed is None else self.relaxed.min_devices_after(bounds, counts)
        own = bounds if self.bounds_recompute else bounds.with_any_recompute()
        answer = self.probe.find(own, counts, stages, known)
        self.complete = self.complete and answer.complete
        self.gave_up = self.gave_up or answer.gave_up
        return answer.plan

    def regions(self, counts: Counts, whole: Region) -> list[Region]:
        """The regions in which the family may have plans.

        The `whole`, or for a later family those that only the first family's probe refuted.
        """
        if self.relaxed is None or self.first:
            return [whole]
        return list(self.relaxed.open_regions.get(counts, []))

    def leave_open(self, region: Region, bounds: Bounds, counts: Counts) -> None:
        """Record a region that the contiguous probe refuted but the relaxed one did not."""
        if self.relaxed is None or not self.first or self.relaxed.refutes(bounds, counts):
            return
        part = region._replace(
            bound=region.x + region.u,
            tries=0,
            most_x=min(region.most_x, bounds.pace_s),
            most_u=min(region.most_u, bounds.update_s),
        )
        self.relaxed.open_regions.setdefault(counts, []).append(part)

    def within_memory(self, memory_bytes: int) -> FamilyProbe:
        """The same family within so much memory a device, no more than the relaxed probe has."""
        probe = self.probe.within_memory(memory_bytes)
        return FamilyProbe(probe, self.floors_s, self.relaxed, self.first)

    def refuted_s(self, counts: Counts) -> float:
        """The largest period refuted for all families; 0 where there is none."""
        return self.relaxed.refuted_s(counts) if self.relaxed is not None else 0.0


def families(problem: Problem) -> Iterator[FamilyProbe]:
    """The probes of the families that differ on the problem's topology: contiguous, then nested."""
    contiguous = ContiguousProbe(problem)
    if not differs(problem):
        yield FamilyProbe(contiguous, contiguous.floors_s, None, first=True)
        return
    relaxed = RelaxedProbe(contiguous)
    floors_s = relaxed.probe.floors_s
    yield FamilyProbe(contiguous, floors_s, relaxed, first=True)
    yield FamilyProbe(NestedProbe(problem), floors_s, relaxed, first=False)
