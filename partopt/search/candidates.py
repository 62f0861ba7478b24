"""Grids of equal pipelines under every synchronous schedule, estimated: what may be simulated."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations
from math import comb

import numpy as np

from partopt.cost.period import tied_exchange_s
from partopt.cost.problem import CONTIGUOUS, NESTED, Assignment, Partition, Problem
from partopt.documents.topology import Topology
from partopt.planners import gpipe
from partopt.planners.placing import stage_multiple, stages_a_device
from partopt.schedules import SCHEDULES, refusal
from partopt.schedules.entry import Schedule
from partopt.schedules.layout import CHUNKS, STRAIGHT, ranks_of
from partopt.search.grid import Floats, Grid, Stages, estimate_s, least_s, stages_between
from partopt.search.splits import balance_devices, split_within_memory, stage_bytes
from partopt.simulator.ports import ports_of

# P   devices; p   those of a pipeline; d   pipelines side by side
# v   stages on a device; S   stages; M   microbatches of an iteration

FEW_SPLITS = 32  # into so many stages, up to which all are tried
FEW = 8  # devices up to which some of them may stay idle in any grid
_MARGIN = 1.5  # by which the formulas may exceed the memory that the order of a schedule takes
MANY = 64  # devices above which none of them may
_BUSY = 0.75  # of the devices in between those that have work


@dataclass(frozen=True, eq=False)
class Candidate:
    """Stages on a grid under a schedule; times are seconds of a sample."""

    problem: Problem
    family: str
    stages: Stages
    grid: Grid
    for_memory: bool = False  # its cuts are chosen for what fits

    @cached_property
    def partition(self) -> Partition:
        """The stages with their ranks."""
        bounds = self.stages.bounds
        laid = zip(bounds[:-1], bounds[1:], self.grid.ranks, strict=True)
        return Partition(self.family, [Assignment(*each) for each in laid])

    @property
    def samples(self) -> int:
        """Samples of an iteration."""
        assert self.problem.microbatches is not None
        return self.problem.microbatches * self.problem.chain.microbatch_size

    @property
    def floor_s(self) -> float:
        """A bound of both of the others that is quick to compute: devices are never idle."""
        all_s = float(self.stages.compute_s.sum()) / self.grid.devices
        one_s = float(self.stages.compute_s.max()) / self.grid.replicas
        return max(all_s, one_s) / self.problem.chain.microbatch_size

    @cached_property
    def estimate_s(self) -> float:
        """The estimate by the closed forms."""
        return estimate_s(self.stages, self.grid, self.problem, self._tied_s) / self.samples

    @cached_property
    def least_s(self) -> float:
        """What no simulation goes below."""
        return least_s(self.stages, self.grid, self.problem, self._tied_s) / self.samples

    @cached_property
    def _tied_s(self) -> Floats:
        S = len(self.grid.ranks)
        if not self.problem.chain.tied:
            return np.zeros(S)
        return np.array([tied_exchange_s(self.partition, s, self.problem) for s in range(S)])

    @property
    def effort(self) -> int:
        """About what a simulation takes; see `effort_of`."""
        assert self.problem.microbatches is not None
        S = len(self.grid.ranks)
        return effort_of(S, S * self.grid.replicas, self.problem.microbatches)

    def within_memory(self) -> Candidate | None:
        """The grid with cuts chosen for what fits; None where these are they."""
        if self.for_memory:
            return None
        coarse, bounds = self.problem.coarsen(), self.problem.boundaries()
        split = split_within_memory(len(self.grid.ranks), self.grid.replicas, coarse)
        cuts = None if split is None else [bounds[cut] for cut in split]
        if cuts is None or cuts == list(self.stages.bounds):
            return None
        return replace(self, stages=stages_between(cuts, self.problem), for_memory=True)

    @cached_property
    def needs_bytes(self) -> float:
        """Bytes on the fullest device by the formulas."""
        pipelines, places = self.grid.replicas, self.grid.places.ravel()
        held, transient = stage_bytes(self.stages.bounds, pipelines, self.problem)
        needs, most = np.zeros((2, self.problem.topology.devices))
        np.add.at(needs, places, np.repeat(held, pipelines))
        np.maximum.at(most, places, np.repeat(transient, pipelines))
        return float((needs + most).max())

    @property
    def may_fit(self) -> bool:
        """Whether it may fit, as far as the formulas tell."""
        limit = self.problem.memory_bytes
        return limit is None or self.needs_bytes <= _MARGIN * limit


def effort_of(stages: int, places: int, microbatches: int) -> int:
    """About what the simulation of a plan takes, in the time of an action.

    It executes actions, prices `places`, the replicas of all stages, and has a beginning.
    """
    return 2 * stages * microbatches + 30 * places + 5_000


def candidates(problems: Iterable[Problem]) -> Iterator[Candidate]:
    """Every grid of every problem under every schedule that can run on it, balanced."""
    grids: dict[Shape, list[Grid]] = {}
    for problem in problems:
        laid = _Laid(grids)
        for entry in SCHEDULES.values():
            if entry.tried_by_auto:
                yield from _on_grids(replace(problem, schedule=entry.name), entry, laid)


Shape = tuple[str, int, int, int]  # how stages lie on devices, v, p and d


@dataclass(frozen=True)
class _Laid:
    """What problems share that differ only in their schedule.

    These are grids, and balanced partitions by their number of stages and where these lie.
    """

    grids: dict[Shape, list[Grid]]
    splits: dict[tuple[str, int, int], list[Stages]] = field(default_factory=dict)

    def grids_of(self, shape: Shape, topology: Topology) -> list[Grid]:
        """The grids of a shape: the first has replicas next to each other.

        Where there are several pipelines of several devices and several levels, a second grid has
        the devices of each pipeline next to each other.
        """
        if shape not in self.grids:
            name, v, p, d = shape
            ports = ports_of(topology)
            ranks = ranks_of(name, p, v, d)
            self.grids[shape] = [Grid([_run(own) for own in ranks], ports)]
            if d > 1 and p > 1 and len(topology.levels) > 1:
                nested = [[rank % d * p + rank // d for rank in own] for own in ranks]
                self.grids[shape].append(Grid([_run(own) for own in nested], ports))
        return self.grids[shape]

    def balance(self, shape: str, S: int, v: int, problem: Problem) -> list[Stages]:
        """S stages of least variance; where devices have several, their loads balanced too.

        All splits where there are few.
        """
        key = shape, S, v
        if key not in self.splits:
            coarse = problem.coarsen()
            N, found = coarse.chain.layers, gpipe.plan(replace(coarse, stages=S))
            cuts = [*(stage.start for stage in found.partition.stages), N]
            device = [min(own) for own in ranks_of(shape, S // v, v)]
            even = balance_devices(cuts, coarse.cell_costs(), device)
            bounds, splits = problem.boundaries(), {tuple(cuts), tuple(even)}
            if comb(N - 1, S - 1) <= FEW_SPLITS:
                splits |= {(0, *inside, N) for inside in combinations(range(1, N), S - 1)}
            self.splits[key] = [
                stages_between([bounds[cut] for cut in each], problem) for each in sorted(splits)
            ]
        return self.splits[key]


def _run(ranks: Sequence[int]) -> Sequence[int]:
    """The ranks as a range where they are evenly spaced, which is quicker to price."""
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    run = range(ranks[0], ranks[0] + step * len(ranks), step) if step > 0 else range(0)
    return run if list(run) == list(ranks) else ranks


def _on_grids(problem: Problem, entry: Schedule, laid: _Laid) -> Iterator[Candidate]:
    """The grids that the schedule `entry` of `problem` can run on, with every v."""
    M, cells = problem.microbatches, len(problem.boundaries()) - 1
    assert M is not None
    for p, d in _pipelines(problem.topology.devices, M, cells, entry):
        chunks = [CHUNKS[entry.shape]] if entry.shape in CHUNKS else range(2, cells // p + 1)
        for v in chunks:
            own = replace(problem, chunks=v)
            S = p * stages_a_device(own)
            if cells < S or S % stage_multiple(own) or refusal(entry.name, p, v, M // d):
                continue
            for stages in laid.balance(entry.shape, S, stages_a_device(own), own):
                for number, grid in enumerate(
                    laid.grids_of((entry.shape, v, p, d), problem.exchange_topology)
                ):
                    straight = NESTED if number else CONTIGUOUS
                    family = straight if entry.shape == STRAIGHT else entry.shape
                    yield Candidate(own, family, stages, grid)


def _pipelines(P: int, M: int, cells: int, entry: Schedule) -> Iterator[tuple[int, int]]:
    """How many devices in each of how many pipelines, p and d.

    All divide the microbatches, or the schedule can have unequal shares. Of few devices any may
    stay idle, of more a few, of many none.
    """
    for p in range(1, min(P, cells) + 1):
        if p == 1 and not entry.data_parallel:
            continue  # data parallelism, whatever it is called
        for d in range(P // p, 0, -1):
            if P > FEW and p * d < (_BUSY if P <= MANY else 1) * P:
                break
            if M % d == 0 or (entry.uneven and d < M):
                yield p, d
                if P > FEW:
                    break
