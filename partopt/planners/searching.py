"""The feasibility probe of one problem, and the search for the least bound that it can meet."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from partopt.cost.capacity import shapes_of, trees_of
from partopt.cost.kernels import NAIVE, layers_of
from partopt.cost.problem import CONTIGUOUS, Assignment, Partition, Problem
from partopt.errors import PartoptError
from partopt.planners.entries import CUT, ENTRY, MODE, REPLICAS, STAGES, START, USED, Caps, Table, empty_table
from partopt.planners.probe import BLOCK, begin, reaches, sweep

# T   seconds: a bound on the period, or of a synchronous schedule on what its slowest stage adds to one microbatch's pass
# U   seconds: a bound on the all-reduce and the optimizer's step of each stage, once an iteration

Counts = tuple[int, int]  # the least and the most replicas of every stage

TOLERANCE = 1e-12  # relative: the rounding errors of two ways to add up the same costs
ENDLESS = 1e200  # seconds
STEPS = 300
SHAPE_LIMIT = 9_000_000  # shapes times levels; about 1 GB of tables
_ENTRIES = 64  # of a cut, at most, where there are several levels
_ENTRIES_IN_ALL = 10_000_000  # 80 bytes each


class Probe:
    """Tells whether there is a contiguous plan within given bounds, and which. Its tables are made once."""

    def __init__(self, problem: Problem) -> None:
        topology = problem.topology
        if topology.group_size(len(topology.levels) - 1) * topology.devices * len(topology.levels) > SHAPE_LIMIT:
            what = f"{topology.devices} devices in components of {topology.group_size(len(topology.levels) - 1)}"
            raise PartoptError(
                f"optimal: {what}: its tables outgrow memory", "describe the outermost level in more members, or fewer levels"
            )
        self.problem, self.layers, self.shapes = problem, layers_of(problem), shapes_of(topology)
        self.reach = reaches(self.layers)
        L, G, width = self.shapes.side.shape
        self.sides = trees_of(self.shapes.side.reshape(L * G, width)).reshape(L, G, -1)
        self.narrowest = float(self.shapes.side[:, :, 1:].min())  # bytes/s that every stage has for a side, wherever it stands
        self.tables: list[Table] = []
        self.complete = True  # no entry was ever left out for want of room

    def find(self, T: float, U: float, counts: Counts, stages: int | None) -> Partition | None:
        """A plan within the bounds, rounding apart; `None` where there is none.

        Each stage has as many replicas as `counts` says, from and to, and there are `stages` stages, `None` for any number. Devices in
        use are counted where memory is limited.
        """
        caps = self._caps(T, U, counts)
        sweeps = 1 if stages is None else stages
        self._make_tables(1 if stages is None else stages + 1)
        begin(self.tables[0], self.problem.topology.devices)
        found = False
        for k in range(sweeps):
            source, table = self.tables[k], self.tables[k if stages is None else k + 1]
            if stages is not None:
                begin(table, 0)
            found = sweep(self.layers, caps, self.reach, source, table)
            self.complete = self.complete and table.dropped[0] == 0
        return self._plan(sweeps if stages is not None else 0, stages is None) if found else None

    def _make_tables(self, count: int) -> None:
        layers, several_levels = self.problem.chain.layers, len(self.shapes.group) > 2
        entries = max(8, min(_ENTRIES, _ENTRIES_IN_ALL // (layers * count))) if several_levels else 8
        while len(self.tables) < count:
            self.tables.append(empty_table(layers, entries, BLOCK))

    def _caps(self, T: float, U: float, counts: Counts) -> Caps:
        """What a stage may carry within the bounds."""
        layers, shapes = self.layers, self.shapes
        slowest = float(layers.compute[0 if layers.apart else layers.last_mode, -1])
        room = (T * np.arange(shapes.slope.shape[1]) if layers.M == 0 else U) - shapes.latency
        slope = shapes.slope + (layers.optimizer_rate if layers.M else 0.0)
        with np.errstate(divide="ignore", invalid="ignore"):
            weights = np.where(room < 0, -1.0, np.where(slope > 0, room / slope, np.inf))
        weights[:, 0] = -1.0
        carried = self.narrowest * (T / layers.M if layers.M else T)
        free = layers.cuts <= (0.0 if layers.serial else carried)
        free[[0, -1]] = True
        if layers.schedule == NAIVE:
            free[:] = True
        rate = 1.0 / T if layers.M == 0 else (0.0 if layers.schedule == NAIVE else layers.M / (slowest + T))
        any_weights = trees_of(weights.max(axis=0, keepdims=True))[0]
        limited = self.problem.memory_bytes is not None
        trees, update = trees_of(weights), U if layers.M else T
        return Caps(
            T, rate, *counts, limited, shapes.group, any_weights, trees, slope, shapes.latency, update, self.sides, shapes.exchange, free
        )

    def _plan(self, k: int, one_table: bool) -> Partition:
        """The plan behind the entries of cut 0; of several the one with the fewest stages, then devices."""
        rows = self.tables[k].rows
        position = min(range(self.tables[k].counts[0]), key=lambda entry: rows[0, entry, [STAGES, USED]].tolist())
        stages: list[Assignment] = []
        cut = 0
        while cut < self.problem.chain.layers:
            row = [int(number) for number in self.tables[k].rows[cut, position]]
            ranks = range(row[START], row[START] + row[REPLICAS])
            mode = bool(row[MODE]) if self.problem.recompute_per_stage else None
            stages.append(Assignment(cut, row[CUT], ranks, mode))
            cut, position, k = row[CUT], row[ENTRY], k if one_table else k - 1
        return Partition(CONTIGUOUS, stages)


def least(
    find: Callable[[float], Partition | None], measure: Callable[[Partition], float], lower: float, upper: float, slack: float
) -> tuple[Partition | None, float, float]:
    """The plan with the least measure below `upper`, that measure (`upper` where there is no plan), and the largest bound without a plan.

    `find` tells for a bound whether there is a plan, which need not be the best; none is below `lower`. The two meet within `slack`.
    """
    best, value = None, upper
    T, growth = (lower + 2 * slack if upper >= ENDLESS else upper - slack), 1.001
    if upper <= lower + 2 * slack:
        return None, upper, upper
    for step in range(STEPS):
        found = find(T)
        if found is None:
            lower = T
        else:
            best, value = min((best, value), (found, measure(found)), key=lambda pair: pair[1])
            slack = max(slack, TOLERANCE * value)
        if value - lower <= 2 * slack or (found is None and T >= ENDLESS):
            break
        gap = value / lower - 1 if lower > 0 else 1.0
        if value >= ENDLESS:
            T = max(T * growth, 1e9 * slack) if step < 14 else ENDLESS
            growth = min(growth**2, 2.0)
        elif (gap < 1e-3 and step % 4 == 3) or (gap < 1e-6 and step % 2):
            T = value - slack
        else:
            T = (lower + value) / 2
    return best, value, lower
