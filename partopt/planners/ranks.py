"""Asynchronous plans on many devices, by a program over ranks.

Places of `partopt.planners.optimal` would be too many. Where no stage may take longer than L
seconds, the devices that layers from i on need are counted from the end of the chain:

    fewest(i) = min over j of ( fewest(j) + the least r whose stage [i, j) takes L at most )

L is bisected. The place of a stage in its server follows from the devices behind it, and any number
of replicas may be taken. Ranks are in their order; a stage of few may begin anywhere in a server,
or at its edge behind idle ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product, zip_longest

import numpy as np
from numpy.typing import NDArray

from partopt.documents.topology import Topology
from partopt.planners.costs import StageCosts, Table
from partopt.planners.layouts import Shape

ALL = 128  # replicas, or whole servers of them, up to which all numbers are tried
STEP = 1.01  # ratio of those that are tried above
SLACK = (1.0, 1.02, 1.05, 1.1)  # times the least L, of the plans that are given
PRICES = (0.0, 0.002, 0.02)  # of a stage, as a share of the devices: dearer ones are fewer
NEARLY = 1e-3  # relative: how near to the least L bisection comes
MOST = 160  # layers that are planned for, or ranges of them
NUMBERS = 6e7  # in the arrays of all sizes and offsets: half a gigabyte


def cells(topology: Topology) -> int:
    """Layers, or ranges of them, that are planned for: as many as the arrays have room for."""
    offsets = topology.devices // _members(topology)[-1]
    few, whole = _sizes(topology)
    room = int(NUMBERS) // (offsets * (len(few) + len(whole)))
    return min(MOST, max(16, math.isqrt(room)))


def _members(topology: Topology) -> list[int]:
    """The sizes of the levels that have more than one member."""
    return [level.size for level in topology.levels if level.size > 1] or [1]


def _sizes(topology: Topology) -> tuple[list[int], list[int]]:
    """The replicas that stages may have: less than two servers, and whole ones."""
    server, P = _members(topology)[0], topology.devices
    few = [r for r in _thinned(2 * server - 1) if r <= P]
    return few, [server * r for r in _thinned(P // server) if r > 1]


def _thinned(most: int) -> list[int]:
    """1, 2, .. `most`; above `ALL` no nearer to each other than a ratio of `STEP`."""
    found = list(range(1, min(ALL, most) + 1))
    while found[-1] < most:
        found.append(min(most, math.ceil(found[-1] * STEP)))
    return found


def plans(costs: StageCosts, recompute: bool) -> Iterator[Shape]:
    """Plans with the least L, and with larger ones and fewer devices or stages.

    Those in which ports are shared fairly, and those in which a stage has them to itself.
    """
    ways = [_plans(_Program(costs, recompute, fair)) for fair in (True, False)]
    in_turn = (shape for pair in zip_longest(*ways) for shape in pair if shape is not None)
    yield from dict.fromkeys(in_turn)


def _plans(program: _Program) -> Iterator[Shape]:
    low, high, found = 0.0, float(program.costs.C[0][0, -1]), False
    for _ in range(60):
        middle = (low + high) / 2 if low else high / 1.5
        if program.within(middle) is None:
            low = middle
        else:
            high, found = middle, True
        if low and high < low * (1 + NEARLY):
            break
    for more, share in product(SLACK, PRICES) if found else ():
        shape = program.within(high * more, share * program.P)
        if shape is not None:
            yield shape


def turns_held_s(
    turn_s: NDArray[np.float64], busy_s: NDArray[np.float64], away_s: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Seconds for which a replica holds a microbatch that is away for so long.

    From its forward to the last action before its backward there are whole turns.
    """
    turns = np.ceil(away_s / turn_s * (1 - 1e-9)) - 1
    return np.maximum(away_s, turns * turn_s + busy_s)


class _Program:
    """The program over ranks of one problem, whose stages all recompute or do not."""

    def __init__(self, costs: StageCosts, recompute: bool, fair: bool) -> None:
        topology = costs.problem.topology
        self.costs, self.again, self.fair, self.P = costs, recompute, fair, topology.devices
        sizes = _members(topology)
        self.server, self.member = sizes[0], self.P // sizes[-1]  # devices of the outermost's
        few, whole = _sizes(topology)
        self.few = len(few)  # sizes of a stage that may begin anywhere in a server
        self.sizes = np.array([*few, *whole])
        self.places = tuple((rank,) for rank in range(self.P))
        # F r of every size, by the end and the beginning of a stage
        rooms = [costs.room(int(r), recompute).T * r for r in self.sizes]
        self.held = np.ascontiguousarray(np.stack(rooms))
        self.seconds: dict[int, Table] = {}  # of every size, by where a stage ends in its member

    def ending(self, offset: int) -> Table:
        """The arrays of stages that end at this rank of an outermost member, for every size."""
        if offset not in self.seconds:
            sizes = self.sizes[: self.few] if offset % self.server else self.sizes
            self.seconds[offset] = np.ascontiguousarray(
                np.stack([self._ending(offset, int(r)).T for r in sizes])
            )
        return self.seconds[offset]

    def _ending(self, offset: int, r: int) -> Table:
        costs, common = self.costs, self.costs.problem.topology.common_level
        # with room for the stage before it, and not at the end of the cluster where there is more
        end = min(offset + self.member * (r // self.member + 1), self.P)
        if end < r:
            return np.full((costs.N + 1, costs.N + 1), np.inf)
        before, after = range(max(0, end - r - 1), end - r), range(end, min(end + 1, self.P))
        levels = (
            common(before[0], end - r) if before else 0,
            common(end - 1, after[0]) if after else 0,
        )
        return costs.on(range(end - r, end), before, after, levels, self.again, 1, self.fair)

    def within(self, limit_s: float, price: float = 0.0) -> Shape | None:
        """The plan of the fewest devices with no stage slower than `limit_s`.

        None where there are too few devices. A stage costs `price` more of them.
        """
        costs, P, N = self.costs, self.P, self.costs.N
        C, common = costs.C[self.again], costs.problem.topology.common_level
        costs.problem.progress("dynamic program", 0, 1)
        fewest, cost = np.full(N + 1, np.inf), np.full(N + 1, np.inf)
        away_behind = np.zeros(N + 1)  # seconds that a microbatch is behind the cut
        choice = np.zeros((N + 1, 3), dtype=int)  # end, replicas, idle ranks behind
        fewest[N] = cost[N] = 0
        for j in range(N, 0, -1):
            if fewest[j] > P:
                continue
            end = P - int(fewest[j])
            for pad in {0, end % self.server} - {end}:
                tables = self.ending((end - pad) % self.member)[:, j, :j]
                level = common(end - pad - 1, end) if end < P else 0
                away = C[:j, j] + away_behind[j] + costs.wait(level)[0, j]
                fits = (tables <= limit_s) & (away <= limit_s * self.held[: len(tables), j, :j])
                r = np.where(fits.any(axis=0), self.sizes[fits.argmax(axis=0)], P + 1)
                total = r + pad + cost[j] + price
                (better,) = np.nonzero((total < cost[:j]) & (r + pad + fewest[j] <= P))
                cost[better], fewest[better] = total[better], (r + pad + fewest[j])[better]
                turn_s = r[better] * limit_s  # in which a replica takes in one
                away_behind[better] = turns_held_s(turn_s, C[better, j], away[better])
                choice[better, 0], choice[better, 1], choice[better, 2] = j, r[better], pad
        if fewest[0] > P:
            return None
        bounds, counts, idle, spare = [0], [], [], P - int(fewest[0])
        while bounds[-1] < N:
            end, replicas, pad = map(int, choice[bounds[-1]])
            bounds.append(end)
            counts.append(replicas)
            idle.append(spare)
            spare = pad
        mode = self.again if len(costs.modes) > 1 else None
        return Shape(self.places, tuple(bounds), tuple(counts), tuple(idle), (mode,) * len(counts))
