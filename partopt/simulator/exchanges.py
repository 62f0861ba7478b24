"""All-reduces of gradients, compiled: who has come, whose turn it is, when they end."""

from __future__ import annotations

import numpy as np

from partopt.cost.compiled import compiled
from partopt.cost.heap import push
from partopt.schedules.order import A
from partopt.simulator.messages import booked_s
from partopt.simulator.state import DONE, SEARCHES, WAITING


@compiled()
def leave(actions, devices, rank, now):  # type: ignore[no-untyped-def]
    """A rank goes on from the all-reduce that it has come to."""
    actions.end[devices.next[rank]] = now
    devices.next[rank] += 1
    devices.running[rank] = False
    devices.free[rank] = max(devices.free[rank], now)


@compiled()
def announce(actions, devices, rings, heap, rank, begin, end):  # type: ignore[no-untyped-def]
    """Let a rank come early to the exchange that follows the action from `begin` to `end`, if any.

    It may where gradients are exchanged in buckets, while the backward goes on.
    """
    after = devices.next[rank] + 1 + actions.joined[devices.next[rank]]
    if after < actions.rows[rank + 1] and actions.kind[after] == A:
        stage = actions.stage[after]
        came = max(begin, end - rings.head_start[stage])
        if came < end:
            rings.ready[stage] = max(rings.ready[stage], end)
            push(heap, came, 2 * len(devices.free) + len(rings.rounds) + rank)


@compiled()
def join_early(actions, devices, rings, network, heap, rank, now):  # type: ignore[no-untyped-def]
    """A rank comes to the exchange that follows the action that it does."""
    after = devices.next[rank] + 1 + actions.joined[devices.next[rank]]
    rings.early[rank] = True
    join(rings, network, heap, devices, actions.stage[after], now)


@compiled()
def join(rings, network, heap, devices, stage, now):  # type: ignore[no-untyped-def]
    """Count a replica at the exchange of its stage's gradients; the last one requests the ports."""
    rings.came[stage] += 1
    if rings.came[stage] == devices.replica_first[stage + 1] - devices.replica_first[stage]:
        rings.came[stage] = 0
        rings.waiting[rings.counts[WAITING]] = stage
        rings.counts[WAITING] += 1
        exchange_waiting(rings, network, heap, len(devices.free), now)


@compiled()
def exchange_waiting(rings, network, heap, R, now):  # type: ignore[no-untyped-def]
    """Begin the all-reduces whose ports no other holds or has asked for before."""
    if rings.counts[WAITING] == 0:
        return
    rings.counts[SEARCHES] += 1
    for stage in range(len(rings.rounds)):
        if not np.isnan(rings.start[stage]):
            claim(rings, stage)
    left = 0
    for place in range(rings.counts[WAITING]):
        stage = rings.waiting[place]
        if claim(rings, stage):
            rings.waiting[left] = stage
            left += 1
        else:
            rings.start[stage] = now
            for entry in range(rings.first[stage], rings.first[stage + 1]):
                port = rings.port[entry]
                rings.before[entry] = max(
                    rings.counted[port], network.carried[port] - booked_s(network, port, now)
                )
            push(heap, exchange_end(rings, network.carried, stage), 2 * R + stage)
    rings.counts[WAITING] = left


@compiled()
def claim(rings, stage):  # type: ignore[no-untyped-def]
    """Claim the ports of a stage's ring in this search; whether one was claimed before."""
    taken = False
    for entry in range(rings.first[stage], rings.first[stage + 1]):
        port = rings.port[entry]
        taken = taken or rings.mark[port] == rings.counts[SEARCHES]
        rings.mark[port] = rings.counts[SEARCHES]
    return taken


@compiled()
def exchange_end(rings, carried, stage):  # type: ignore[no-untyped-def]
    """When the exchange of a stage ends.

    The all-reduce yields its ports to the transfers booked before it began and to those that came
    since.
    """
    seconds, longest = 0.0, 0.0
    for entry in range(rings.first[stage], rings.first[stage + 1]):
        if entry > rings.first[stage] and rings.turn[entry] != rings.turn[entry - 1]:
            seconds, longest = seconds + longest, 0.0
        longest = max(
            longest, rings.load[entry] + (carried[rings.port[entry]] - rings.before[entry])
        )
    end = rings.start[stage] + (seconds + longest) + rings.latency[stage]
    return max(end, rings.ready[stage] + rings.tail[stage]) + rings.tied[stage]


@compiled()
def end_exchange(rings, network, heap, stage, R, now):  # type: ignore[no-untyped-def]
    """Whether the all-reduce of a stage is done and not delayed by transfers.

    If so, the next one may begin.
    """
    end = exchange_end(rings, network.carried, stage)
    if end > now:
        push(heap, end, 2 * R + stage)
        return False
    row = rings.done[rings.counts[DONE]]
    row[0], row[1], row[2], row[3] = stage, rings.rounds[stage], rings.start[stage], now
    rings.counts[DONE] += 1
    for entry in range(rings.first[stage], rings.first[stage + 1]):
        rings.counted[rings.port[entry]] = network.carried[rings.port[entry]]
    rings.start[stage] = np.nan
    rings.rounds[stage] += 1
    exchange_waiting(rings, network, heap, R, now)
    return True
