"""Grids of equal pipelines side by side: all that a problem allows, under its schedule.

Each is cut where its devices have about as much work, and estimated by a closed form. The search
begins with the best of them (`partopt.search.improve`).

    N      layers; S   stages of a pipeline
    P      devices; d   pipelines; p   devices of one; v   stages of a device
    M      microbatches of an iteration
    C      forward and backward seconds of a stage for one microbatch
    W      bytes of its parameters that have a gradient
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from itertools import combinations, compress

import numpy as np
from numpy.typing import NDArray

from partopt.cost.collectives import allreduce_over, exposed
from partopt.cost.memory import memory_table, ranges_bytes, shares
from partopt.cost.messages import parting_levels, port_rate, port_size
from partopt.cost.problem import (
    CONTIGUOUS,
    NESTED,
    NONE,
    Assignment,
    Partition,
    Problem,
)
from partopt.cost.ranks import array_of
from partopt.cost.sharding import ALLREDUCE, Exchange, exchange_topology, half_ways
from partopt.documents.topology import Topology
from partopt.planners.layouts import Bounds
from partopt.schedules import SCHEDULES, refusal
from partopt.schedules.entry import Schedule
from partopt.schedules.placement import CHUNKS, MIRRORED, STRAIGHT, ranks_of

STAGES = 128  # of a pipeline, at most
ROOMY = 1.05  # of the limit: what is estimated to need more memory is not simulated
EACH, FEWER = 12, 1.15  # stages on a device: all numbers up to it, and their ratio above
EVERY, TRIED = 200, 8  # ways to cut up to which all are looked at where memory is short
BUSY = 0.75  # of the devices have work at least
SPLIT = 1 / 3  # of the bubble that is left where backwards are in two parts

Floats = NDArray[np.float64]


class Splits:
    """Where the chain of a problem is cut into stages, whatever the schedule."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.chain, self.N = problem, problem.chain, problem.chain.layers
        self.C = self.chain.busy_prefix(problem.recompute_by_default)
        self.needs = lru_cache(maxsize=None)(self._needs)
        self.of_least_squares = lru_cache(maxsize=None)(self._of_least_squares)

    def plain(self, S: int) -> Bounds | None:
        """The boundaries of S stages by least squares without a limit of memory, or None.

        They are the same under every schedule.
        """
        key = "least squares", self.chain, self.problem.recompute_by_default
        found: dict[int, Bounds] = self.problem.known.once(key, self._of_least_squares)
        return found.get(S)

    def _of_least_squares(
        self, held: float = 0, d: int = 1, limit: float = math.inf
    ) -> dict[int, Bounds]:
        """For every number of stages the boundaries whose seconds have the least sum of squares.

        With a limit every stage has room for `held` microbatches within so many bytes.
        """
        ordered = np.triu(np.ones((self.N + 1,) * 2), 1) > 0
        cost = np.where(ordered, (self.C[None, :] - self.C[:, None]) ** 2, np.inf)
        if limit < math.inf:
            cost = np.where(self.needs(held, d) <= limit, cost, np.inf)
        best = np.where(np.arange(self.N + 1) == self.N, 0.0, np.inf)
        ends: list[NDArray[np.int64]] = []
        found: dict[int, Bounds] = {}
        for S in range(1, min(self.N, STAGES) + 1):
            reach = cost + best[None, :]
            ends.append(reach.argmin(axis=1))
            best = reach.min(axis=1)
            if best[0] < np.inf:
                bounds = [0]
                for stops in reversed(ends):
                    bounds.append(int(stops[bounds[-1]]))
                found[S] = tuple(bounds)
        return found

    def _needs(self, held: float, d: int) -> Floats:
        """Bytes of every range [i, j) on a device with so many microbatches in flight.

        These need not be whole: the stages of a device have unequal shares.
        """
        problem, again = self.problem, self.problem.recompute_by_default
        one, two = (memory_table(problem, held, d, again) for held in (1, 2))
        per_microbatch = np.where(one < np.inf, two - np.where(one < np.inf, one, 0.0), 0.0)
        return one + (held - 1) * per_microbatch


@dataclass(frozen=True, eq=False)
class Grid:
    """d pipelines of p devices: the ranks of every stage, and all that does not depend on cuts."""

    family: str
    p: int
    d: int
    v: int
    far: bool  # the devices of a pipeline are next to each other, not those of a stage
    ranks: Sequence[Sequence[int]]
    topology: Topology
    exchange: Exchange = ALLREDUCE

    @cached_property
    def places(self) -> list[list[int]]:
        """Of every stage the places in their pipeline of the devices that have it."""
        far, p, d = self.far, self.p, self.d
        # copies of a stage that pipelines cross are in turn
        firsts = [ranks[:2] for ranks in self.ranks]
        return [sorted({rank % p if far else rank // d for rank in ranks}) for ranks in firsts]

    @cached_property
    def _at(self) -> NDArray[np.int64]:
        """The ranks, shape (S, replicas)."""
        return np.array(list(map(array_of, self.ranks)))

    @cached_property
    def held(self) -> Floats:
        """1 where a device of a pipeline has a stage, shape (p, S)."""
        held = np.zeros((self.p, len(self.ranks)))
        for s, places in enumerate(self.places):
            held[places, s] = 1.0
        return held

    @cached_property
    def levels(self) -> NDArray[np.int64]:
        """The level that a message over a cut crosses, shape (S - 1, replicas)."""
        ranks = self._at
        return parting_levels(ranks[:-1], ranks[1:], self.topology)

    @cached_property
    def hops(self) -> tuple[float, Floats]:
        """Seconds of latency of one message over all cuts, and of a byte over every cut.

        The mean of all replicas.
        """
        levels, mean = self.topology.levels, 1 / len(self.ranks[0])
        latency_s = np.array([0.0, *(level.latency_s for level in levels)])
        byte_s = np.array([0.0, *(1 / level.bandwidth_bytes_per_s for level in levels)])
        return float(latency_s[self.levels].sum()) * mean, byte_s[self.levels].sum(axis=1) * mean

    @cached_property
    def ports(self) -> Floats:
        """Seconds for which a byte over a cut keeps a port busy, shape (ports, S - 1).

        It is one of every replica; ports that are as busy as others are left out.
        """
        ranks, topology = self._at, self.topology
        loads = [np.zeros((1, len(ranks) - 1))]
        for k, level in enumerate(topology.levels, start=1):
            cut, _ = crossing = np.nonzero(self.levels == k)
            if level.size == 1 or not len(cut):
                continue
            size = port_size(k, topology)
            sides = (ranks[:-1],) if level.bus else (ranks[:-1], ranks[1:])
            port = np.concatenate([side[crossing] // size for side in sides])
            cut = np.tile(cut, len(sides))
            # ports over which the same cuts go have one sum of any numbers of these
            sums = np.bincount(port, np.random.default_rng(0).integers(2**40, size=len(ranks))[cut])
            _, first, kind = np.unique(sums, return_index=True, return_inverse=True)
            (one,) = np.nonzero(port == first[kind[port]])
            busy = np.zeros((len(first), len(ranks) - 1))
            np.add.at(busy, (kind[port[one]], cut[one]), 1 / port_rate(k, topology))
            loads.append(busy)
        return np.concatenate(loads)

    def ports_s(self, cut_bytes: Floats, many: int) -> float:
        """Seconds for which so `many` messages of a replica keep the busiest port busy."""
        return many * float((self.ports @ cut_bytes).max())

    @cached_property
    def reduced(self) -> tuple[Floats, Floats]:
        """Seconds a byte of the exchange of gradients of every stage, and of its latency."""
        return self._rings(exchange_topology(self.topology, self.exchange))

    @cached_property
    def halves(self) -> list[tuple[Floats, Floats]]:
        """Those of a gather or a scatter, with every algorithm that they may have."""
        ways = map(self._rings, half_ways(self.topology))
        return [(slope / 2, latency_s / 2) for slope, latency_s in ways]

    def _rings(self, topology: Topology) -> tuple[Floats, Floats]:
        rings = [allreduce_over(ranks, topology) for ranks in self.ranks]
        slopes = np.array([ring.slope for ring in rings])
        return slopes, np.array([ring.latency_s for ring in rings])

    def half_s(self, sizes: Floats) -> Floats:
        """`sharding.half_s` of so many bytes of every stage."""
        fastest = np.min([slope * sizes + latency_s for slope, latency_s in self.halves], axis=0)
        return np.where(sizes > 0, fastest, 0.0)


@dataclass(frozen=True, eq=False)
class GridPlan:
    """The chain of a problem, cut into stages on a grid."""

    problem: Problem
    splits: Splits
    grid: Grid
    bounds: Bounds

    def _most(self, values: Floats) -> float:
        """The largest sum of values of stages over those of a device."""
        return float((self.grid.held @ values).max())

    @cached_property
    def busy_s(self) -> Floats:
        """C of every stage: of its compute, or of what replicas exchange beside it, if longer."""
        problem, chain, bounds = self.problem, self.problem.chain, list(self.bounds)
        C, exchange = np.diff(self.splits.C[bounds]), problem.exchange
        if len(self.grid.ranks[0]) == 1 or not exchange.gathered + exchange.scattered:
            return C
        trained = chain.trained_bytes.table[bounds[:-1], bounds[1:]]
        whole = trained + chain.frozen_bytes.table[bounds[:-1], bounds[1:]]
        gather = self.grid.half_s(exchange.gathered * whole)
        scatter = self.grid.half_s(exchange.scattered * trained)
        forward = np.add.reduceat(chain.f, bounds[:-1])
        both: Floats = np.maximum(forward, gather) + np.maximum(C - forward, gather + scatter)
        return both

    @cached_property
    def estimate_s(self) -> float:
        """Seconds of a sample by a closed form: work of the busiest device, fill, and update."""
        problem, grid, chain = self.problem, self.grid, self.problem.chain
        entry, M = SCHEDULES[problem.schedule], problem.microbatches or 1
        starts, bounds = list(self.bounds[:-1]), list(self.bounds)
        C, cuts = self.busy_s, chain.traffic[starts[1:]]
        W = chain.trained_bytes.table[bounds[:-1], bounds[1:]]
        latency_s, byte_s = grid.hops
        hops = 2 * (latency_s + float(byte_s @ cuts))
        left = np.zeros(len(W))  # of the exchange of gradients, behind the backward
        if len(grid.ranks[0]) > 1:
            last = np.add.reduceat(chain.gw if entry.split else chain.g, starts)
            slope, delay_s = grid.reduced
            left = exposed(slope * W + delay_s, W, last, problem.early_bytes)
        if problem.microbatches is None:  # in its steady state
            busy_s = max(self._most(np.maximum(C, left)), self._most(C))
            return max(busy_s / grid.d, grid.ports_s(cuts, 1) / grid.d) / chain.microbatch_size
        samples = M * chain.microbatch_size
        step_s = chain.optimizer_s / shares(problem.kept, len(grid.ranks[0]))[-1]
        update = self._most(left + W / max(W.sum(), 1.0) * step_s)
        copies = 2 if grid.family == MIRRORED else 1
        busy_s = self._most(C) * -(-M // (grid.d * copies))
        one_s = float(C.sum()) + hops
        if entry.one_at_a_time:
            return (M / grid.d * one_s + update) / samples
        busy_s = max(busy_s, grid.ports_s(cuts, M // len(grid.ranks[0])))
        fill = float(C.sum() - C.max()) / grid.v * (SPLIT if entry.split else 1.0) + hops
        # no stage waits for the gradients of another's weights
        one_s -= float(chain.gw.sum()) if entry.split else 0.0
        return (max(busy_s + fill, one_s) + update) / samples

    @cached_property
    def needs_bytes(self) -> Floats:
        """Bytes of every device of a pipeline, about, shape (p,)."""
        needs: Floats = self._needs([self.bounds], self.held)[0]
        return needs

    def may_fit(self, roomy: float = ROOMY) -> bool:
        """Whether its devices together need up to `roomy` times the memory that they have."""
        limit = self.problem.memory_bytes
        return limit is None or float(self.needs_bytes.mean()) <= roomy * limit

    def _needs(self, cuts: Sequence[Sequence[int]], held: Sequence[float]) -> Floats:
        """Bytes of every device between rows of boundaries, with so many microbatches in flight.

        Shape (rows, p).
        """
        problem, grid, bounds = self.problem, self.grid, np.array(cuts)
        place, stage = np.nonzero(grid.held)
        in_flight = np.array(held)[place]
        r, again = len(grid.ranks[0]), problem.recompute_by_default
        spans = bounds[:, stage], bounds[:, stage + 1]
        kept, transient = ranges_bytes(problem, *spans, (in_flight, 1), r, again)
        first = np.searchsorted(place, np.arange(grid.p))
        # one backward runs at a time
        return np.add.reduceat(kept, first, 1) + np.maximum.reduceat(transient, first, 1)

    @cached_property
    def limited_s(self) -> float:
        """`estimate_s` within the memory, infinite where there is too little.

        Where plans choose their warm-ups, fewer microbatches in flight take as much longer.
        """
        limit, entry = self.problem.memory_bytes, SCHEDULES[self.problem.schedule]
        if limit is None or self.needs_bytes.max() <= ROOMY * limit:
            return self.estimate_s
        if not entry.takes_warmup:
            return min((other.estimate_s for other in self.within(ROOMY)), default=math.inf)
        one, two = (self._needs([self.bounds], [held] * self.grid.p) for held in (1, 2))
        if one.max() > ROOMY * limit:
            return math.inf
        most = 1 + np.maximum(0.0, limit - one[0]) / np.maximum(1.0, two[0] - one[0])
        return self.estimate_s * max(1.0, float((np.array(self.held) / most).max()))

    @cached_property
    def held(self) -> list[float]:
        """Microbatches in flight on every device of a pipeline, an even share of every stage."""
        grid, M = self.grid, self.problem.microbatches
        entry = SCHEDULES[self.problem.schedule]
        if entry.one_at_a_time:
            return [1.0] * grid.p
        if entry.shape == STRAIGHT:
            return [float(entry.counts(k, [grid.d] * grid.p, M).held) for k in range(grid.p)]
        passing = max(1, (M or 1) // grid.d)
        return [entry.in_flight(k, grid.p, grid.v, passing) / grid.v for k in range(grid.p)]

    def balanced(self) -> GridPlan:
        """Its cuts moved by one while the squares of the devices' loads fall."""
        places = tuple(map(tuple, self.grid.places))
        key = "balanced", self.splits.chain, self.problem.recompute_by_default, places
        return replace(self, bounds=self.problem.known.once(key, self._balance))

    def _balance(self) -> Bounds:
        C, held, bounds = self.splits.C, self.grid.held, np.array(self.bounds)
        load = held @ np.diff(C[bounds])
        moved = held[:, :-1] - held[:, 1:]  # how loads change with a cut
        for _ in range(4 * (len(bounds) - 1)):
            # of every cut a layer back and a layer further: the sum of squares, less what it is
            steps = bounds[1:-1] + np.array([[-1], [1]])
            allowed = (bounds[:-2] < steps) & (steps < bounds[2:])
            more = np.where(allowed, C[steps] - C[bounds[1:-1]], 0.0)
            change = more * (2 * (load @ moved) + more * (moved**2).sum(axis=0))
            if change.min(initial=0.0) >= -1e-12 * float(load @ load):
                break
            c, forward = divmod(int(change.T.argmin()), 2)
            load = load + more[forward, c] * moved[:, c]
            bounds[c + 1] = steps[forward, c]
        return tuple(bounds.tolist())

    def within(self, roomy: float) -> list[GridPlan]:
        """The plan, cut for the memory where it has to be: what may fit, the fastest first.

        What needs up to `roomy` times the limit may fit.
        """
        limit, entry = self.problem.memory_bytes, SCHEDULES[self.problem.schedule]
        if limit is None or self.needs_bytes.max() <= roomy * limit:
            return [self]
        N, S = self.splits.N, len(self.bounds) - 1
        if math.comb(N - 1, S - 1) <= EVERY:
            every = [(0, *cuts, N) for cuts in combinations(range(1, N), S - 1)]
            fitting = self._needs(every, self.held).max(axis=1) <= roomy * limit
            able = [replace(self, bounds=bounds) for bounds in compress(every, fitting)]
            return sorted(able, key=lambda plan: plan.estimate_s)[:TRIED]
        if not self.may_fit(roomy):
            return []
        part = limit / CHUNKS.get(entry.shape, self.grid.v)
        bounds = self.splits.of_least_squares(max(self.held), self.grid.d, part).get(S)
        other = replace(self, bounds=bounds) if bounds else self
        return [other] if other.needs_bytes.max() <= roomy * limit else []

    @property
    def partition(self) -> Partition:
        """Its stages on their ranks."""
        stages = zip(self.bounds, self.bounds[1:], self.grid.ranks, strict=False)
        return Partition(self.grid.family, [Assignment(*stage) for stage in stages])


def grids_of(
    shape: str, p: int, d: int, v: int, topology: Topology, exchange: Exchange = ALLREDUCE
) -> list[Grid]:
    """The grids of d pipelines: the devices of a stage next to each other, or of a pipeline."""
    ranks = ranks_of(shape, p, v, d)
    straight = shape == STRAIGHT
    family = CONTIGUOUS if straight else shape
    found = [Grid(family, p, d, v, False, ranks, topology, exchange)]
    if d > 1 and p > 1 and sum(level.size > 1 for level in topology.levels) > 1:
        far = [_far(group, p, d) for group in ranks]
        family = NESTED if straight else shape
        found.append(Grid(family, p, d, v, True, far, topology, exchange))
    return found


def grids(problem: Problem) -> list[GridPlan]:
    """Every grid of a problem, whose chain is short, in the order of their estimates."""
    entry, splits, found = SCHEDULES[problem.schedule], Splits(problem), list[GridPlan]()
    for p, d, v in _sizes(problem, entry, splits.N):
        problem.progress("estimating grids", p, min(problem.topology.devices, splits.N))
        bounds = splits.plain(p * entry.stages_a_device(v))
        if bounds is not None:
            stated = problem.with_(chunks=v)
            key = "grids", entry.shape, p, d, v, id(problem.topology), problem.exchange
            make = partial(grids_of, entry.shape, p, d, v, problem.topology, problem.exchange)
            for grid in problem.known.once(key, make):
                found.append(GridPlan(stated, splits, grid, bounds).balanced())
    return sorted(found, key=lambda plan: plan.estimate_s)


def _far(group: Sequence[int], p: int, d: int) -> Sequence[int]:
    """The ranks of a stage where the devices of a pipeline are next to each other."""
    if isinstance(group, range):
        return range(group[0] // d, group[0] // d + p * d, p)
    return tuple(rank % d * p + rank // d for rank in group)


def _sizes(problem: Problem, entry: Schedule, N: int) -> Iterator[tuple[int, int, int]]:
    """p, d and v of the grids that a schedule can run, of as many devices as can be."""
    P, M, asked = problem.topology.devices, problem.microbatches, problem.request.layout
    least = max(problem.least_stages, 1 if entry.data_parallel or M is None else 2)
    for p in range(least, min(P, N) + 1) if asked.pp is None else [asked.pp] * (asked.pp >= least):
        most = 1 if problem.request.replication == NONE else P // p
        allowed = range(most, 0, -1) if asked.dp is None else [asked.dp] * (asked.dp <= most)
        d = next((d for d in allowed if M is None or M % d == 0), 0)
        few = p * d < BUSY * P and problem.request.replication != NONE
        sized = (asked.pp, asked.dp, problem.request.stages) != (None, None, None)
        if d == 0 or (few and not sized):
            continue
        fixed = CHUNKS.get(entry.shape)
        for v in [fixed] if fixed else _chunks(min(N, STAGES) // p, asked.chunks):
            stages = p * entry.stages_a_device(v)
            if (
                asked.chunks not in (None, v)
                or stages > N
                or problem.request.stages not in (None, stages)
            ):
                continue
            if entry.shape == STRAIGHT or not _refusal(entry.name, p, v, (M or d) // d):
                yield p, d, v


_refusal = lru_cache(maxsize=65536)(refusal)


def _chunks(most: int, asked: int | None) -> list[int]:
    """Stages on a device that are tried: all numbers up to `EACH`, above it ever fewer."""
    if asked is not None:
        return [asked]
    found = list(range(2, min(most, EACH) + 1))
    while found and found[-1] < most:
        found.append(min(most, math.ceil(found[-1] * FEWER)))
    return found
