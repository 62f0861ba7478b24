"""Where the ranks of a stage may lie before an entry.

The fewest replicas that carry it, as late as possible.
"""

from __future__ import annotations

from typing import NamedTuple

from partopt.cost.capacity import first_at_least
from partopt.cost.compiled import compiled
from partopt.cost.kernels import NEVER
from partopt.cost.tolerances import EPSILON, TINY
from partopt.planners.optimal.contiguous.entries import (
    Entry,
    insert_undominated,
    is_dominated,
    is_empty,
    room_before,
)

# r, rho   replicas of a stage, and its first rank modulo G, the ranks of a level-(L-1) component
# gap      level at which a stage and its neighbour part; 0 where it does not matter


class Link(NamedTuple):
    """A stage to be placed: the entry behind it, its recomputation and its fewest replicas."""

    end: int  # the cut at its end, and the entry there
    end_entry: int
    extra: int  # recomputation of it and of all behind it
    replicas: int  # at the least


@compiled()
def _waits(layers, caps, rho, r, stage, gap_before, gap_after):  # type: ignore[no-untyped-def]
    """Whether devices that wait for their transfers keep the pace.

    They take compute and both exchanges for each microbatch.
    """
    waiting = stage.compute_s / r
    if gap_before > 0:
        waiting += stage.before / caps.exchange[gap_before - 1, rho, r]
    if gap_after > 0:
        waiting += stage.after / caps.exchange[gap_after - 1, rho, r]
    if layers.M == 0:
        return waiting <= caps.pace
    return -(-layers.M // r) * r * waiting <= (caps.pace + stage.passed_s) * (1 + EPSILON)


@compiled()
def _updates(layers, caps, rho, r, stage):  # type: ignore[no-untyped-def]
    """Whether there is time to exchange gradients and to update.

    The gradients include those of parameters tied with other stages.
    """
    seconds = caps.slope[rho, r] * stage.weights + caps.latency[rho, r] + stage.tied_s
    return seconds <= caps.update * (1 if layers.M else r)


@compiled()
def fewest_replicas(layers, caps, rho, r, most, stage, gap_before, gap_after):  # type: ignore[no-untyped-def]
    """The fewest replicas from r to `most` with which a stage carries its weights and its cuts.

    The stage begins at rho. The result is above `most` where none do.
    """
    within = caps.pace if layers.M == 0 else (caps.pace + stage.passed_s) / layers.M
    scale = 1.0 / max(within, TINY)
    if layers.M and stage.tied_s > caps.update:
        return NEVER
    while r <= most:
        s = first_at_least(caps.weights[rho], r, stage.weights)
        if gap_before > 0:
            s = first_at_least(caps.sides[gap_before - 1, rho], s, stage.before * scale)
        if gap_after > 0:
            s = first_at_least(caps.sides[gap_after - 1, rho], s, stage.after * scale)
        if s == r:
            paced = not layers.serial or _waits(layers, caps, rho, r, stage, gap_before, gap_after)
            if paced and (stage.tied_s == 0.0 or _updates(layers, caps, rho, r, stage)):
                break
            s = r + 1
        r = s
    return r


@compiled()
def latest_feasible_start(layers, caps, row, floor, rho, r, stage, gap):  # type: ignore[no-untyped-def]
    """The latest start at rho of a stage before the entry `row`, and its fewest replicas.

    The start is `floor` or later, the replicas are r or more; (-1, 0) where there is none.
    """
    G, most = caps.group[-2], min(caps.max_replicas, row.limit - floor)
    while True:
        r = fewest_replicas(layers, caps, rho, r, most, stage, gap, row.gap)
        start = row.limit - r - (row.limit - r - rho) % G
        if r > most or start < floor:
            return -1, 0
        if start + r > row.low:
            return start, r
        r += row.low + 1 - start - r


@compiled()
def place(layers, caps, table, i, floor, row, link, stage):  # type: ignore[no-untyped-def]
    """Add every useful place of a stage that begins at cut i before the entry `row`."""
    L, G, r = len(caps.group) - 1, caps.group[-2], link.replicas
    first, last = (0, 0) if caps.free[i] else (1, L)
    if first == last and row.limit - r >= floor:
        rho = (row.limit - r) % G
        start, replicas = latest_feasible_start(layers, caps, row, floor, rho, r, stage, first)
        if start == row.limit - r:
            _add(caps, table, i, floor, row, link, stage.mode, first, start, replicas)
            return
    for gap in range(first, last + 1):
        least = max(r, caps.min_replicas_for_cut[gap, i])
        if least > caps.max_replicas or row.limit - least < floor:
            continue
        used = row.used + least if caps.limited else NEVER
        for latest in range(row.limit - least, max(floor - 1, row.limit - least - G), -1):
            entries = table.rows[i, : table.counts[i]]
            if is_dominated(entries, caps.group, gap, latest, used, float(link.extra), floor):
                continue
            start, replicas = latest_feasible_start(
                layers, caps, row, floor, latest % G, least, stage, gap
            )
            if start >= 0:
                _add(caps, table, i, floor, row, link, stage.mode, gap, start, replicas)


@compiled()
def _add(caps, table, i, floor, row, link, mode, gap, start, replicas):  # type: ignore[no-untyped-def]
    """Add the entry of a stage at `start`, if the stage before it, at this gap, has room."""
    room = room_before(caps.group, gap, start)
    if is_empty(room, floor):
        return
    entry = Entry(
        room.limit,
        room.low,
        row.used + replicas,
        link.extra,
        gap,
        row.stages + 1,
        link.end,
        link.end_entry,
        start,
        replicas,
        mode,
    )
    insert_undominated(table, caps.group, caps.limited, i, entry)
