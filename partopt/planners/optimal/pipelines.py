"""All pipelines of a small problem, built stage by stage, each executed without contention.

A pipeline is left out as soon as its first stages exceed T, by the terms of single stages and by
those of `partopt.cost.together`, or where the layers behind have too few devices left. Of what
remains the least iteration is found by `partopt.cost.uncontended`, over all warm-ups of each stage.
Places and links are those of the plans themselves (`partopt.planners.optimal.places`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from partopt.cost.compiled import compiled
from partopt.cost.kernels import layers_of, most_in_flight, replica_counts, stage_cost, step_s
from partopt.cost.problem import (
    CONTIGUOUS,
    NESTED,
    Assignment,
    Partition,
    Problem,
    are_consecutive,
)
from partopt.cost.tolerances import SUM
from partopt.planners.optimal.bench import NOTHING, bench_of, lay, next_warmups
from partopt.planners.optimal.paths import (
    STEPS,
    Searched,
    extend,
    is_possible,
    open_choice,
    path_of,
    step,
    work_s,
)
from partopt.planners.optimal.places import Places, places_of
from partopt.schedules import gpipe, one_f_one_b, schedule, zb_h1

# [i, j)  a stage on a place with r replicas

STATES = 200_000  # ranges of layers times replicas: more take long
WORK = 1_000_000  # steps and actions of one answer
ALL_WORK = 5_000_000  # of all answers for a problem
_NONE = 1_000_000  # more devices than there are
_ROWS = (one_f_one_b.row, gpipe.row, zb_h1.row)  # of `partopt.planners.optimal.bench.lay`


class Point(NamedTuple):
    """A pipeline at one warm-up, and the least that it takes in the simulator."""

    partition: Partition
    warmups: tuple[int, ...]
    seconds: float


class Answer(NamedTuple):
    """What a search found: the least seconds of all pipelines within T, infinite where none is.

    Only where it is `complete` is that known of all of them. `left` is what is left of the work.
    """

    seconds: float
    complete: bool
    left: int


def _without_contention(point: Point) -> float:
    return point.seconds


class Pipelines:
    """What is known of the least iteration of all pipelines, as far as the work allows."""

    def __init__(self, problem: Problem, places: Places) -> None:
        N, P, M = problem.chain.layers, problem.topology.devices, problem.microbatches
        assert M is not None
        entry, counts = schedule(problem.schedule), replica_counts(problem)
        self.replicas = counts[0][0], counts[-1][1]
        self.searched = Searched(
            layers_of(problem),
            places,
            problem.network,
            len(counts) > 1,
            not entry.takes_warmup and not entry.split,
            np.zeros((N + 1, N + 1, 2, P + 1), dtype=np.bool_),
            np.zeros((STEPS, N + 1), dtype=np.int64),
            np.zeros(1),
        )
        S, group = min(N, P), problem.network.group
        ports = int(2 * (P // group[:-1]).sum())
        self.path = path_of(S, places.sent.shape[1])
        self.bench = bench_of(S, M, P, ports, problem.serial_transfers)
        self.per_stage = problem.recompute_per_stage
        self.left = ALL_WORK
        self.refuted_s, self.unrefuted_s = -math.inf, math.inf

    def refutes(self, T: float) -> bool:
        """Whether no pipeline takes T seconds or less."""
        if self.refuted_s < T and (self.unrefuted_s > T or self.unrefuted_s == math.inf):
            self._search(T)
        return self.refuted_s >= T

    def _search(self, T: float) -> None:
        """Look for the least iteration that takes T seconds or less."""
        work = min(WORK, self.left)
        answer = self.least(T, _without_contention, work)
        self.left -= work - answer.left
        if not answer.complete:
            self.unrefuted_s = min(T, answer.seconds)
        elif answer.seconds == math.inf:
            self.refuted_s = T
        else:
            self.unrefuted_s = answer.seconds
            self.refuted_s = max(self.refuted_s, answer.seconds * (1 - SUM))

    def least(self, T: float, judge: Callable[[Point], float], left: int) -> Answer:
        """The least of what `judge` says of all points that may take T seconds or less.

        It says no less than `seconds` of any, NaN to end the search. `left` is the work to do.
        """
        searched, path, bench = self.searched, self.path, self.bench
        best, least = T * (1 + SUM), math.inf
        left -= begin(searched, path, bench, best, *self.replicas)
        while left > 0:
            d, seconds, left = next_point(searched, path, bench, best, left)
            if d < 0:
                return Answer(least, True, left)
            if seconds == math.inf:
                break
            judged = judge(self._point(d + 1, seconds))
            if math.isnan(judged):
                break
            if judged <= best:
                best, least = judged * (1 - SUM), judged
        return Answer(least, False, left)

    def _point(self, S: int, seconds: float) -> Point:
        """What is on the bench."""
        path, places = self.path, self.searched.places
        stages = [
            Assignment(
                int(path.start[s]),
                int(path.stop[s]),
                places.ranks[path.place[s], : places.replicas[path.place[s]]].tolist(),
                bool(path.mode[s]) if self.per_stage else None,
            )
            for s in range(S)
        ]
        family = CONTIGUOUS if are_consecutive([stage.ranks for stage in stages]) else NESTED
        return Point(Partition(family, stages), tuple(self.bench.line.deep[:S].tolist()), seconds)


def pipelines_of(problem: Problem) -> Pipelines | None:
    """All pipelines of a problem.

    None where it is large or the schedule none of those that are executed here.
    """
    N, P, M = problem.chain.layers, problem.topology.devices, problem.microbatches
    if M is None or schedule(problem.schedule).row not in _ROWS or problem.chain.lopsided:
        return None
    if N * (N + 1) // 2 * P > STATES or M * min(N, P) > STATES:
        return None
    places = places_of(problem)
    return Pipelines(problem, places) if places is not None else None


def refuter(problem: Problem) -> Callable[[float], bool]:
    """Whether no plan takes so many seconds an iteration; never where `pipelines_of` has none."""
    every = pipelines_of(problem)
    return (lambda T: False) if every is None else every.refutes


@compiled()
def begin(searched, path, bench, T, least, most):  # type: ignore[no-untyped-def]
    """Begin with the first choice of the first stage; returns the work of it."""
    looked = _look_at_stages(searched, T, least, most)
    path.start[0], path.messages[0], path.updates[0] = 0, 0.0, -np.inf
    path.depth[0] = 0
    bench.ranges[0] = NOTHING
    open_choice(searched, path, 0)
    return looked


@compiled()
def next_point(searched, path, bench, T, left):  # type: ignore[no-untyped-def]
    """Go on to the next pipeline, and the next warm-up of it, that may take T or less.

    Returns the place of its last stage, -1 where nothing remains, the seconds without contention,
    infinite where the work was not enough, and what is `left` of that.
    """
    N, d, seconds = len(searched.layers.cuts) - 1, path.depth[0], np.inf
    while d >= 0 and left > 0:
        if bench.ranges[0] != NOTHING:
            seconds, left = next_warmups(bench, d + 1, T, left)
            if seconds < np.inf or left <= 0:
                break
            bench.ranges[0] = NOTHING
            step(searched, path, d)
        left -= 1
        if path.stop[d] > N:
            d -= 1
        elif is_possible(searched, path, d) and extend(searched, path, d, T):
            if path.stop[d] < N:
                d += 1
                open_choice(searched, path, d)
            else:
                lay(searched, path, bench, d + 1)
            continue
        if d >= 0:
            step(searched, path, d)
    path.depth[0] = d
    return d, seconds, left


@compiled()
def _look_at_stages(searched, T, least, most):  # type: ignore[no-untyped-def]
    """Record which stages are in time, and how many devices the layers behind each cut take.

    Returns how many stages there are.
    """
    layers, devices, looked = searched.layers, searched.devices, 0
    searched.step[0] = T / (2 * STEPS)
    N = len(layers.cuts) - 1
    devices[:, :N], devices[:, N] = _NONE, 0
    for i in range(N - 1, -1, -1):
        for j in range(i + 1, N + 1):
            for mode in range(layers.first_mode, layers.last_mode + 1):
                stage = stage_cost(layers, i, j, mode)
                for r in range(least, most + 1):
                    looked += 1
                    left_s = _left_s(searched, stage, r, T)
                    searched.in_time[i, j, mode, r] = left_s >= 0.0
                    steps = min(left_s / searched.step[0] + 1.0, float(STEPS))
                    for k in range(int(steps) if left_s >= 0.0 else 0):
                        devices[k, i] = min(devices[k, i], devices[k, j] + r)
    return looked


@compiled()
def _left_s(searched, stage, r, T):  # type: ignore[no-untyped-def]
    """Seconds of messages that r replicas of a stage leave to the cuts before it, in T.

    Whatever precedes them; below 0 where they have not the memory or the time.
    """
    layers, i = searched.layers, stage.start
    n, F = -(-layers.M // r), most_in_flight(layers, stage, r)
    if (n if searched.holds_all else 1) > F:
        return -1.0
    work, passed = work_s(layers, stage, F, r)
    update = step_s(layers, stage, r) + stage.tied_s
    left_s = T - layers.head[i]
    return min(left_s - (work + update), (left_s - (passed + layers.tail[i])) / 2)
