"""Ways to place the layers from a cut to the end of a nested pipeline, which of them are worth
keeping, and what is known of the pipelines.

Of two ways the one that leaves more members and uses fewer devices is at least as good.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from partopt.cost.compiled import compiled
from partopt.planners.entries import put

# L         levels with more than one member; k = 1..L, n_k members, innermost first
# N         layers; [i, c) is a stage, [i, end) a pipeline inside one component
# Q         copies of a pipeline, of all levels above it
# m         copies of a block on members of its level; at level 1 a device, so that they are a
#           stage's replicas inside its component
# kind      level of the cut before a pipeline; 0 where there is none
# R         devices in use behind a stage, in all

# What an entry holds: members in use from its cut to the end of the pipeline, devices in use behind
# its cut, stages behind it; then its
# first block: where it ends, the entry there, its copies, whether it recomputes (level 1), and the
# members of the entry inside it.
MEMBERS, USED, STAGES, END, ENTRY, COPIES, MODE, INSIDE = range(8)
COLUMNS = 8

# What is known of the pipeline of a level: its last layer, the level of the cut there, the last cut
# at which it may begin, the first that
# its members can reach, its copies Q, and the block that is tried: its end, the entry there, its
# copies.
LAST, AFTER, MUST, LOW, OUTSIDE, AT, POSITION, TRIED = range(8)

SLACK = 1e-6  # of a device: bounds are rounded with it, so that rounding errors leave nothing out


class Bounds(NamedTuple):
    """What stages may carry in one probe."""

    pace: float  # seconds: `partopt.cost.kernels.replicas_to_keep_pace`
    update: float  # seconds for a synchronous schedule's all-reduce and optimizer step
    # devices that the layers before each cut take by their compute, at the least, shape (N+1,)
    needs: NDArray[np.float64]
    least: int  # replicas of a stage
    most: int
    limited: bool  # devices in use matter: memory is limited
    stages: int  # exactly so many, 0 for any number
    # devices behind a cut at the least, infinite where there can be no cut, shape (N+1,)
    least_behind: NDArray[np.float64]
    floor: NDArray[np.float64]  # the least of them of all cuts up to one
    ceiling: NDArray[np.float64]  # the most of them of all cuts from one on


class Levels(NamedTuple):
    """The levels of a topology; index k-1."""

    size: NDArray[np.int64]  # n_k
    group: NDArray[np.int64]  # devices of a level-k component, shape (L+1,), of a device 1
    # bytes/s of one member's side of a cut; on a bus, of all of its members'
    side: NDArray[np.float64]
    # bytes/s in which a device waits for an activation and a gradient
    exchange: NDArray[np.float64]
    ring: NDArray[np.float64]  # s/byte of one member in an all-reduce
    latency: NDArray[np.float64]  # s
    bus: NDArray[np.bool_]


class Nest(NamedTuple):
    """The entries of the pipelines that are open, one of each level, and what is known of these."""

    rows: NDArray[np.int64]  # shape (L, N+1, L+1 kinds, entries, COLUMNS)
    counts: NDArray[np.int64]  # shape (L, N+1, L+1)
    frames: NDArray[np.int64]  # shape (L, 8)
    # the narrowest ring (s/byte) and the largest latency (s) of the levels above, shape (L, 2)
    crossed: NDArray[np.float64]
    # blocks and ends that may still be tried, and entries for which there was no room, shape (2,)
    work: NDArray[np.int64]


@compiled()
def known(bounds, nest, k, i, kind, members, used):  # type: ignore[no-untyped-def]
    """Whether an entry of this cut has no more members and devices."""
    for position in range(nest.counts[k - 1, i, kind]):
        other = nest.rows[k - 1, i, kind, position]
        if other[MEMBERS] <= members and (not bounds.limited or other[USED] <= used):
            return True
    return False


@compiled()
def keep(bounds, nest, k, i, kind, entry):  # type: ignore[no-untyped-def]
    """Add an entry, unless one there is as good; leave out those that it makes useless."""
    rows, kept, count = nest.rows[k - 1, i, kind], 0, nest.counts[k - 1, i, kind]
    for position in range(count):
        row = rows[position]
        if not bounds.stages or row[STAGES] == entry[STAGES]:
            better = row[MEMBERS] <= entry[MEMBERS] and (
                not bounds.limited or row[USED] <= entry[USED]
            )
            worse = row[MEMBERS] >= entry[MEMBERS] and (
                not bounds.limited or row[USED] >= entry[USED]
            )
            if better and not (worse and (entry[STAGES], entry[USED]) < (row[STAGES], row[USED])):
                return
            if worse:
                continue
        if kept < position:
            rows[kept] = row
        kept += 1
    nest.counts[k - 1, i, kind], dropped = put(rows, kept, entry)
    nest.work[1] += dropped
