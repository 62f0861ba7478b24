"""The feasibility probe of one problem, and the search for the least bound that it can meet."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from partopt.cost.capacity import Shapes, shapes_of, trees_of
from partopt.cost.kernels import NEVER, Layers, layers_of
from partopt.cost.problem import CONTIGUOUS, Assignment, Partition, Problem
from partopt.errors import PartoptError
from partopt.planners.entries import (
    CUT,
    ENTRY,
    EXTRA,
    MODE,
    REPLICAS,
    STAGES,
    START,
    USED,
    Caps,
    Table,
    empty_table,
)
from partopt.planners.probe import BLOCK, begin, reaches, sweep, widest
from partopt.schedules.entry import DEPTH

# T   seconds: a bound on the period, or of a synchronous schedule on what its slowest stage adds to
#     one microbatch's pass
# U   seconds: a bound on the all-reduce and the optimizer's step of each stage, once an iteration

Counts = tuple[int, int]  # the least and the most replicas of every stage

TOLERANCE = 1e-12  # relative: the rounding errors of two ways to add up the same costs
ENDLESS = 1e200  # seconds
STEPS = 300
_UNITS = 2**50  # that the recomputation of the whole model is counted in
SHAPE_LIMIT = 9_000_000  # shapes times levels; about 1 GB of tables
_ENTRIES = 64  # of a cut, at most, where there are several levels
_COUNTED = 1000  # and where recomputation is counted
_ENTRIES_IN_ALL = 10_000_000  # 80 bytes each


class Probe:
    """Tells whether there is a contiguous plan within given bounds, and which.

    Its tables are made once.

    `shapes` are what runs of ranks carry, by default as the topology has it.
    """

    def __init__(self, problem: Problem, shapes: Shapes | None = None) -> None:
        topology = problem.topology
        if (
            topology.group_size(len(topology.levels) - 1) * topology.devices * len(topology.levels)
            > SHAPE_LIMIT
        ):
            what = (
                f"{topology.devices} devices in components of "
                f"{topology.group_size(len(topology.levels) - 1)}"
            )
            raise PartoptError(
                f"optimal: {what}: its tables outgrow memory",
                "describe the outermost level in more members, or fewer levels",
            )
        self.problem, self.layers, self.shapes = (
            problem,
            layers_of(problem),
            shapes or shapes_of(topology),
        )
        self.reach = reaches(self.layers)
        L, G, width = self.shapes.side.shape
        self.widest = widest(self.layers, self.reach)
        self.sides = trees_of(self.shapes.side.reshape(L * G, width)).reshape(L, G, -1)
        self.bounds_extra = (
            problem.recompute_per_stage
            and problem.microbatches is not None
            and not self.layers.apart
        )
        self.heaviest = max(
            problem.chain.parameter_bytes(layer, layer + 1) for layer in range(problem.chain.layers)
        )
        self.unit_s, self.extra = extra_of(self.layers)
        # bytes/s that every stage has for a side, wherever it stands
        self.narrowest = float(self.shapes.side[:, :, 1:].min())
        self.tables: list[Table] = []
        # bounds for which tables of ever more stages have been filled, and how many of these
        self.swept: tuple[object, int] = (None, 0)
        self.complete = True  # no entry was ever left out for want of room

    def find(
        self,
        T: float,
        U: float,
        counts: Counts,
        stages: int | None,
        extra_s: float = ENDLESS,
        behind: NDArray[np.float64] | None = None,
    ) -> Partition | None:
        """A plan within the bounds, rounding apart; `None` where there is none.

        Each stage has as many replicas as `counts` says, from and to, and there are `stages`
        stages, `None` for any number. Devices in use are counted where memory is limited.
        Recomputing adds at most `extra_s` seconds to the pass of a microbatch. `behind` are devices
        that the layers behind each cut take at the least, infinite where no stage may begin, by
        default what their compute takes.
        """
        caps = self._caps(T, U, counts, behind)
        found = at_its_depth(self.layers, caps.limited, stages, partial(self._sweep, caps, stages))
        if found is None or extra_s >= ENDLESS or self._extra_s(found) <= extra_s:
            return found
        caps = caps._replace(extra=np.floor(extra_s / self.unit_s) + len(self.reach))
        return at_its_depth(
            self.layers._replace(extra=self.extra),
            caps.limited,
            stages,
            partial(self._sweep, caps, stages),
        )

    def floors_s(self, counts: Counts) -> tuple[float, float]:
        """What X and U of a synchronous plan do not go below, given the least and the most replicas
        of every stage.

        The largest layer and, of as many stages as there are devices for, the largest stage take as
        much.
        """
        layers, shapes, (least, most) = self.layers, self.shapes, counts
        passed = layers.compute[0 if layers.apart else layers.first_mode]
        stages = self.problem.topology.devices // least
        largest = max(float(np.diff(passed).max()), float(passed[-1]) / stages)
        W = max(
            self.heaviest, self.problem.chain.parameter_bytes(0, self.problem.chain.layers) / stages
        )
        update = (shapes.slope[:, least : most + 1] + layers.optimizer_rate) * W + shapes.latency[
            :, least : most + 1
        ]
        return (-(-layers.M // most) - 1) * largest, float(update.min())

    def _extra_s(self, found: Partition) -> float:
        """Seconds that recomputing adds to the pass of a microbatch."""
        forward = self.layers.compute[1] - self.layers.compute[0]
        return float(
            sum(
                forward[stage.stop] - forward[stage.start]
                for stage in found.stages
                if stage.recompute
            )
        )

    def _sweep(self, caps: Caps, stages: int | None, layers: Layers) -> Partition | None:
        """A plan within the caps.

        Tables of ever more stages are filled but once for the same caps.
        """
        asked = (caps.pace, caps.update, caps.least, caps.most, caps.extra, layers.depth)
        known, filled = self.swept
        if stages is None or known != asked:
            filled = 0
            self._make_tables(1)
            begin(self.tables[0], self.problem.topology.devices)
        self.swept = (None, 0) if stages is None else (asked, max(stages, filled))
        for k in range(filled, stages or 1):
            source = table = self.tables[0]
            if stages is not None:
                self._make_tables(stages + 1)
                source, table = self.tables[k], self.tables[k + 1]
                begin(table, 0)
            sweep(layers, caps, self.reach, source, table)
            self.complete = self.complete and table.dropped[0] == 0
        return (
            self._plan(stages or 0, stages is None)
            if self.tables[stages or 0].counts[0] > 0
            else None
        )

    def within_memory(self, memory_bytes: int) -> Probe:
        """The probe of the same problem within so much memory a device."""
        other = copy(self)
        other.problem = replace(self.problem, memory_bytes=memory_bytes)
        other.layers = self.layers._replace(memory=float(memory_bytes))
        other.reach, other.tables, other.swept, other.complete = (
            reaches(other.layers),
            [],
            (None, 0),
            True,
        )
        other.widest = widest(other.layers, other.reach)
        return other

    def _make_tables(self, count: int) -> None:
        layers, several_levels = self.problem.chain.layers, len(self.shapes.group) > 2
        most = _COUNTED if self.bounds_extra else _ENTRIES if several_levels else 8
        entries = max(8, min(most, _ENTRIES_IN_ALL // (layers * count)))
        while len(self.tables) < count:
            self.tables.append(empty_table(layers, entries, BLOCK))

    def _caps(self, T: float, U: float, counts: Counts, behind: NDArray[np.float64] | None) -> Caps:
        """What a stage may carry within the bounds."""
        layers, shapes = self.layers, self.shapes
        room = (T * np.arange(shapes.slope.shape[1]) if layers.M == 0 else U) - shapes.latency
        slope = shapes.slope + (layers.optimizer_rate if layers.M else 0.0)
        with np.errstate(divide="ignore", invalid="ignore"):
            weights = np.where(room < 0, -1.0, np.where(slope > 0, room / slope, np.inf))
        weights[:, 0] = -1.0
        carried = self.narrowest * (T / layers.M if layers.M else T)
        free = layers.cuts <= (0.0 if layers.serial else carried)
        free[[0, -1]] = True
        needs = devices_needed(layers, self.widest, T, *counts)
        least, ahead = devices_around(needs, behind)
        return Caps(
            pace=T,
            needs=needs,
            behind=least,
            ahead=ahead,
            bearing=self._bearing(T),
            least=counts[0],
            most=counts[1],
            extra=np.inf,
            limited=self.problem.memory_bytes is not None,
            group=shapes.group,
            any_weights=trees_of(weights.max(axis=0, keepdims=True))[0],
            weights=trees_of(weights),
            slope=slope,
            latency=shapes.latency,
            update=U if layers.M else T,
            sides=self.sides,
            exchange=shapes.exchange,
            free=free,
        )

    def _bearing(self, T: float) -> NDArray[np.int64]:
        """The fewest replicas of any run of ranks that bear each cut at each gap, none counted
        where the gap does not matter.
        """
        layers, L = self.layers, len(self.shapes.side)
        longest = float(layers.compute[layers.last_mode, -1])
        within = (T + longest) / layers.M if layers.M else T
        bearing = np.ones((L + 1, len(layers.cuts)), np.int64)
        for gap in range(1, L + 1):
            best = np.maximum.accumulate(self.shapes.side[gap - 1, :, 1:].max(axis=0)) * (
                1 + TOLERANCE
            )
            bearing[gap] += np.searchsorted(best, layers.cuts / within)
        return bearing

    def _plan(self, k: int, one_table: bool) -> Partition:
        """The plan behind the entries of cut 0; of several the one with the fewest stages, then
        devices.
        """
        rows = self.tables[k].rows
        order = [STAGES, USED] if self.layers.depends_on == DEPTH else [EXTRA, STAGES, USED]
        position = min(
            range(self.tables[k].counts[0]), key=lambda entry: rows[0, entry, order].tolist()
        )
        stages: list[Assignment] = []
        cut = 0
        while cut < self.problem.chain.layers:
            row = [int(number) for number in self.tables[k].rows[cut, position]]
            ranks = range(row[START], row[START] + row[REPLICAS])
            mode = bool(row[MODE]) if self.problem.recompute_per_stage else None
            stages.append(Assignment(cut, row[CUT], ranks, mode))
            cut, position, k = row[CUT], row[ENTRY], k if one_table else k - 1
        return Partition(CONTIGUOUS, stages)


def at_its_depth(
    layers: Layers, limited: bool, stages: int | None, find: Callable[[Layers], Partition | None]
) -> Partition | None:
    """What `find` finds.

    Where what is in flight depends on the number of all stages, of the plans with the fewest stages
    there are.

    More stages hold more, so that no plan has fewer of them than the fewest that hold as little as
    those of fewer stages.
    """
    if layers.depends_on != DEPTH or not limited:
        return find(layers)
    depth = stages or 1
    while True:
        found = find(layers._replace(depth=depth))
        if found is None or len(found.stages) <= depth:
            return found
        depth = len(found.stages)


def devices_needed(
    layers: Layers, widest: NDArray[np.float64], T: float, least: int, most: int
) -> NDArray[np.float64]:
    """Devices that the layers before each cut take by their compute within T, at the least; shape
    (N+1,).

    A synchronous stage takes `least` or M C / (T + passed) if that is more, where what it passes on
    in is at most `widest`: each of its layers accounts for its own share of that.
    """
    M = layers.M
    compute = layers.compute[layers.first_mode]
    if M == 0:
        return np.asarray(compute / T)
    turns = -(-M // most)
    widest = widest if turns == 1 else np.minimum(widest, T / (turns - 1))
    passed = np.diff(layers.compute[0 if layers.apart else layers.first_mode])
    counted = least * passed / np.maximum(widest, 1e-300)
    paced = M * np.diff(compute) / np.maximum(T + widest, 1e-300)
    return np.concatenate([[0.0], np.cumsum(np.minimum(np.maximum(counted, paced), NEVER))])


def devices_around(
    needs: NDArray[np.float64], behind: NDArray[np.float64] | None
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Devices that the layers behind each cut take at the least, and those that the layers before
    it take; of shape (N+1,) each.

    `needs` is what the compute before each cut takes, and `behind` what is known of the layers
    behind: with more devices behind a cut than need be, the layers before it take no fewer.
    """
    if behind is None:
        return needs[-1] - needs, needs
    possible = np.where(np.isinf(behind), 0.0, behind)
    return np.maximum(behind, needs[-1] - needs), np.maximum(needs, behind[0] - possible)


def extra_of(layers: Layers) -> tuple[float, NDArray[np.int64]]:
    """What recomputation adds to the pass of the layers before each cut, shape (N+1,), in whole
    units of so many seconds.
    """
    forward = layers.compute[1] - layers.compute[0]
    unit_s = max(float(forward[-1]), 1e-300) / _UNITS
    return unit_s, np.rint(forward / unit_s).astype(np.int64)


def least(
    find: Callable[[float], Partition | None],
    measure: Callable[[Partition], float],
    lower: float,
    upper: float,
    slack: float,
) -> tuple[Partition | None, float, float]:
    """The plan with the least measure below `upper`, that measure (`upper` where there is no plan),
    and the largest bound without a plan.

    `find` tells for a bound whether there is a plan, which need not be the best; none is below
    `lower`. The two meet within `slack`.
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
