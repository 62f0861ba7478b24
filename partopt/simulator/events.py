"""The simulator in compiled code: `partopt.simulator.reference`, event for event, over arrays.

Arrays are grouped by what they are about, and functions are given the groups that they need:
compiled code is three times slower where all pass through every call. `run` is long for the same
reason, and what it calls for every action is put into it, which saves a quarter.
"""

from __future__ import annotations

import numpy as np

from partopt.cost.compiled import compiled
from partopt.cost.heap import pop, push
from partopt.schedules.order import A, B, F, I, U
from partopt.simulator.exchanges import announce, end_exchange, join, join_early, leave
from partopt.simulator.messages import look_at, send_result


@compiled(nogil=True)
def run(actions, devices, network, rings, heap, serial, blocking, early):  # type: ignore[no-untyped-def]
    """Execute an order: fill in when its actions and messages begin and end."""
    kind, stage, joined, rows, start, end = (
        actions.kind,
        actions.stage,
        actions.joined,
        actions.rows,
        actions.start,
        actions.end,
    )
    next_, free, running, woken, look, looks = devices[2:]
    arrived, S, R = network.arrived, len(rings.rounds), len(free)
    scaled, handled = len(actions.scale) > 0, len(actions.handling) > 0
    now, looks[0] = 0.0, R
    while True:
        for seen in range(looks[0]):
            rank = look[seen]
            # more than once where it passes an all-reduce that it need not wait for
            while not running[rank] and next_[rank] < rows[rank + 1]:
                place = next_[rank]
                begin, seconds = max(now, free[rank]), 0.0
                for each in range(place, place + 1 + joined[place]):
                    begin = max(begin, _input_s(actions, each, arrived, rings.rounds, rings.due))
                    own = actions.seconds[kind[each], stage[each]]
                    if scaled:
                        own *= actions.scale[each]
                    if handled:
                        own += actions.handling[each]
                    seconds += own
                if begin == np.inf:
                    break
                # a transfer may yet come before it
                if begin > now and (serial or kind[place] == A):
                    if not woken[rank]:
                        woken[rank] = True
                        push(heap, begin, R + rank)
                    break
                running[rank] = True
                start[place] = begin
                if joined[place]:
                    start[place + 1] = begin
                if kind[place] != A:
                    free[rank] = begin + seconds
                    push(heap, begin + seconds, rank)
                    if early:
                        announce(actions, devices, rings, heap, rank, begin, begin + seconds)
                    continue
                if not blocking:
                    leave(actions, devices, rank, now)
                if rings.early[rank]:
                    rings.early[rank] = False
                else:
                    rings.ready[stage[place]] = max(rings.ready[stage[place]], now)
                    join(rings, network, heap, devices, stage[place], now)
        looks[0] = 0
        if heap.size[0] == 0:
            return
        now, number = pop(heap)
        if number >= 2 * R + S:
            join_early(actions, devices, rings, network, heap, number - 2 * R - S, now)
            continue
        if number >= 2 * R:
            s = number - 2 * R
            if end_exchange(rings, network, heap, s, R, now):
                for replica in range(devices.replica_first[s], devices.replica_first[s + 1]):
                    rank = devices.rank_of[replica]
                    if blocking:
                        leave(actions, devices, rank, now)
                        send_result(
                            actions, devices, network, next_[rank] - 2, rank, now, serial, S
                        )
                    look_at(devices, rank)
            continue
        rank = number % R
        if number >= R:
            woken[rank] = False
        else:
            place = next_[rank]
            next_[rank] += 1 + joined[place]
            # it is free now, or when serial messages that were booked meanwhile have passed
            running[rank] = False
            after = next_[rank]
            exchanges = blocking and after < rows[rank + 1] and kind[after] == A
            for each in range(place, after):
                end[each] = now
                # else the backward is sent on when the gradients are exchanged
                if not (exchanges and stage[after] == stage[each]):
                    send_result(actions, devices, network, each, rank, now, serial, S)
        look_at(devices, rank)


@compiled(inline="always")
def _input_s(actions, place, arrived, rounds, due):  # type: ignore[no-untyped-def]
    """When the input of an action is there; infinite where that is not known yet."""
    kind, stage, microbatch = actions.kind[place], actions.stage[place], actions.microbatch[place]
    if kind == F and stage > 0:
        return arrived[0, stage, microbatch]
    if kind in (B, I) and stage < len(rounds) - 1:
        return arrived[1, stage, microbatch]
    if kind == A and rounds[stage] < microbatch:
        return np.inf
    if kind == U and rounds[stage] == 0 and due[stage]:
        return np.inf
    return 0.0
