"""What a stage costs: seconds of a microbatch for all ranges of layers at once, as arrays.

Entry [i, j] is of the stage of layers [i, j); it is infinite where the stage has no room. A plan
takes about as long as its slowest stage, and the simulator says how long.

    f, C, p   forward; forward and backward; the part of the backward until the gradient leaves
    R         from a microbatch's forward on the stage to its gradient's arrival, at the least
    W         bytes of parameters that have a gradient
    r         replicas of the stage
    n, F      microbatches of a replica in an iteration, and of them in flight at once
    M         microbatches of an iteration, None for an asynchronous schedule
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache, partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from partopt.cost.memory import memory_table, shares
from partopt.cost.messages import cut_ports, hold_s, port_rates, port_size
from partopt.cost.problem import Problem
from partopt.cost.ranks import array_of
from partopt.documents.topology import Topology
from partopt.planners.kernels import (
    Boundaries,
    Ranges,
    Replicated,
    Rules,
    StageTable,
    cheapen,
    fill_seconds,
)
from partopt.planners.layouts import PLACES, Places, Shape, ranks_of
from partopt.schedules import schedule

Table = NDArray[np.float64]  # of every range [i, j), shape (N+1, N+1); infinite for j <= i
Port = tuple[float, float, float]  # see `StageCosts.ports`
NO_LIMIT = 1e9  # microbatches in flight where the memory limits none


class Location(NamedTuple):
    """What is known of where a stage lies, whatever its layers.

    Its replicas, their ports, their all-reduce and its latency, the levels that messages before and
    behind the stage cross, and the devices of the stages behind it.
    """

    replicas: int
    ports: tuple[Port, ...]
    slope: float
    latency_s: float
    levels: tuple[int, int]
    behind: int


class StageCosts:
    """The costs of all stages of one problem."""

    def __init__(self, problem: Problem) -> None:
        chain, entry = problem.chain, schedule(problem.schedule)
        self.problem, self.entry, self.M = problem, entry, problem.microbatches
        self.N, self.traffic = chain.layers, chain.traffic
        # a schedule that recomputes while it waits delays no gradient
        delays = not entry.recomputes or chain.blocks is not None
        passing = chain.passing_prefix(entry.split, problem.all_recompute and delays)
        self.W = chain.trained_bytes.table
        self.f = _between(chain.forward_prefix)
        again = _between(chain.again_prefix)
        if chain.blocks is not None and problem.first is not None:
            i, j = np.triu_indices(self.N + 1, 1)
            again[i, j] = chain.blocks.remade(i, j, problem.first).again_s
        once, passes = chain.busy_prefix(False), chain.passing_prefix(entry.split, False)
        # of stages that do not recompute, and of those that do
        self.C = [_between(once), _between(once) + again]
        self.p = [_between(passes), _between(passes) + again * delays]
        self.head = chain.forward_prefix  # before the first microbatch comes
        self.tail = passing  # behind the last gradient that leaves
        way = chain.forward_prefix + passing
        self.behind = way[-1] - way  # R without messages
        # of the last backward, beside which gradients are exchanged
        self.last = _between(chain.gradients_prefix(entry.split))
        whole = max(self.W[0, -1], 1.0)
        stepped = 0.0 if chain.stepping is not None else chain.optimizer_s
        self.step: Table = self.W / whole * stepped
        self.modes = (
            (False, True) if self.chooses_recompute else (problem.recompute_by_default,)
        )  # whether a stage recomputes
        self._parts: dict[object, tuple[Places, StageTable]] = {}
        key = "locations", id(problem.topology), problem.exchange
        # of all problems on these devices
        self._locations: dict[object, tuple[Places, Location]] = problem.known.once(key, dict)
        self.room = lru_cache(maxsize=None)(self._room)
        self.table = lru_cache(maxsize=None)(self._table)
        self.least_in_flight = lru_cache(maxsize=None)(self._least_in_flight)
        self.begun = lru_cache(maxsize=None)(self._begun)
        self.wait = lru_cache(maxsize=None)(self._wait)
        self.hold = lru_cache(maxsize=None)(self._hold)

    @property
    def chooses_recompute(self) -> bool:
        """Whether stages choose to recompute; without a limit of memory that only takes time."""
        return self.problem.recompute_per_stage and self.problem.memory_bytes is not None

    @cached_property
    def short(self) -> bool:
        """Whether memory may keep warm-ups, which plans choose, from filling the devices."""
        return self.entry.takes_warmup and self.problem.memory_bytes is not None

    @cached_property
    def even(self) -> bool:
        """Whether all stages have as many replicas."""
        return not self.entry.uneven or self.problem.request.replication != "free"

    def recomputes(self, shape: Shape) -> list[bool]:
        """Which stages of a plan recompute."""
        return [
            self.problem.recompute_by_default if chosen is None else chosen
            for chosen in shape.recompute
        ]

    # ---- of stages on their places ------------------------------------------------------------

    def stage(self, places: Places, first: int, end: int, recompute: bool, stages: int) -> Table:
        """Seconds of a stage on places [first, end), of a plan of so many stages.

        Where backwards are in two parts, of the first stage: later ones have less room.
        """
        table = self.parts(places, first, end, recompute, stages)
        return np.where(table.room >= table.least, table.seconds, np.inf)

    def parts(
        self, places: Places, first: int, end: int, recompute: bool, stages: int, s: int = 0
    ) -> StageTable:
        """The seconds of stage s where it has room; that room, and how much is the least.

        That is 0 where the seconds are infinite without it anyway.
        """
        key = id(places), first, end, recompute, (stages, s) if self.entry.split else None
        if key not in self._parts:
            *location, behind = self._locate(places, first, end)
            r, split = location[0], self.entry.split
            seconds = self.table(*location, recompute, stages if split else 0)
            least = self.least_in_flight(r, 0 if split else behind, stages)
            tight = least > 1 and self.problem.memory_bytes is not None
            room = self.room(r, recompute, self.begun(r, s, stages))
            table = StageTable(seconds, room, float(tight * least))
            self._parts[key] = places, table  # keeps the id
        return self._parts[key][1]

    def _locate(self, places: Places, first: int, end: int) -> Location:
        """Where a stage on places [first, end) lies."""
        key = id(places), first, end
        if key not in self._locations:
            common = self.problem.topology.common_level
            ranks = ranks_of(places[first:end])
            before = places[first - 1] if first else ()
            after = places[end] if end < len(places) else ()
            levels = (
                common(before[0], ranks[0]) if before else 0,
                common(places[end - 1][0], after[0]) if after else 0,
            )
            behind = sum(map(len, places[end:]))
            ranks, before, after = self._as_first(ranks, before, after)
            reduced, ports = self.problem.allreduce_over(ranks), self.ports(ranks, before, after)
            found = Location(len(ranks), ports, reduced.slope, reduced.latency_s, levels, behind)
            self._locations[key] = places, found  # keeps the id
        return self._locations[key][1]

    def _as_first(self, *groups: Sequence[int]) -> Sequence[Sequence[int]]:
        """The same ranks, moved by whole members of the outermost level as far forward as can be.

        All members are alike: what is known of the first need not be found for the others.
        """
        topology = self.problem.topology
        size = topology.devices // topology.levels[-1].size
        ranges = [group for group in groups if isinstance(group, range)]
        if any(group for group in groups if not isinstance(group, range)):
            return groups
        moved = min(group[0] for group in ranges) // size * size
        return [
            range(group.start - moved, group.stop - moved, group.step)
            if isinstance(group, range)
            else ()
            for group in groups
        ]

    def _least_in_flight(self, r: int, behind: int, stages: int) -> int:
        """Microbatches in flight that a stage needs room for.

        `behind` are the devices behind it. One is enough where plans choose their warm-ups.
        """
        if self.entry.takes_warmup:
            return 1
        rest = [1] * (stages - 1) if self.entry.split else [behind] if behind else []
        return self.entry.counts(0, [r, *rest], self.M).held

    def _begun(self, r: int, s: int, stages: int) -> int:
        """Microbatches whose backward has begun in stage s of as many with r replicas."""
        return self.entry.counts(s, [r] * stages, self.M).begun if self.entry.split else 1

    def fewest_stages(self, r: int, stages: int) -> float:
        """How many stages of r replicas the memory takes at least, infinity where none fit.

        They are to have the room of the first one of a plan of so many `stages`.
        """
        least = max(1, self.least_in_flight(r, r * (stages - 1), stages))
        rooms = [self.room(r, again, self.begun(r, 0, stages)) for again in self.modes]
        return self._cheapest([(rooms, least, 1)])

    @cached_property
    def may_fit(self) -> bool:
        """Whether stages that fit need no more devices than there are, at the least.

        Each has the room for itself alone, as few microbatches in flight as without stages behind
        it, and as many replicas as it likes; above `PLACES` as much room as up to twice as many.
        """
        P, entry, kept = self.problem.topology.devices, self.entry, self.problem.kept
        doubled = [0, *(1 << k for k in range((P - 1).bit_length())), P]
        kinds = []
        for before, r in pairwise(range(P + 1) if P <= PLACES else doubled):
            least = max(1, 1 if entry.split else self.least_in_flight(r, 0, 1))
            kinds.append(([self.room(r, again) for again in self.modes], least, before + 1))
            if least == 1 and not kept.shard and not kept.posted:
                break  # more replicas have no more room
        return self._cheapest(kinds) <= P

    def _cheapest(self, kinds: Sequence[tuple[Sequence[Table], int, int]]) -> float:
        """The least price of stages of some kinds: rooms of which one will do, the least, a price.

        Infinite where no such stages have room.
        """
        total = np.where(np.arange(self.N + 1) == self.N, 0.0, np.inf)
        rooms, least, price = zip(*kinds, strict=True)
        cheapen(np.array(rooms), np.array(least, float), np.array(price, float), total)
        return float(total[0])

    def of_shape(self, shape: Shape) -> Iterator[StageTable]:
        """The `parts` of every stage of a plan."""
        stages = enumerate(zip(shape.spans, self.recomputes(shape), strict=True))
        for s, (span, again) in stages:
            yield self.parts(shape.places, *span, again, shape.stages, s)

    def slowest_s(self, shape: Shape, enough_s: float = math.inf) -> float:
        """What the slowest stage of a plan takes: hardly more than the simulator says.

        One that takes `enough_s` is not compared to others.
        """
        slowest = 0.0
        cuts = pairwise(shape.bounds)
        for table, cut in zip(self.of_shape(shape), cuts, strict=True):
            if table.room[cut] < table.least:
                return math.inf
            slowest = max(slowest, float(table.seconds[cut]))
            if slowest >= enough_s:
                return slowest
        return slowest

    def estimate_s(self, shape: Shape) -> float:
        """About what a microbatch takes: the slowest stage or port, and the messages of a pass."""
        waits = 0.0
        common, places = self.problem.topology.common_level, shape.places
        for cut, one, other in zip(shape.bounds[1:], shape.spans, shape.spans[1:], strict=False):
            waits += self.wait(common(places[one[1] - 1][0], places[other[0]][0]))[0, cut]
        slowest = max(self.slowest_s(shape), self.ports_s(shape))
        return slowest + (float(waits) / self.M if self.M is not None else 0.0)

    def ports_s(self, shape: Shape) -> float:
        """Seconds a microbatch for which the messages of all stages keep the busiest port busy."""
        topology, bounds = self.problem.topology, shape.bounds
        load, ranks = np.zeros((len(topology.levels), topology.devices)), shape.ranks
        for cut, one, other in zip(bounds[1:], ranks, ranks[1:], strict=False):
            key = "cut", id(topology), one, other
            ports = self.problem.known.once(key, partial(_cut_ports, one, other, topology))
            for k, members, byte_s in ports:
                load[k - 1, members] += byte_s * self.traffic[cut]
        if self.M is None:  # the exchanges of stages that share a port add up
            for ring, i, j in zip(ranks, bounds, bounds[1:], strict=False):
                for k, slope in self.problem.allreduce_over(ring).slopes.items():
                    busy_s = slope * float(self.W[i, j]) / len(ring)
                    # once, of however many ranks a port is
                    load[k - 1, array_of(ring) // port_size(k, topology)] += busy_s
        return float(load.max(initial=0.0))

    # ---- the arrays ---------------------------------------------------------------------------

    def _table(
        self,
        r: int,
        ports: Sequence[Port],
        slope: float,
        latency_s: float,
        levels: tuple[int, int],
        recompute: bool,
        depth: int,
    ) -> Table:
        """Seconds of a stage of r replicas, whose all-reduce takes so long."""
        problem, seconds, (before, behind) = self.problem, np.empty_like(self.W), levels
        ranges = Ranges(
            *(self.f, self.C[recompute], self.p[recompute], self.W, self.last, self.step),
            room=self.room(r, recompute),
        )
        boundaries = Boundaries(
            *(self.head, self.tail, self.behind, self.traffic),
            *(self.hold(before), self.hold(behind), self.wait(before)[1], self.wait(behind)[0]),
        )
        sharers = shares(problem.kept, r)[-1]
        replicated = Replicated(r, sharers, float(slope), float(latency_s), depth)
        limited = problem.memory_bytes is not None
        bucket = float(problem.early_bytes)
        rules = Rules(self.M or 0, bucket, problem.blocks, limited, self.entry.split)
        loads = np.array(ports, dtype=np.float64).reshape(-1, 3)
        fill_seconds(seconds, ranges, boundaries, loads, replicated, rules)
        return seconds

    def _room(self, r: int, recompute: bool, begun: int = 1) -> Table:
        """F of every [i, j): the most microbatches in flight that fit; 0 where not even one does.

        What a stage needs grows evenly with them; of `begun` the backward has begun.
        """
        problem = self.problem
        if r > 1 and not (problem.kept.shard or problem.kept.posted):
            return self.room(1, recompute, begun)  # replicas share nothing
        one, two = (memory_table(problem, held, r, recompute, begun) for held in (1, 2))
        if problem.memory_bytes is None:
            return np.where(one < np.inf, NO_LIMIT, 0.0)
        with np.errstate(divide="ignore", invalid="ignore"):
            most = 1 + np.floor((problem.memory_bytes - one) / (two - one))
        most = np.where(two > one, most, NO_LIMIT)
        return np.where(one <= problem.memory_bytes, np.minimum(most, NO_LIMIT), 0.0)

    def _wait(self, k: int) -> NDArray[np.float64]:
        """Seconds of messages over a cut, at the least: there and back, and one; (2, N+1).

        Between devices that part at level k or above; 0 for k = 0.
        """
        chain, levels = self.problem.chain, self.problem.topology.levels[max(0, k - 1) :]
        sizes = np.array([self.traffic, np.minimum(chain.a, chain.back)])
        waits = [
            level.latency_s + sizes / level.bandwidth_bytes_per_s
            for level in levels
            if level.size > 1 and k
        ]
        if not waits:
            return np.zeros_like(sizes)
        return np.where(sizes > 0, np.min(waits, axis=0), 0.0) * [[2], [1]]

    def _hold(self, k: int) -> NDArray[np.float64]:
        """Seconds for which a message over a cut keeps devices from computing, as `_wait`."""
        problem, least = self.problem, np.zeros(self.N + 1)
        holds = [
            hold_s(self.traffic, problem.messages, level, problem.waits)
            for level in problem.topology.levels[max(0, k - 1) :]
            if level.size > 1 and k
        ]
        if holds:
            least[1:-1] = np.min(holds, axis=0)[1:-1]
        return least

    def ports(
        self, ranks: Sequence[int], before: Sequence[int], after: Sequence[int]
    ) -> tuple[Port, ...]:
        """Of every busy port the seconds a microbatch in which it carries a byte of something.

        That is of the cut before the stage, of the cut behind it, and of the stage's parameters.
        The port of a member of a level carries the messages of the ranks in it, but for those whose
        neighbour may lie in the member too.
        """
        key = "ports", id(self.problem.topology), self.problem.exchange, ranks, before, after
        found: tuple[Port, ...] = self.problem.known.once(
            key, lambda: self._ports(ranks, before, after)
        )
        return found

    def _ports(
        self, ranks: Sequence[int], before: Sequence[int], after: Sequence[int]
    ) -> tuple[Port, ...]:
        """`ports`, where they are not known yet."""
        topology, found, at = self.problem.topology, set[Port](), array_of(ranks)
        slopes, rates, r = self.problem.allreduce_over(ranks).slopes, port_rates(topology), len(at)
        for k in range(1, len(rates) + 1):
            rate = sum(rates[k - 1 :])
            if not rate or math.isinf(rate):
                continue
            size = port_size(k, topology)
            ports = topology.devices // size
            outer = enumerate(rates[k - 1 :], start=k)
            ring = sum(level_rate * slopes.get(x, 0.0) for x, level_rate in outer) / rate / r
            if size == 1:  # a port carries the messages of one rank, all of which leave it
                found.add((bool(before) / r / rate, bool(after) / r / rate, ring))
                continue
            kinds = 4 * np.bincount(at // size, minlength=ports)
            for side, bit in ((before, 2), (after, 1)):
                leave = np.full(ports, bool(side))
                leave[array_of(side if k > 1 else ()) // size] = False
                kinds += bit * leave
            for kind in np.flatnonzero(np.bincount(kinds)[4:]).tolist():
                byte_s = (kind // 4 + 1) / r / rate
                found.add((byte_s * (kind // 2 % 2), byte_s * (kind % 2), ring))
        return tuple(sorted(found))


def _cut_ports(
    one: Sequence[int], other: Sequence[int], topology: Topology
) -> list[tuple[int, NDArray[np.int64], NDArray[np.float64]]]:
    """Seconds of a byte over a cut, by port."""
    return [*cut_ports(one, other, 1.0, topology)]


def _between(prefix: NDArray[np.float64]) -> Table:
    """The differences of all pairs of prefix sums."""
    return np.ascontiguousarray(prefix[None, :] - prefix[:, None])
