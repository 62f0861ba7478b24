"""Grids of equal pipelines under every synchronous schedule, estimated: what may be simulated."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from partopt.cost.period import tied_exchange_s
from partopt.cost.problem import CONTIGUOUS, NESTED, Assignment, Partition, Problem
from partopt.documents.topology import Topology
from partopt.planners import gpipe
from partopt.planners.placing import stage_multiple, stages_a_device
from partopt.schedules import SCHEDULES, refusal, schedule
from partopt.schedules.layout import STRAIGHT, ranks_of
from partopt.search.grid import Grid, Stages, estimate_s, least_s, stages_between
from partopt.simulator.ports import ports_of

# P   devices; d   pipelines side by side; v   stages on a device; S   stages
# M   microbatches of an iteration


@dataclass(frozen=True)
class Candidate:
    """A partition under a schedule, with an estimate and a lower bound of its time.

    Both are seconds of a sample: `estimate_s` by the closed forms, and `least_s`.
    """

    problem: Problem
    partition: Partition
    estimate_s: float
    least_s: float

    @property
    def actions(self) -> int:
        """About how many actions a simulation executes."""
        assert self.problem.microbatches is not None
        return 2 * len(self.partition.stages) * self.problem.microbatches


def candidates(problems: Iterable[Problem]) -> Iterator[Candidate]:
    """Every grid of every problem under every schedule that can run on it."""
    grids: dict[Shape, list[Grid]] = {}
    for problem in problems:
        laid = _Laid(grids)
        for own in _schedules(problem):
            yield from _on_grids(own, laid)


def _schedules(problem: Problem) -> Iterator[Problem]:
    """The problem under every schedule that is tried, and every v that it is tried with."""
    for name, entry in SCHEDULES.items():
        for v in entry.auto_chunks:
            yield replace(problem, schedule=name, chunks=v)


Shape = tuple[str, int, int]  # how stages lie on devices, v, and d


@dataclass(frozen=True)
class _Laid:
    """What problems share that differ only in their schedule.

    These are grids, and balanced partitions by their number of stages.
    """

    grids: dict[Shape, list[Grid]]
    stages: dict[int, Stages] = field(default_factory=dict)

    def grids_of(self, shape: Shape, topology: Topology) -> list[Grid]:
        """The grids of a shape: the first has replicas next to each other.

        Where there are several pipelines of several devices and several levels, a second grid has
        the devices of each pipeline next to each other.
        """
        if shape not in self.grids:
            name, v, d = shape
            pipeline = topology.devices // d
            ports = ports_of(topology)
            ranks = ranks_of(name, pipeline, v, d)
            self.grids[shape] = [Grid([_run(own) for own in ranks], ports)]
            if d > 1 and pipeline > 1 and len(topology.levels) > 1:
                nested = [[rank % d * pipeline + rank // d for rank in own] for own in ranks]
                self.grids[shape].append(Grid([_run(own) for own in nested], ports))
        return self.grids[shape]

    def balance(self, S: int, problem: Problem) -> Stages:
        """S stages of least variance."""
        if S not in self.stages:
            found = gpipe.plan(replace(problem.coarsen(), stages=S))
            bounds = problem.boundaries()
            self.stages[S] = stages_between(
                [*(bounds[stage.start] for stage in found.partition.stages), bounds[-1]], problem
            )
        return self.stages[S]


def _run(ranks: Sequence[int]) -> Sequence[int]:
    """The ranks as a range where they are evenly spaced, which is quicker to price."""
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    run = range(ranks[0], ranks[0] + step * len(ranks), step) if step > 0 else range(0)
    return run if list(run) == list(ranks) else ranks


def _on_grids(problem: Problem, laid: _Laid) -> Iterator[Candidate]:
    """The grids of d pipelines of P/d devices that the schedule of `problem` can run on."""
    P, M, entry, v = (
        problem.topology.devices,
        problem.microbatches,
        schedule(problem.schedule),
        stage_multiple(problem),
    )
    assert M is not None
    for d in (
        d for d in range(1, P + 1) if P % d == 0 and (M % d == 0 or (entry.uneven and d < M))
    ):
        S = P // d * stages_a_device(problem)
        if d == P and not entry.data_parallel:
            continue  # pipelines of one device: data parallelism, whatever it is called
        if len(problem.boundaries()) <= S or S % v or refusal(problem.schedule, P // d, v, M // d):
            continue
        stages = laid.balance(S, problem)
        for number, grid in enumerate(laid.grids_of((entry.shape, v, d), problem.topology)):
            family = entry.shape if entry.shape != STRAIGHT else NESTED if number else CONTIGUOUS
            yield _candidate(problem, family, stages, grid)


def _candidate(problem: Problem, family: str, stages: Stages, grid: Grid) -> Candidate:
    """The stages on a grid, estimated."""
    assert problem.microbatches is not None
    bounds, samples = stages.bounds, problem.microbatches * problem.chain.microbatch_size
    laid = [
        Assignment(start, stop, ranks)
        for start, stop, ranks in zip(bounds[:-1], bounds[1:], grid.ranks, strict=True)
    ]
    partition = Partition(family, laid)
    tied = np.array([tied_exchange_s(partition, s, problem) for s in range(len(laid))])
    seconds = estimate_s(stages, grid, problem, tied), least_s(stages, grid, problem, tied)
    return Candidate(problem, partition, *(each / samples for each in seconds))
