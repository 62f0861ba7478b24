"""Ways to place the layers from a cut on, and which of them are worth keeping.

An entry of cut c is a way to place the layers from c on, as the stage before sees it: that stage's
ranks must end after rank `low` and by rank `limit`. The level at which it parts from the next stage
(the gap) decides what both pay for their sides of the cut. A cut whose sides are cheap enough at
every level is free: one kind of entry, gap 0, serves all. Of two entries the one that leaves more
room dominates: every stage before fits there too, moved by whole level-(L-1) components, which
changes no cost.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from partopt.cost.compiled import compiled

# gap   level at which a stage and its neighbour part; 0 where it does not matter
# L     levels; group[k] is the number of ranks of a level-k component
# G     ranks of a level-(L-1) component


class Entry(NamedTuple):
    """A way to place the layers from a cut on; rows of a table have the same fields."""

    limit: int  # the stage before ends by this rank, and after `low`
    low: int
    used: int  # devices in use
    gap: int
    stages: int
    end: int  # where its first stage ends, and the entry there
    end_entry: int
    start: int  # first rank of its first stage
    replicas: int
    mode: int  # whether its first stage recomputes


class Room(NamedTuple):
    """Where the ranks of a stage may end: after rank `low` and by rank `limit`."""

    limit: int
    low: int


ROW = np.dtype([(name, np.int64) for name in Entry._fields], align=True)
# Bounds on the entries of a block of cuts: the largest limit + needed and the largest limit;
# `needed` are the fewest devices that the layers behind a cut take.
BLOCK = np.dtype(
    [(name, np.float64) for name in ("limit_and_needed", "limit")],
    align=True,
)


class Table(NamedTuple):
    """The entries of every cut, and bounds on them."""

    rows: NDArray[np.void]  # of ROW, shape (N+1, entries)
    counts: NDArray[np.int64]  # entries of each cut, shape (N+1,)
    limit: NDArray[np.float64]  # the largest of each cut, shape (N+1,)
    used: NDArray[np.float64]  # the smallest
    fine: NDArray[np.void]  # of BLOCK, shape (blocks,)
    coarse: NDArray[np.void]
    sizes: tuple[int, int]  # cuts in a fine block and in a coarse one, a multiple of it
    dropped: NDArray[np.int64]  # entries left out of full cuts, shape (1,)


def empty_table(layers: int, entries: int, sizes: tuple[int, int]) -> Table:
    """A table without entries."""
    return Table(
        np.zeros((layers + 1, entries), ROW),
        np.zeros(layers + 1, np.int64),
        np.full(layers + 1, -np.inf),
        np.full(layers + 1, np.inf),
        np.zeros(layers // sizes[0] + 1, BLOCK),
        np.zeros(layers // sizes[1] + 1, BLOCK),
        sizes,
        np.zeros(1, np.int64),
    )


@compiled()
def room_before(group, gap, start):  # type: ignore[no-untyped-def]
    """Where the stage before one that begins at rank `start` may end, parting from it at `gap`."""
    if gap == 0:
        return Room(start, 0)
    return Room(start // group[gap - 1] * group[gap - 1], start // group[gap] * group[gap])


@compiled()
def is_empty(room, floor):  # type: ignore[no-untyped-def]
    """Whether no stage can end there; one that has to ends at rank `floor` or later."""
    return room.limit < floor or (floor > 0 and room.limit <= room.low)


@compiled()
def dominates(group, gap, one, other):  # type: ignore[no-untyped-def]
    """Whether every stage that may end in the room `other` may end in `one`.

    The stage may be moved by whole components.
    """
    L = len(group) - 1
    if gap == 0 or gap == L:
        return one.limit >= other.limit
    G = group[L - 1]
    return (
        one.low % G == other.low % G
        and one.low // G >= other.low // G
        and one.limit - one.low >= other.limit - other.low
    )


@compiled()
def is_dominated(entries, group, gap, start, floor):  # type: ignore[no-untyped-def]
    """Whether a stage that begins at `start` adds nothing to the entries of its cut."""
    room = room_before(group, gap, start)
    if is_empty(room, floor):
        return True
    for position in range(len(entries)):
        row = entries[position]
        if row.gap == gap and dominates(group, gap, row, room):
            return True
    return False


@compiled()
def all_dominated(entries, group, free, latest, floor):  # type: ignore[no-untyped-def]
    """Whether no stage that begins by `latest` adds anything to the entries of its cut."""
    latest = min(latest, group[-1] - 1)
    if latest < floor:
        return True
    if free:
        return is_dominated(entries, group, 0, latest, floor)
    L, G = len(group) - 1, group[-2]
    if not is_dominated(entries, group, L, latest, floor):
        return False
    for gap in range(1, L):
        size = group[gap]
        for member in range(G // size):
            first = latest // G * G + member * size
            if first <= latest < first + size - 1:
                if not is_dominated(entries, group, gap, latest, floor):
                    return False
                first -= G
            elif first > latest:
                first -= G
            last = first + size - 1
            if first >= 0 and not is_dominated(entries, group, gap, last, floor):
                return False
    return True


@compiled()
def append(rows, count, entry):  # type: ignore[no-untyped-def]
    """Write an entry behind the first `count` rows.

    Returns how many there are then, and how many were dropped because `rows` is full.
    """
    if count == len(rows):
        return count, 1
    row = rows[count]
    row.limit, row.low, row.used = entry.limit, entry.low, entry.used
    row.gap, row.stages, row.mode = entry.gap, entry.stages, entry.mode
    row.end, row.end_entry = entry.end, entry.end_entry
    row.start, row.replicas = entry.start, entry.replicas
    return count + 1, 0


@compiled()
def insert_undominated(table, group, c, entry):  # type: ignore[no-untyped-def]
    """Add an entry to cut c unless one there dominates it; leave out those that it dominates.

    Of equal ones that with fewer stages stays, then that with fewer devices.
    """
    rows, kept = table.rows[c], 0
    for position in range(table.counts[c]):
        row = rows[position]
        if row.gap == entry.gap:
            worse = dominates(group, entry.gap, entry, row)
            fewer = (entry.stages, entry.used) < (row.stages, row.used)
            if dominates(group, entry.gap, row, entry) and not (worse and fewer):
                return
            if worse:
                continue
        if kept < position:
            rows[kept] = row
        kept += 1
    table.counts[c], dropped = append(rows, kept, entry)
    table.dropped[0] += dropped
