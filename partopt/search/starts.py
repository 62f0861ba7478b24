"""Partitions to begin a search in the simulator with, where the planners' plans are slow in it.

The formulas know each stage alone. In the simulator replicas that straddle servers share ports with
those of other stages, replicas of odd counts take turns with long waits, and the more stages there
are, the more of them wait for each other. So these starts are the best by the formulas among
partitions whose stages fill whole groups of devices or share one evenly, of few stages each.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise

import numpy as np

from partopt.cost.capacity import Shapes, shapes_of
from partopt.cost.iteration import objective_s
from partopt.cost.kernels import replica_counts
from partopt.cost.problem import Partition, Problem
from partopt.planners.optimal.bisection import bisect_minimum
from partopt.planners.optimal.contiguous.probe import ContiguousProbe
from partopt.planners.optimal.probes import Counts
from partopt.schedules import schedule
from partopt.search.evaluate import Evaluator, Value
from partopt.search.moves import frozen
from partopt.search.short_runs import ShortRuns

LARGE = 5_000  # layers times devices: problems are large from there on
LIMIT = 2_000_000  # layers times devices: above, each start takes seconds
BUDGET = 10_000  # simulations, as `partopt.search.improve.BUDGET` counts them
CELLS = 64  # of the coarse chain that is planned for, at most
CHEAP = 32  # of one whose cells begin where the least is sent
STAGES = (2, 3, 4, 5, 6, 7, 8, 12, None)  # of the partitions; None for any number
CAUTIONS = (1.5, 2.0, 3.0, 5.0)  # times fewer microbatches in flight than fit
NEAR = 1.15  # times what is to be beaten: an asynchronous start so slow in a short run is left out
_SLACK = 0.02  # of the least objective: nearer, the simulator decides


def size(problem: Problem) -> int:
    """Layers times devices."""
    return problem.chain.layers * problem.topology.devices


def simulated_starts(
    problem: Problem, best: Value, lower_s: float = 0.0, beat_s: float = math.inf
) -> list[tuple[Partition, Value]]:
    """What `coarse_starts` finds that may be better than `best` and below `beat_s`, with its value.

    No plan takes less than `lower_s` per microbatch. Nothing is looked for when `BUDGET` is spent.
    """
    evaluator, found, M = Evaluator(problem), [], problem.microbatches or 1
    runs = ShortRuns(evaluator) if schedule(problem.schedule).asynchronous else None

    def limit_s() -> float:
        return M * min(beat_s, best.seconds if best.over == 0 else math.inf)

    for partition in coarse_starts(problem, M * lower_s, limit_s):
        if runs is not None and runs.best_s(partition) >= NEAR * limit_s():
            continue
        value = evaluator.value(partition)  # at its best warm-up: one guess may be far off
        found.append((partition, value))
        best = min(best, value, key=lambda each: each[:2])
        if evaluator.spent >= BUDGET:
            break
    return found


def coarse_starts(
    problem: Problem, lower_s: float = 0.0, beat_s: Callable[[], float] = lambda: math.inf
) -> Iterator[Partition]:
    """The best partitions by the formulas on a coarse chain, under several conditions.

    Those of whole groups for several numbers of stages, and those of any replicas that do with
    fewer microbatches in flight than fit. Less than all where memory does not hold some. No period
    or iteration is below `lower_s`; those of partitions are below what `beat_s` says each time.
    """
    bounds = problem.boundaries()
    starts = bounds[: -1 : -(-(len(bounds) - 1) // CELLS)]
    if schedule(problem.schedule).asynchronous:  # whose messages wait for each other all the time
        starts = cheap_starts(problem, CHEAP)
    coarse = dataclasses.replace(problem, cut_at=starts).coarsen()
    for probe, stages in _probes(coarse):
        if stages is None or stages <= len(starts):
            found = _least(probe, stages, lower_s, beat_s())
            if found is not None:
                yield frozen(found.on_layers([*starts, bounds[-1]]))


def _probes(problem: Problem) -> Iterator[tuple[ContiguousProbe, int | None]]:
    """Probes, and the stages to ask each of them for."""
    shapes = shapes_of(problem.exchange_topology, problem.serial_transfers)
    whole = ContiguousProbe(problem, keep_whole_groups(shapes))
    yield from (
        (whole, stages) for stages in (STAGES if problem.stages is None else (problem.stages,))
    )
    limited = problem.memory_bytes is not None and schedule(problem.schedule).takes_warmup
    for caution in CAUTIONS if limited else ():
        yield ContiguousProbe(dataclasses.replace(problem, caution=caution), shapes), problem.stages


def cheap_starts(problem: Problem, cells: int) -> list[int]:
    """Layers that stages may begin with: 0, and of each of `cells` ranges that sent the least."""
    bounds, traffic = problem.boundaries()[:-1], problem.chain.traffic
    size = -(-len(bounds) // cells)
    ranges = (bounds[place : place + size] for place in range(1, len(bounds), size))
    return [0, *(min(own, key=lambda bound: float(traffic[bound])) for own in ranges)]


def keep_whole_groups(shapes: Shapes) -> Shapes:
    """The tables in which runs that cut through groups cannot exchange gradients.

    The others are whole groups of a level, in their own group of the next a number that divides it.
    """
    groups, lengths = shapes.latency.shape
    rho, r = np.arange(groups)[:, None], np.maximum(np.arange(lengths), 1)
    fills = np.zeros(shapes.latency.shape, dtype=np.bool_)
    for inner, outer in pairwise(shapes.group):
        whole = (r % inner == 0) & (rho % inner == 0)
        fills |= whole & ((outer == shapes.group[-1]) | ((outer % r == 0) & (rho % r == 0)))
    return shapes._replace(latency=np.where(fills, shapes.latency, np.inf))


def _least(
    probe: ContiguousProbe, stages: int | None, lower_s: float, value: float
) -> Partition | None:
    """The best partition of so many stages below `value`, to `_SLACK`; None where nothing is."""
    problem, best = probe.problem, None
    shared_s = problem.chain.compute_s(0, problem.chain.layers) / problem.topology.devices
    lower_s = max(lower_s, shared_s * (problem.microbatches or 1))

    def find(seconds: float, counts: Counts) -> Partition | None:
        return probe.find(seconds, counts, stages).plan

    for counts in replica_counts(problem):
        found, value, _ = bisect_minimum(
            partial(find, counts=counts),
            partial(objective_s, problem=problem),
            min(lower_s, value),
            value,
            _SLACK * lower_s,
        )
        best = found or best
    return best
