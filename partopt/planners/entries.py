"""Where a stage may stand, and which of the ways to place the layers from a cut on are worth
keeping.

An entry of cut c is a way to place the layers from c on, as the stage before sees it: that stage's
ranks must end after rank LOW and by rank LIMIT. The level at which it parts from the next stage
(the gap) decides what both pay for their sides of the cut. A cut whose sides are cheap enough at
every level is free: one kind of entry, gap 0, serves all. Of two entries the one that leaves more
room and uses fewer devices is at least as good: every stage before fits there too, moved by whole
level-(L-1) components, which changes no cost.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from partopt.cost.capacity import first_at_least
from partopt.cost.compiled import compiled
from partopt.cost.kernels import NEVER

# r, rho   replicas of a stage, and its first rank modulo G, the ranks of a level-(L-1) component
# gap      level at which a stage and its neighbour part; 0 where it does not matter

# What an entry holds; the last five are the stage that begins at the cut and the entry at its end.
LIMIT, LOW, USED, EXTRA, GAP, STAGES, CUT, ENTRY, START, REPLICAS, MODE = range(11)
COLUMNS = 11


class Caps(NamedTuple):
    """What stages may carry in one probe."""

    pace: float  # seconds: `partopt.cost.kernels.replicas_to_keep_pace`
    # devices that the layers before each cut take by their compute, at the least, shape (N+1,)
    needs: NDArray[np.float64]
    # devices behind a cut at the least, infinite where there can be no cut, shape (N+1,)
    behind: NDArray[np.float64]
    # devices that the layers before a cut take at the least, shape (N+1,)
    ahead: NDArray[np.float64]
    # replicas that a stage beside a cut has at the least, by its gap, shape (L+1, N+1)
    bearing: NDArray[np.int64]
    least: int  # replicas of a stage
    most: int
    # in the unit of `Layers.extra`: what all stages together may add to a microbatch's pass by
    # recomputing
    extra: float
    limited: bool  # devices in use matter: memory is limited
    group: NDArray[np.int64]  # ranks of the components of each level, shape (L+1,)
    # the largest of `weights` for each length of a run, a tree of shape (2 size,)
    any_weights: NDArray[np.float64]
    # bytes that the all-reduce of each shape can carry, trees of shape (G, 2 size)
    weights: NDArray[np.float64]
    # s/byte of parameters that each shape takes to update them, shape (G, P+1)
    slope: NDArray[np.float64]
    latency: NDArray[np.float64]  # s, shape (G, P+1)
    update: float  # seconds that an update may take, asynchronous for each replica
    sides: NDArray[np.float64]  # bytes/s of a side of each shape, trees of shape (L, G, 2 size)
    exchange: NDArray[np.float64]  # bytes/s, shape (L, G, P+1)
    free: NDArray[np.bool_]  # cuts at which the gap does not matter, shape (N+1,)


class Table(NamedTuple):
    """The entries of every cut, and bounds on them."""

    rows: NDArray[np.int64]  # shape (N+1, entries, COLUMNS)
    counts: NDArray[np.int64]  # entries of each cut, shape (N+1,)
    top: NDArray[np.float64]  # the largest LIMIT of each cut, shape (N+1,)
    used: NDArray[np.float64]  # the smallest USED
    extra: NDArray[np.float64]  # the smallest EXTRA
    # bounds of blocks of cuts, shape (2, blocks, 5): see `partopt.planners.probe`
    blocks: NDArray[np.float64]
    dropped: NDArray[np.int64]  # entries for which there was no room, shape (1,)


def empty_table(layers: int, entries: int, block: int) -> Table:
    """A table without entries."""
    return Table(
        np.zeros((layers + 1, entries, COLUMNS), np.int64),
        np.zeros(layers + 1, np.int64),
        np.full(layers + 1, -np.inf),
        np.full(layers + 1, np.inf),
        np.full(layers + 1, np.inf),
        np.zeros((2, layers // block + 1, 5)),
        np.zeros(1, np.int64),
    )


@compiled()
def as_good(group, gap, limit, low, other_limit, other_low):  # type: ignore[no-untyped-def]
    """Whether every stage that may end before an entry of this gap may, moved by whole components,
    end before the other.
    """
    L = len(group) - 1
    if gap == 0 or gap == L:
        return limit >= other_limit
    G = group[L - 1]
    return (
        low % G == other_low % G
        and low // G >= other_low // G
        and limit - low >= other_limit - other_low
    )


@compiled()
def covered(entries, group, gap, start, used, extra, floor):  # type: ignore[no-untyped-def]
    """Whether a stage that begins at `start`, with `used` devices and `extra` or more, adds nothing
    to the entries of its cut.
    """
    limit = start if gap == 0 else start // group[gap - 1] * group[gap - 1]
    low = 0 if gap == 0 else start // group[gap] * group[gap]
    if limit < floor or (floor > 0 and limit <= low):
        return True
    for position in range(len(entries)):
        cheap = (
            entries[position, USED] <= used
            and entries[position, EXTRA] <= extra
            and entries[position, GAP] == gap
        )
        if cheap and as_good(
            group, gap, entries[position, LIMIT], entries[position, LOW], limit, low
        ):
            return True
    return False


@compiled()
def all_covered(entries, group, free, top, used, extra, floor):  # type: ignore[no-untyped-def]
    """Whether no stage that begins by `top`, with `used` devices and `extra` or more, adds anything
    to the entries of its cut.
    """
    top = min(top, group[-1] - 1)
    if top < floor:
        return True
    if free:
        return covered(entries, group, 0, top, used, extra, floor)
    L, G = len(group) - 1, group[-2]
    if not covered(entries, group, L, top, used, extra, floor):
        return False
    for gap in range(1, L):
        size = group[gap]
        for member in range(G // size):
            first = top // G * G + member * size
            if first <= top < first + size - 1:
                if not covered(entries, group, gap, top, used, extra, floor):
                    return False
                first -= G
            elif first > top:
                first -= G
            if first >= 0 and not covered(
                entries, group, gap, first + size - 1, used, extra, floor
            ):
                return False
    return True


@compiled()
def put(rows, kept, entry):  # type: ignore[no-untyped-def]
    """Put an entry behind the `kept` rows.

    How many there are then, and how many had to be left out for want of room.
    """
    if kept == len(rows):
        return kept, 1
    rows[kept] = entry
    return kept + 1, 0


@compiled()
def keep(table, caps, c, entry):  # type: ignore[no-untyped-def]
    """Add an entry to cut c, unless one there is as good; leave out those that it makes useless."""
    rows, kept = table.rows[c], 0
    for position in range(table.counts[c]):
        row = rows[position]
        if row[GAP] == entry[GAP]:
            worse = (not caps.limited or entry[USED] <= row[USED]) and entry[EXTRA] <= row[EXTRA]
            worse = worse and as_good(
                caps.group, row[GAP], entry[LIMIT], entry[LOW], row[LIMIT], row[LOW]
            )
            better = (not caps.limited or row[USED] <= entry[USED]) and row[EXTRA] <= entry[EXTRA]
            better = better and as_good(
                caps.group, row[GAP], row[LIMIT], row[LOW], entry[LIMIT], entry[LOW]
            )
            if better and not (worse and (entry[STAGES], entry[USED]) < (row[STAGES], row[USED])):
                return
            if worse:
                continue
        if kept < position:
            rows[kept] = row
        kept += 1
    table.counts[c], dropped = put(rows, kept, entry)
    table.dropped[0] += dropped


@compiled()
def _waits(layers, caps, rho, r, C, passed, before, after, gap_before, gap_after):  # type: ignore[no-untyped-def]
    """Whether devices that wait for their transfers keep the pace: compute and both exchanges, per
    microbatch.
    """
    waiting = C / r
    if gap_before > 0:
        waiting += before / caps.exchange[gap_before - 1, rho, r]
    if gap_after > 0:
        waiting += after / caps.exchange[gap_after - 1, rho, r]
    if layers.M == 0:
        return waiting <= caps.pace
    return -(-layers.M // r) * r * waiting <= (caps.pace + passed) * (1 + 1e-15)


@compiled()
def _updates(layers, caps, rho, r, W, tied):  # type: ignore[no-untyped-def]
    """Whether there is time to exchange gradients, those of tied parameters for `tied` seconds with
    other stages, and to update.
    """
    return caps.slope[rho, r] * W + caps.latency[rho, r] + tied <= caps.update * (
        1 if layers.M else r
    )


@compiled()
def fewest_replicas(  # type: ignore[no-untyped-def]
    layers, caps, rho, r, most, W, tied, C, passed, before, after, gap_before, gap_after
):
    """The fewest replicas from r to `most` with which a stage that begins at rho carries its
    weights and its cuts; more where none do.
    """
    within = caps.pace if layers.M == 0 else (caps.pace + passed) / layers.M
    scale = 1.0 / max(within, 1e-300)
    if layers.M and tied > caps.update:
        return NEVER
    while r <= most:
        s = first_at_least(caps.weights[rho], r, W)
        if gap_before > 0:
            s = first_at_least(caps.sides[gap_before - 1, rho], s, before * scale)
        if gap_after > 0:
            s = first_at_least(caps.sides[gap_after - 1, rho], s, after * scale)
        if s == r:
            paced = not layers.serial or _waits(
                layers, caps, rho, r, C, passed, before, after, gap_before, gap_after
            )
            if paced and (tied == 0.0 or _updates(layers, caps, rho, r, W, tied)):
                break
            s = r + 1
        r = s
    return r


@compiled()
def settle(layers, caps, row, floor, rho, r, W, tied, C, passed, before, after, gap):  # type: ignore[no-untyped-def]
    """The latest start at rho, from `floor` on, of a stage before the entry `row`, and its fewest
    replicas; (-1, 0) where there is none.
    """
    G, most = caps.group[-2], min(caps.most, row[LIMIT] - floor)
    while True:
        r = fewest_replicas(
            layers, caps, rho, r, most, W, tied, C, passed, before, after, gap, row[GAP]
        )
        start = row[LIMIT] - r - (row[LIMIT] - r - rho) % G
        if r > most or start < floor:
            return -1, 0
        if start + r > row[LOW]:
            return start, r
        r += row[LOW] + 1 - start - r
