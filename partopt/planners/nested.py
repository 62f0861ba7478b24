"""The probe of the nested family: whether pipelines inside the members of levels, replicated over
them, keep given bounds, and which.

The family is that of PipeDream's recurrence (SOSP 2019, section 3.1), under the physical cost and
within the memory; members may stay idle.
"""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from partopt.cost.kernels import Layers, layers_of
from partopt.cost.problem import NESTED, NONE, Partition, Problem
from partopt.documents.topology import Topology
from partopt.planners.blocks import Block, stages_of
from partopt.planners.nested_entries import (
    AT,
    COLUMNS,
    COPIES,
    END,
    ENTRY,
    INSIDE,
    LAST,
    MEMBERS,
    MODE,
    POSITION,
    STAGES,
    TRIED,
    USED,
    Bounds,
    Levels,
    Nest,
)
from partopt.planners.nested_sweep import begin, open_inside, solve
from partopt.planners.probe import reaches, widest
from partopt.planners.searching import Counts, at_its_depth, devices_around, devices_needed

# T, U   seconds: as `partopt.planners.searching` has them

WORK = 10_000_000  # blocks and ends that the probes of a problem may try in all: some seconds
_ENTRIES = 16  # of a cut and a kind, at most
_ENTRIES_COUNTED = 128  # where stages are counted


class NestedProbe:
    """Tells whether there is a nested plan within given bounds, and which.

    Its tables are made once.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem, self.layers, self.levels = (
            problem,
            layers_of(problem),
            levels_of(problem.topology),
        )
        self.widest = widest(self.layers, reaches(self.layers))
        entries = _ENTRIES if problem.stages is None else _ENTRIES_COUNTED
        self.nest = _nest(len(self.levels.size), problem.chain.layers, entries, WORK)

    @property
    def complete(self) -> bool:
        """Whether no entry was ever left out for want of room."""
        return bool(self.nest.work[1] == 0)

    @property
    def gave_up(self) -> bool:
        """Whether the work that may be done is done: from then on `None` proves nothing."""
        return bool(self.nest.work[0] <= 0)

    def find(
        self,
        T: float,
        U: float,
        counts: Counts,
        stages: int | None,
        behind: NDArray[np.float64] | None = None,
    ) -> Partition | None:
        """A plan within the bounds; `None` where none was found, which is a proof where the probe
        is `complete` and has not given up.

        `behind` are devices that the layers behind each cut take at the least, infinite where no
        stage may begin, shape (N+1,).
        """
        needs = devices_needed(self.layers, self.widest, T, *counts)
        least, _ = devices_around(needs, behind)
        possible = np.where(np.isinf(least), 0.0, least)
        floor, ceiling = np.minimum.accumulate(least), np.maximum.accumulate(possible[::-1])[::-1]
        limited = self.problem.memory_bytes is not None
        bounds = Bounds(T, U, needs, *counts, limited, stages or 0, least, floor, ceiling)
        return at_its_depth(self.layers, limited, stages, partial(self._solved, bounds))

    def _solved(self, bounds: Bounds, layers: Layers) -> Partition | None:
        """A plan within the bounds."""
        nest, L, N = self.nest, len(self.levels.size), self.problem.chain.layers
        nest.frames[L - 1] = [N, 0, 0, 0, 1, 0, 0, 0]
        nest.crossed[L - 1] = 0.0
        nest.counts[L - 1] = 0
        nest.rows[L - 1, N, L, 0] = 0
        nest.counts[L - 1, N, L] = 1
        solve(layers, bounds, self.levels, nest, L)
        found = nest.rows[L - 1, 0, 0, : nest.counts[L - 1, 0, 0]]
        fitting = [row for row in found if bounds.stages in (0, row[STAGES])]
        if not fitting:
            return None
        best = min(fitting, key=lambda row: (row[STAGES], row[USED]))
        return Partition(
            NESTED,
            stages_of(self._blocks(layers, bounds, L, 0, 0, best), self.levels.group.tolist()),
        )

    def within_memory(self, memory_bytes: int) -> NestedProbe:
        """The probe of the same problem within so much memory a device, which counts stages and
        gives up sooner.
        """
        other = copy(self)
        other.problem = replace(self.problem, memory_bytes=memory_bytes)
        other.layers = self.layers._replace(memory=float(memory_bytes))
        other.widest = widest(other.layers, reaches(other.layers))
        other.nest = _nest(
            len(self.levels.size), self.problem.chain.layers, _ENTRIES_COUNTED, WORK // 10
        )
        return other

    def _blocks(
        self, layers: Layers, bounds: Bounds, k: int, start: int, kind: int, wanted: np.ndarray
    ) -> list[Block]:
        """The pipeline of level k from cut `start`, whose entry there has the members, devices and
        stages of `wanted`.
        """
        nest, rows = self.nest, self.nest.rows[k - 1]
        of = (MEMBERS, USED, STAGES)
        position = next(
            p
            for p in range(nest.counts[k - 1, start, kind])
            if (rows[start, kind, p, of] == wanted[list(of)]).all()
        )
        path: list[tuple[int, int, np.ndarray]] = []
        while start < nest.frames[k - 1, LAST]:
            row = rows[start, kind, position].copy()
            path.append((start, kind, row))
            start, kind, position = int(row[END]), k, int(row[ENTRY])
        blocks: list[Block] = []
        first = 0
        for start, kind, row in path:
            inside = self._inside(layers, bounds, k, start, kind, row) if k > 1 else []
            recompute = bool(row[MODE]) if k == 1 and self.problem.recompute_per_stage else None
            blocks.append(Block(start, int(row[END]), first, int(row[COPIES]), inside, recompute))
            first += int(row[COPIES])
        return blocks

    def _inside(
        self, layers: Layers, bounds: Bounds, k: int, start: int, kind: int, row: np.ndarray
    ) -> list[Block]:
        """The pipeline inside the block `row` of level k: found again as it was found, since its
        entries have been written over.
        """
        nest, wanted = self.nest, row.copy()
        nest.frames[k - 1, [AT, POSITION, TRIED]] = row[END], row[ENTRY], row[COPIES]
        open_inside(bounds, self.levels, nest, k)
        begin(nest, k)
        work, nest.work[0] = int(nest.work[0]), 2**60
        solve(layers, bounds, self.levels, nest, k - 1)
        nest.work[0] = work
        wanted[MEMBERS] = row[INSIDE]
        return self._blocks(layers, bounds, k - 1, start, kind, wanted)


def _nest(L: int, N: int, entries: int, work: int) -> Nest:
    """Empty tables for L levels, N layers and so many entries of a cut and a kind, and the work
    that may be done.
    """
    rows, counts = (
        np.zeros((L, N + 1, L + 1, entries, COLUMNS), np.int64),
        np.zeros((L, N + 1, L + 1), np.int64),
    )
    return Nest(
        rows, counts, np.zeros((L, TRIED + 1), np.int64), np.zeros((L, 2)), np.array([work, 0])
    )


def levels_of(topology: Topology) -> Levels:
    """The levels with more than one member, for compiled code."""
    levels = [level for level in topology.levels if level.size > 1]
    rates = np.array([level.bandwidth_bytes_per_s for level in levels])
    bus = np.array([level.bus for level in levels], dtype=np.bool_)
    size = np.array([level.size for level in levels], dtype=np.int64)
    return Levels(
        size=size,
        group=np.concatenate([[1], np.cumprod(size)]),
        side=np.where(bus, rates / 2, rates),
        exchange=rates / 2,
        ring=1 / (rates * np.array([level.links for level in levels])),
        latency=np.array([level.latency_s for level in levels]),
        bus=bus,
    )


def differs(problem: Problem) -> bool:
    """Whether there are nested plans that are not contiguous: with several levels, and replicas."""
    return (
        problem.replication != NONE and sum(level.size > 1 for level in problem.topology.levels) > 1
    )
