"""The probe of nested plans: whether there is one within given seconds, and which.

Nested plans are pipelines inside the members of levels, replicated over them. The family is that of
PipeDream's recurrence (SOSP 2019, section 3.1), under the physical cost and within the memory;
members may stay idle.
"""

from __future__ import annotations

from functools import partial

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from partopt.cost.kernels import Layers, layers_of
from partopt.cost.links import network_of, port_rate
from partopt.cost.problem import NESTED, NONE, Partition, Problem
from partopt.planners.blocks import Block, stages_of
from partopt.planners.optimal.needs import (
    devices_around,
    devices_needed,
    find_at_depth,
)
from partopt.planners.optimal.nested.entries import Caps, Levels, empty_nest
from partopt.planners.optimal.nested.sweep import begin, open_inside, solve
from partopt.planners.optimal.probes import Answer, Counts

WORK = 10_000_000  # blocks and ends that the probes of a problem may try in all: a second or two
_ENTRIES = 16  # of a cut and a kind, at most
_ENTRIES_COUNTED = 128  # where stages are counted


class NestedProbe:
    """Tells whether there is a nested plan within given seconds, and which.

    Its tables are made once, and its limit of work is shared by all its answers.
    """

    family = NESTED

    def __init__(self, problem: Problem) -> None:
        self.problem, self.layers = problem, layers_of(problem)
        self.levels = levels_of(problem)
        entries = _ENTRIES if problem.stages is None else _ENTRIES_COUNTED
        self.nest = empty_nest(len(self.levels.size), problem.chain.layers, entries, WORK)

    def find(
        self,
        T: float,
        counts: Counts,
        stages: int | None,
        min_devices_after: NDArray[np.float64] | None = None,
    ) -> Answer:
        """A plan within `T` seconds, as `partopt.planners.optimal.probes.Probe`."""
        needs = devices_needed(self.layers, T)
        after, _ = devices_around(needs, min_devices_after)
        possible = np.where(np.isinf(after), 0.0, after)
        caps = Caps(
            T=T,
            needs=needs,
            min_replicas=counts[0],
            max_replicas=min(counts[1], self.layers.M) if self.layers.M else counts[1],
            stages=stages or 0,
            min_devices_after=after,
            floor=np.minimum.accumulate(after),
            ceiling=np.maximum.accumulate(possible[::-1])[::-1],
        )
        return find_at_depth(self.layers, stages, partial(self._solve, caps))

    def _solve(self, caps: Caps, layers: Layers) -> Answer:
        """A plan within the caps."""
        nest, L, N = self.nest, len(self.levels.size), self.problem.chain.layers
        nest.frames[L - 1] = np.zeros(1, nest.frames.dtype)[0]
        nest.frames[L - 1]["last"], nest.frames[L - 1]["outside"] = N, 1
        nest.counts[L - 1] = 0
        nest.rows[L - 1, N, L, 0] = np.zeros(1, nest.rows.dtype)[0]
        nest.counts[L - 1, N, L] = 1
        solve(layers, caps, self.levels, nest, L)
        found = nest.rows[L - 1, 0, 0, : nest.counts[L - 1, 0, 0]]
        fitting = [row for row in found if caps.stages in (0, row["stages"])]
        plan = None
        if fitting:
            best = min(fitting, key=lambda row: (row["stages"], row["used"]))
            blocks = self._blocks(layers, caps, L, 0, 0, best)
            plan = Partition(NESTED, stages_of(blocks, self.levels.group.tolist()))
        work = nest.work[0]
        return Answer(plan, complete=bool(work["dropped"] == 0), gave_up=bool(work["left"] <= 0))

    def _blocks(
        self, layers: Layers, caps: Caps, k: int, start: int, kind: int, wanted: np.void
    ) -> list[Block]:
        """The pipeline of level k from cut `start`.

        Its entry there has the members, devices and stages of `wanted`.
        """
        nest, rows, same = self.nest, self.nest.rows[k - 1], ["members", "used", "stages"]
        found = rows[start, kind, : nest.counts[k - 1, start, kind]][same]
        position = int(np.flatnonzero(found == wanted[same])[0])
        path: list[tuple[int, int, np.void]] = []
        while start < nest.frames[k - 1]["last"]:
            row = rows[start, kind, position].copy()
            path.append((start, kind, row))
            start, kind, position = int(row["end"]), k, int(row["end_entry"])
        blocks: list[Block] = []
        first = 0
        for start, kind, row in path:
            inside = self._inside(layers, caps, k, start, kind, row) if k > 1 else []
            recompute = bool(row["mode"]) if k == 1 and self.problem.recompute_per_stage else None
            copies = int(row["copies"])
            blocks.append(Block(start, int(row["end"]), first, copies, inside, recompute))
            first += copies
        return blocks

    def _inside(
        self, layers: Layers, caps: Caps, k: int, start: int, kind: int, row: np.void
    ) -> list[Block]:
        """The pipeline inside the block `row` of level k.

        It is found a second time in the same way, since its entries have been overwritten.
        """
        nest, wanted, frame = self.nest, row.copy(), self.nest.frames[k - 1]
        frame["end"], frame["end_entry"], frame["tried"] = (
            row["end"],
            row["end_entry"],
            row["copies"],
        )
        open_inside(caps, self.levels, nest, k)
        begin(nest, k)
        left = int(nest.work[0]["left"])
        nest.work["left"] = 2**60
        solve(layers, caps, self.levels, nest, k - 1)
        nest.work["left"] = left
        wanted["members"] = row["inside"]
        return self._blocks(layers, caps, k - 1, start, kind, wanted)


def levels_of(problem: Problem) -> Levels:
    """The levels with more than one member, for compiled code."""
    topology, serial = problem.exchange_topology, problem.serial_transfers
    levels = [level for level in topology.levels if level.size > 1]
    parted = [k for k, level in enumerate(topology.levels, start=1) if level.size > 1]
    size = np.array([level.size for level in levels], dtype=np.int64)
    return Levels(
        size=size,
        group=np.concatenate([[1], np.cumprod(size)]),
        side=np.array([port_rate(k, topology) for k in parted]),
        network=network_of(structs.replace(topology, levels=levels), serial),
        bus=np.array([level.bus for level in levels], dtype=np.bool_),
    )


def differs(problem: Problem) -> bool:
    """Whether there are nested plans that are not contiguous: with several levels, and replicas."""
    return (
        problem.replication != NONE and sum(level.size > 1 for level in problem.topology.levels) > 1
    )
