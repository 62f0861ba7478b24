"""The probe of contiguous plans: whether there is one within given seconds, and which."""

from __future__ import annotations

from functools import partial

import numpy as np
from numpy.typing import NDArray

from partopt.cost.capacity import Shapes, shapes_of, trees_of
from partopt.cost.kernels import Layers, layers_of
from partopt.cost.problem import CONTIGUOUS, Assignment, Partition, Problem
from partopt.documents.topology import Topology
from partopt.errors import PartoptError
from partopt.planners.optimal.contiguous.caps import Caps, caps_of
from partopt.planners.optimal.contiguous.entries import Table, empty_table
from partopt.planners.optimal.contiguous.sweep import begin, sweep
from partopt.planners.optimal.needs import (
    devices_around,
    devices_needed,
    find_at_depth,
    furthest_ends,
)
from partopt.planners.optimal.probes import Answer, Counts

SHAPE_LIMIT = 9_000_000  # shapes times levels; about 1 GB of tables
BLOCKS = (32, 1024)  # cuts that are passed over at once
_ENTRIES = 64  # of a cut, at most, where there are several levels
_ENTRIES_IN_ALL = 10_000_000  # 88 bytes each


class ContiguousProbe:
    """Tells whether there is a contiguous plan within given seconds, and which.

    Its tables are made once. `shapes` are what runs of ranks carry, by default as the topology has
    it; `blocks` how many cuts are passed over at once, first in small blocks and then in large
    ones.
    """

    family = CONTIGUOUS

    def __init__(
        self, problem: Problem, shapes: Shapes | None = None, blocks: tuple[int, int] = BLOCKS
    ) -> None:
        _check_size(problem.topology)
        self.problem, self.layers = problem, layers_of(problem)
        self.shapes = shapes or shapes_of(problem.exchange_topology, problem.serial_transfers)
        self.blocks = blocks
        self.furthest = furthest_ends(self.layers)
        sides = self.shapes.sides
        flat = trees_of(sides.reshape(-1, sides.shape[-1]))
        self.sides = flat.reshape(*sides.shape[:-1], -1)
        self.tables: list[Table] = []
        # caps for which tables of ever more stages have been filled, and how many of these
        self.swept: tuple[object, int] = (None, 0)

    def find(
        self,
        T: float,
        counts: Counts,
        stages: int | None,
        min_devices_after: NDArray[np.float64] | None = None,
    ) -> Answer:
        """A plan within `T` seconds, rounding apart, or a proof that there is none.

        Each stage has as many replicas as `counts` says, from and to, and there are `stages`
        stages, `None` for any number. `min_devices_after` are devices that the layers behind each
        cut take at the least, infinite where no stage may begin, by default what their compute
        takes; shape (N+1,).
        """
        needs = devices_needed(self.layers, T)
        around = devices_around(needs, min_devices_after)
        caps = caps_of(self.layers, self.shapes, self.sides, T, counts, needs, around)
        return find_at_depth(self.layers, stages, partial(self._sweep, caps, stages))

    def _sweep(self, caps: Caps, stages: int | None, layers: Layers) -> Answer:
        """A plan within the caps.

        For the same caps, tables of ever more stages are filled only once.
        """
        of = (caps.T, caps.min_replicas, caps.max_replicas, layers.depth)
        same, filled = self.swept
        if stages is None or same != of:
            filled = 0
            self._make_tables(1)
            begin(self.tables[0], self.problem.topology.devices)
        self.swept = (None, 0) if stages is None else (of, max(stages, filled))
        for k in range(filled, stages or 1):
            source = table = self.tables[0]
            if stages is not None:
                self._make_tables(stages + 1)
                source, table = self.tables[k], self.tables[k + 1]
                begin(table, 0)
            sweep(layers, caps, self.furthest, source, table)
        last, tables = stages or 0, self.tables[: (stages or 0) + 1]
        return Answer(
            plan=self._plan(last, stages is None) if tables[last].counts[0] > 0 else None,
            complete=all(table.dropped[0] == 0 for table in tables),
            devices_after=tables[0].used.copy(),
        )

    def _make_tables(self, count: int) -> None:
        layers, several_levels = self.problem.chain.layers, len(self.shapes.group) > 2
        most = _ENTRIES if several_levels else 8
        entries = max(8, min(most, _ENTRIES_IN_ALL // (layers * count)))
        while len(self.tables) < count:
            self.tables.append(empty_table(layers, entries, self.blocks))

    def _plan(self, k: int, one_table: bool) -> Partition:
        """The plan behind the best entry of cut 0.

        Best are the fewest stages, then the fewest devices.
        """
        first = self.tables[k].rows[0, : self.tables[k].counts[0]]
        position = min(
            range(len(first)), key=lambda entry: first[["stages", "used"]][entry].tolist()
        )
        stages: list[Assignment] = []
        cut = 0
        while cut < self.problem.chain.layers:
            row = self.tables[k].rows[cut, position]
            start, end = int(row["start"]), int(row["end"])
            mode = bool(row["mode"]) if self.problem.recompute_per_stage else None
            stages.append(Assignment(cut, end, range(start, start + int(row["replicas"])), mode))
            cut, position, k = end, int(row["end_entry"]), k if one_table else k - 1
        return Partition(CONTIGUOUS, stages)


def _check_size(topology: Topology) -> None:
    """PartoptError where the tables of a topology's shapes outgrow memory."""
    component = topology.group_size(len(topology.levels) - 1)
    if component * topology.devices * len(topology.levels) > SHAPE_LIMIT:
        raise PartoptError(
            f"optimal: {topology.devices} devices in components of {component}: its tables "
            "outgrow memory",
            "describe the outermost level in more members, or fewer levels",
            code="topology-too-large",
            devices=topology.devices,
            component=component,
        )
