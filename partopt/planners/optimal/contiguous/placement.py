"""Where the ranks of a stage may lie before an entry.

The fewest replicas that carry it, as late as possible.
"""

from __future__ import annotations

from typing import NamedTuple

from partopt.cost.capacity import first_at_least
from partopt.cost.compiled import compiled
from partopt.cost.deadline import ports_in_time, time_left_s, waits_in_time
from partopt.cost.kernels import last_exchange_s, most_in_flight, step_s, varies
from partopt.cost.links import hold_s, run_sides_s
from partopt.cost.tolerances import TINY
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
    """A stage to be placed: the entry behind it, what it may hold, and its fewest replicas."""

    end: int  # the cut at its end, and the entry there
    end_entry: int
    in_flight: int  # microbatches that fit, at the most
    replicas: int  # at the least


@compiled()
def _waiting_s(layers, caps, stage, gap_before, gap_after):  # type: ignore[no-untyped-def]
    """Seconds for which the messages of one microbatch keep a device from computing."""
    if not layers.holds:
        return 0.0
    before, after = layers.messages[stage.start], layers.messages[stage.stop]
    held = hold_s(caps.network, stage.traffic_before, before, gap_before)
    return 2 * (held + hold_s(caps.network, stage.traffic_after, after, gap_after))


@compiled()
def _updates(layers, caps, rho, r, stage, F, waiting):  # type: ignore[no-untyped-def]
    """Whether there is time to exchange gradients and to update.

    The gradients include those of parameters tied with other stages.
    """
    seconds = last_exchange_s(layers, stage, caps.slope[rho, r], caps.latency[rho, r])
    if layers.M > 0:
        seconds += step_s(layers, stage, r)
    return seconds + stage.tied_s <= time_left_s(layers, stage, caps.T, F, r, waiting)


@compiled()
def _bears_cuts(layers, caps, rho, r, stage, gap_before, gap_after):  # type: ignore[no-untyped-def]
    """Whether the ports of a stage carry its cuts in time, each alone and both together.

    Asynchronous: with its all-reduce, once for each microbatch of every replica.
    """
    last, none, network = rho + r - 1, len(caps.group), caps.network
    before = after = both = 0.0
    if gap_before > 0:
        before = run_sides_s(network, stage.traffic_before, 0.0, rho, last, gap_before, none)
    if gap_after > 0:
        after = run_sides_s(network, 0.0, stage.traffic_after, rho, last, none, gap_after)
    gradients = stage.held.trained if layers.M == 0 and r > 1 else 0.0
    if gradients > 0.0 or (gap_before > 0 and gap_after > 0):
        gap_before, gap_after = gap_before or none, gap_after or none
        pause = caps.latency[rho, r] + stage.tied_s
        both = run_sides_s(
            network,
            stage.traffic_before,
            stage.traffic_after,
            rho,
            last,
            gap_before,
            gap_after,
            gradients,
            pause,
            caps.algorithm[rho, r],
        )
    return ports_in_time(layers, stage, caps.T, r, before, after, both)


@compiled()
def fewest_replicas(layers, caps, rho, r, most, stage, F, gap_before, gap_after):  # type: ignore[no-untyped-def]
    """The fewest replicas from r to `most` with which a stage carries its weights and its cuts.

    The stage begins at rho and holds F microbatches at most, or more where more replicas have more
    room. The result is above `most` where none
    do.
    """
    scale, more = 1.0 / max(caps.T, TINY), varies(layers)
    waiting = _waiting_s(layers, caps, stage, gap_before, gap_after)
    while r <= most:
        s = first_at_least(caps.weights[rho], r, stage.held.trained)
        if layers.M == 0 and gap_before > 0:
            s = first_at_least(caps.sides[0, gap_before - 1, rho], s, stage.traffic_before * scale)
        if layers.M == 0 and gap_after > 0:
            s = first_at_least(caps.sides[1, gap_after - 1, rho], s, stage.traffic_after * scale)
        if s == r and more:
            F = most_in_flight(layers, stage, r)
        if s == r and (
            _bears_cuts(layers, caps, rho, r, stage, gap_before, gap_after)
            and _updates(layers, caps, rho, r, stage, F, waiting)
            and (not layers.holds or waits_in_time(layers, stage, caps.T, r, waiting))
        ):
            break
        r = max(s, r + 1)
    return r


@compiled()
def latest_feasible_start(layers, caps, row, floor, rho, r, stage, F, gap):  # type: ignore[no-untyped-def]
    """The latest start at rho of a stage before the entry `row`, and its fewest replicas.

    The start is `floor` or later, the replicas are r or more; (-1, 0) where there is none.
    """
    G, most = caps.group[-2], min(caps.max_replicas, row.limit - floor)
    while True:
        r = fewest_replicas(layers, caps, rho, r, most, stage, F, gap, row.gap)
        start = row.limit - r - (row.limit - r - rho) % G
        if r > most or start < floor:
            return -1, 0
        if start + r > row.low:
            return start, r
        r += row.low + 1 - start - r


@compiled()
def place(layers, caps, table, i, floor, row, link, stage):  # type: ignore[no-untyped-def]
    """Add every useful place of a stage that begins at cut i before the entry `row`."""
    L, G, r, F = len(caps.group) - 1, caps.group[-2], link.replicas, link.in_flight
    first, last = (0, 0) if caps.free[i] else (1, L)
    if r > caps.max_replicas or row.limit - r < floor:
        return
    if first == last:
        rho = (row.limit - r) % G
        start, replicas = latest_feasible_start(layers, caps, row, floor, rho, r, stage, F, first)
        if start == row.limit - r:
            _add(caps, table, i, floor, row, link, stage.mode, first, start, replicas)
            return
    for gap in range(first, last + 1):
        for latest in range(row.limit - r, max(floor - 1, row.limit - r - G), -1):
            entries = table.rows[i, : table.counts[i]]
            if is_dominated(entries, caps.group, gap, latest, floor):
                continue
            start, replicas = latest_feasible_start(
                layers, caps, row, floor, latest % G, r, stage, F, gap
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
        gap,
        row.stages + 1,
        link.end,
        link.end_entry,
        start,
        replicas,
        mode,
    )
    insert_undominated(table, caps.group, i, entry)
