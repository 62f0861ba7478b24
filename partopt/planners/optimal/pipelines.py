"""All pipelines of a small problem, built stage by stage, each executed without contention.

A pipeline is left out as soon as its first stages exceed T, by the terms of single stages and by
those of `partopt.cost.together`, or where the layers behind have too few devices left. Of what
remains the least iteration is found by `partopt.cost.uncontended`, over all warm-ups of each stage.
Places and links are those of the plans themselves (`partopt.planners.optimal.places`).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from partopt.cost.compiled import compiled
from partopt.cost.kernels import layers_of, most_in_flight, replica_counts, stage_cost, step_s
from partopt.cost.problem import Problem
from partopt.cost.tolerances import SUM
from partopt.planners.optimal.bench import bench_of, lay, least_over_warmups
from partopt.planners.optimal.paths import (
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
            np.zeros(N + 1, dtype=np.int64),
        )
        self.path, self.bench = path_of(min(N, P), places.sent.shape[1]), bench_of(min(N, P), M, P)
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
        limit = T * (1 + SUM)
        value, left = least_s(self.searched, self.path, self.bench, limit, *self.replicas, work)
        self.left -= work - left
        if left <= 0:
            self.unrefuted_s = min(T, value)
        elif value == math.inf:
            self.refuted_s = T
        else:
            self.unrefuted_s = value
            self.refuted_s = max(self.refuted_s, value * (1 - SUM))


def refuter(problem: Problem) -> Callable[[float], bool]:
    """Whether no plan takes so many seconds an iteration.

    Never, where the problem is large or the schedule none of those that are executed here.
    """
    N, P, M = problem.chain.layers, problem.topology.devices, problem.microbatches
    if M is None or schedule(problem.schedule).row not in _ROWS or problem.chain.lopsided:
        return lambda T: False
    if N * (N + 1) // 2 * P > STATES or M * min(N, P) > STATES:
        return lambda T: False
    places = places_of(problem)
    return Pipelines(problem, places).refutes if places is not None else lambda T: False


@compiled()
def least_s(searched, path, bench, T, least, most, left):  # type: ignore[no-untyped-def]
    """The least iteration of all pipelines that take no more than T, else infinite.

    Also what is `left` of the work: 0 or less where it was not enough.
    """
    N, best = len(searched.layers.cuts) - 1, T
    left -= _look_at_stages(searched, T, least, most)
    path.start[0], path.messages[0], path.updates[0] = 0, 0.0, -np.inf
    open_choice(searched, path, 0)
    d, found = 0, np.inf
    while d >= 0 and left > 0:
        left -= 1
        if path.stop[d] > N:
            d -= 1
        elif is_possible(searched, path, d) and extend(searched, path, d, best):
            if path.stop[d] < N:
                d += 1
                open_choice(searched, path, d)
                continue
            lay(searched, path, bench, d + 1)
            value, left = least_over_warmups(bench, d + 1, best, left)
            if value <= best:
                best = found = value
        if d >= 0:
            step(searched, path, d)
    return found, left


@compiled()
def _look_at_stages(searched, T, least, most):  # type: ignore[no-untyped-def]
    """Record which stages are in time, and how many devices the layers behind each cut take.

    Returns how many stages there are.
    """
    layers, devices, looked = searched.layers, searched.devices, 0
    N = len(layers.cuts) - 1
    devices[:N], devices[N] = _NONE, 0
    for i in range(N - 1, -1, -1):
        for j in range(i + 1, N + 1):
            for mode in range(layers.first_mode, layers.last_mode + 1):
                stage = stage_cost(layers, i, j, mode)
                for r in range(least, most + 1):
                    looked += 1
                    F = most_in_flight(layers, stage, r)
                    possible = _is_in_time(searched, stage, F, r, T)
                    searched.in_time[i, j, mode, r] = possible
                    if possible:
                        devices[i] = min(devices[i], devices[j] + r)
    return looked


@compiled()
def _is_in_time(searched, stage, F, r, T):  # type: ignore[no-untyped-def]
    """Whether r replicas of a stage have the memory and the time, whatever precedes them."""
    layers, i = searched.layers, stage.start
    n = -(-layers.M // r)
    if (n if searched.holds_all else 1) > F:
        return False
    work, passed = work_s(layers, stage, F, r)
    update = step_s(layers, stage, r) + stage.tied_s
    return layers.head[i] + max(work + update, passed + layers.tail[i]) <= T
