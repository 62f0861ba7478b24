"""The families of plans that the optimal planner searches, and what rules a bound out for all of
them at once.

A screen is the probe of a problem whose ranks may lie anywhere: it has one level, takes little
time, and where it finds nothing no family has anything. Where it finds something, the probe of a
family is asked.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from partopt.cost.kernels import Layers
from partopt.cost.problem import CONTIGUOUS, NESTED, Partition, Problem
from partopt.cost.relaxed import relaxed
from partopt.planners import nested
from partopt.planners.nested import NestedProbe
from partopt.planners.searching import ENDLESS, Counts, Probe

# T, U   seconds: as `partopt.planners.searching` has them

Asked = tuple[float, float, Counts]


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


class Screen:
    """The probe of any ranks, which remembers what it has refused."""

    def __init__(self, contiguous: Probe) -> None:
        self.probe = Probe(
            contiguous.problem, relaxed(contiguous.shapes, contiguous.problem.topology)
        )
        # bounds, the last on what recomputing adds
        self.refused: list[tuple[float, float, Counts, float]] = []
        # where the probe of contiguous plans alone found nothing
        self.left_open: dict[Counts, list[Region]] = {}
        self.behind_at: dict[Asked, NDArray[np.float64]] = {}
        # bounds, that on what recomputing adds among them, that it has not refused
        self.passed: set[tuple[Asked, float]] = set()

    def refuses(self, T: float, U: float, counts: Counts, extra_s: float = ENDLESS) -> bool:
        """Whether no plan of any family is within the bounds, that on what recomputing adds among
        them.
        """
        tighter = (
            other
            for other in self.refused
            if other[0] >= T and other[1] >= U and counts == other[2] and extra_s <= other[3]
        )
        if next(tighter, None) is not None:
            return True
        asked = (T, U, counts)
        if asked not in self.behind_at:
            if self.probe.find(T, U, counts, None, behind=self.behind(*asked)) is None:
                return self._refuse(T, U, counts, ENDLESS)
            self.behind_at[asked] = self.probe.tables[0].used.copy()
        if extra_s >= ENDLESS or (asked, extra_s) in self.passed:
            return False
        if self.probe.find(T, U, counts, None, extra_s, self.behind_at[asked]) is None:
            return self._refuse(T, U, counts, extra_s)
        self.passed.add((asked, extra_s))
        return False

    def _refuse(self, T: float, U: float, counts: Counts, extra_s: float) -> bool:
        if self.probe.complete:
            self.refused.append((T, U, counts, extra_s))
        return self.probe.complete

    def behind(self, T: float, U: float, counts: Counts) -> NDArray[np.float64] | None:
        """Devices behind each cut at the least, by what was found within bounds no tighter than
        these, the tightest; shape (N+1,).
        """
        looser = [
            other
            for other in self.behind_at
            if other[0] >= T and other[1] >= U and counts == other[2]
        ]
        return self.behind_at[min(looser)] if looser else None

    def refused_s(self, counts: Counts) -> float:
        """The largest period that it has refused; 0 where there is none."""
        return max(
            (T for T, U, other, _ in self.refused if U == 0.0 and other == counts), default=0.0
        )


class Screened:
    """A family's probe behind the screen."""

    def __init__(self, probe: Probe | NestedProbe, screen: Screen | None) -> None:
        self.probe, self.screen, self.asked = probe, screen, 0
        self.family = CONTIGUOUS if isinstance(probe, Probe) else NESTED

    @property
    def problem(self) -> Problem:
        """The problem."""
        return self.probe.problem

    @property
    def layers(self) -> Layers:
        """Its chain."""
        return self.probe.layers

    @property
    def complete(self) -> bool:
        """Whether no entry was ever left out for want of room."""
        return self.probe.complete

    def regions(self, counts: Counts, whole: Region) -> list[Region]:
        """Where there may be plans of the family: in the `whole`, nested ones only where contiguous
        ones alone were refused.
        """
        if self.screen is None or isinstance(self.probe, Probe):
            return [whole]
        return list(self.screen.left_open.get(counts, []))

    def leave_open(
        self, region: Region, caps: tuple[float, float], counts: Counts, extra_s: float
    ) -> None:
        """Take down that nothing was found in a region within the bounds, unless the screen did it,
        or all has been searched.
        """
        if (
            self.screen is not None
            and isinstance(self.probe, Probe)
            and not self.screen.refuses(*caps, counts, self._kept(extra_s))
        ):
            most_x, most_u = min(region.most_x, caps[0]), min(region.most_u, caps[1])
            part = region._replace(bound=region.x + region.u, tries=0, most_x=most_x, most_u=most_u)
            self.screen.left_open.setdefault(counts, []).append(part)

    def _kept(self, extra_s: float) -> float:
        """The bound on what recomputing adds, where it varies."""
        return extra_s if self.screen is not None and self.screen.probe.bounds_extra else ENDLESS

    @property
    def gave_up(self) -> bool:
        """Whether the probe has done all the work that it may: from then on only the screen proves
        something.
        """
        return isinstance(self.probe, NestedProbe) and self.probe.gave_up

    def within_memory(self, memory_bytes: int) -> Screened:
        """The same family within so much memory a device, no more than the screen has."""
        return Screened(self.probe.within_memory(memory_bytes), self.screen)

    def refused_s(self, counts: Counts) -> float:
        """A period that no plan of any family has, nor a shorter one."""
        return self.screen.refused_s(counts) if self.screen is not None else 0.0

    @property
    def bounds_extra(self) -> bool:
        """Whether what recomputing adds to the pass of a microbatch varies, and can be bounded."""
        return isinstance(self.probe, Probe) and self.probe.bounds_extra

    def floors_s(self, counts: Counts) -> tuple[float, float]:
        """What X and U of a synchronous plan do not go below:
        `partopt.planners.searching.Probe.floors_s`.
        """
        bounding = self.probe if self.screen is None else self.screen.probe
        assert isinstance(bounding, Probe), "nested plans are searched behind a screen"
        return bounding.floors_s(counts)

    def find(
        self, T: float, U: float, counts: Counts, stages: int | None, extra_s: float = ENDLESS
    ) -> Partition | None:
        """A plan within the bounds, of which that on what recomputing adds is kept where
        `bounds_extra`; `None` where none was found.
        """
        self.asked += 1
        self.problem.progress(f"optimal: {self.family} plans, probe {self.asked}", 0, 1)
        if self.screen is not None and self.screen.refuses(T, U, counts, self._kept(extra_s)):
            return None
        behind = None if self.screen is None else self.screen.behind(T, U, counts)
        if isinstance(self.probe, Probe):
            return self.probe.find(T, U, counts, stages, extra_s, behind)
        return self.probe.find(T, U, counts, stages, behind)


def families(problem: Problem) -> Iterator[Screened]:
    """The probes of the families of plans that differ on the problem's topology: contiguous ones,
    then nested ones.
    """
    contiguous = Probe(problem)
    if not nested.differs(problem):
        yield Screened(contiguous, None)
        return
    screen = Screen(contiguous)
    yield Screened(contiguous, screen)
    yield Screened(NestedProbe(problem), screen)
