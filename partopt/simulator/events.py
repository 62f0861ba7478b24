"""The simulator in compiled code: `partopt.simulator.reference`, event for event, over arrays.

Arrays are grouped by what they are about, and functions are given the groups that they need:
compiled code is three times slower where all pass through every call. `run` is long for the same
reason, and what it calls for every action is put into it, which saves a quarter.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from partopt.cost.compiled import compiled
from partopt.schedules.order import A, B, F, I, U

# R, S, G   ranks, stages, microbatches

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


class Actions(NamedTuple):
    """The order, what its actions take, and when they ran."""

    kind: NDArray[np.int8]
    stage: NDArray[np.int32]
    microbatch: NDArray[np.int32]
    joined: NDArray[np.bool_]
    rows: Integers
    seconds: Floats  # of each kind on each stage
    start: Floats
    end: Floats


class Devices(NamedTuple):
    """Who works on a stage, and how far each rank is."""

    rank_of: Integers  # ranks of stage s: rank_of[replica_first[s] : replica_first[s + 1]]
    replica_first: Integers
    next: Integers  # of a rank: the action that it comes to
    free: Floats  # of a rank: when it can begin that
    running: NDArray[np.bool_]
    woken: NDArray[np.bool_]  # an event will look at the rank again
    look: Integers  # ranks to look at before the next event
    looks: Integers  # how many, shape (1,)


class Network(NamedTuple):
    """Ports and their lanes, as in `partopt.simulator.ports`, and the messages that went over
    them.
    """

    sizes: Integers
    first: Integers
    bus: NDArray[np.bool_]
    bandwidth: Floats
    latency: Floats
    lane_first: Integers  # lanes of port p: lane_free[lane_first[p] : lane_first[p + 1]]
    lane_free: Floats
    carried: Floats  # seconds for which transfers held each port
    cut_bytes: Floats
    # activations and gradients by the stage that they go to, shape (2, S, G); not known yet:
    # infinite
    arrived: Floats
    sent: Floats  # when they went on the wire; not on any: nan


class Rings(NamedTuple):
    """All-reduces. The ports of the ring of stage s: port[first[s] : first[s + 1]]."""

    first: Integers
    port: Integers
    load: Floats  # seconds for which an all-reduce keeps the port busy
    # what the port had carried when the all-reduce began, less what was booked and yet to pass
    before: Floats
    # of a port: how much of what it has carried has delayed an all-reduce, or passed before one
    counted: Floats
    latency: Floats  # of a stage, and what its exchange with other stages takes
    due: NDArray[np.bool_]  # of a stage: there are all-reduces of it
    came: Integers  # of a stage: replicas that have come to the round
    rounds: Integers  # of a stage: rounds exchanged
    start: Floats  # of a stage: of the all-reduce under way; none: nan
    waiting: Integers  # stages that wait for ports, in order
    mark: Integers  # of a port: the last search in which it was claimed
    counts: Integers  # stages that wait; all-reduces done; searches made
    done: Floats  # rows of stage, round, start, end, shape (all-reduces, 4)


class Heap(NamedTuple):
    """Events by time, then by number: rank b has ended its action, b; look at rank b, R + b; the
    all-reduce of stage s, 2R + s.
    """

    time: Floats
    number: Integers
    size: Integers  # events in it, shape (1,)


WAITING, DONE, SEARCHES = range(3)


@compiled(nogil=True)
def run(actions, devices, network, rings, heap, serial, blocking):  # type: ignore[no-untyped-def]
    """Execute an order: what its actions and messages begin and end with is filled in."""
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
    now, looks[0] = 0.0, R
    while True:
        for seen in range(looks[0]):
            rank = look[seen]
            while (
                not running[rank] and next_[rank] < rows[rank + 1]
            ):  # more than once where it passes an all-reduce that it need not wait for
                place = next_[rank]
                begin, seconds = max(now, free[rank]), 0.0
                for each in range(place, place + 1 + joined[place]):
                    begin = max(begin, _input_s(actions, each, arrived, rings.rounds, rings.due))
                    seconds += actions.seconds[kind[each], stage[each]]
                if begin == np.inf:
                    break
                # a transfer may yet come before it
                if begin > now and (serial or kind[place] == A):
                    if not woken[rank]:
                        woken[rank] = True
                        _push(heap, begin, R + rank)
                    break
                running[rank] = True
                start[place] = begin
                if joined[place]:
                    start[place + 1] = begin
                if kind[place] != A:
                    free[rank] = begin + seconds
                    _push(heap, begin + seconds, rank)
                    continue
                if not blocking:
                    _leave(actions, devices, rank, now)
                _join(rings, network, heap, devices, stage[place], now)
        looks[0] = 0
        if heap.size[0] == 0:
            return
        now, number = _pop(heap)
        if number >= 2 * R:
            s = number - 2 * R
            if _exchanged(rings, network, heap, s, R, now):
                for replica in range(devices.replica_first[s], devices.replica_first[s + 1]):
                    rank = devices.rank_of[replica]
                    if blocking:
                        _leave(actions, devices, rank, now)
                        _send_result(
                            actions, devices, network, next_[rank] - 2, rank, now, serial, S
                        )
                    _look(devices, rank)
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
                    _send_result(actions, devices, network, each, rank, now, serial, S)
        _look(devices, rank)


@compiled(inline="always")
def _look(devices, rank):  # type: ignore[no-untyped-def]
    devices.look[devices.looks[0]] = rank
    devices.looks[0] += 1


@compiled(inline="always")
def _input_s(actions, place, arrived, rounds, due):  # type: ignore[no-untyped-def]
    """When the input of an action is there; infinite where that is not known yet."""
    kind, stage, microbatch = actions.kind[place], actions.stage[place], actions.microbatch[place]
    if kind == F and stage > 0:
        return arrived[0, stage, microbatch]
    if kind in (B, I) and stage < len(rounds) - 1:
        return arrived[1, stage, microbatch]
    if kind == A and rounds[stage] != microbatch:
        return np.inf
    if kind == U and rounds[stage] == 0 and due[stage]:
        return np.inf
    return 0.0


@compiled(inline="always")
def _send_result(actions, devices, network, place, rank, now, serial, S):  # type: ignore[no-untyped-def]
    """The output of a stage goes to the replica of the next that works on this microbatch."""
    kind, stage, microbatch = actions.kind[place], actions.stage[place], actions.microbatch[place]
    if kind == F and stage < S - 1:
        direction, to, cut = 0, stage + 1, stage + 1
    elif kind in (B, I) and stage > 0:
        direction, to, cut = 1, stage - 1, stage
    else:
        return
    replicas = devices.replica_first[to + 1] - devices.replica_first[to]
    destination = devices.rank_of[devices.replica_first[to] + microbatch % replicas]
    if destination == rank:
        network.arrived[direction, to, microbatch] = now
        return
    earliest = max(now, devices.free[rank], devices.free[destination]) if serial else now
    begin, arrival = _transfer(network, network.cut_bytes[cut], rank, destination, earliest)
    network.sent[direction, to, microbatch] = begin
    network.arrived[direction, to, microbatch] = arrival
    if serial:
        devices.free[rank] = devices.free[destination] = arrival
    _look(devices, destination)


@compiled(inline="always")
def _transfer(network, size_bytes, source, destination, earliest):  # type: ignore[no-untyped-def]
    """When a message is on the wire and when it has arrived: a lane of each of its two ports, as
    soon as both are free.
    """
    k = 1
    while source // network.sizes[k] != destination // network.sizes[k]:
        k += 1
    if network.bus[k - 1]:
        out = into = network.first[k - 1] + source // network.sizes[k]
    else:
        out = network.first[k - 1] + 2 * (source // network.sizes[k - 1])
        into = network.first[k - 1] + 2 * (destination // network.sizes[k - 1]) + 1
    out_lane, into_lane = _free_lane(network, out), _free_lane(network, into)
    begin = max(earliest, network.lane_free[out_lane], network.lane_free[into_lane])
    seconds = size_bytes / network.bandwidth[k - 1]
    lanes = network.lane_first[out + 1] - network.lane_first[out]
    network.lane_free[out_lane] = network.lane_free[into_lane] = begin + seconds
    network.carried[out] += seconds / lanes
    if into != out:
        network.carried[into] += seconds / lanes
    return begin, begin + seconds + network.latency[k - 1]


@compiled()
def _booked_s(network, port, now):  # type: ignore[no-untyped-def]
    """Seconds for which transfers that are known now will hold a port."""
    seconds = 0.0
    for lane in range(network.lane_first[port], network.lane_first[port + 1]):
        seconds += max(0.0, network.lane_free[lane] - now)
    return seconds / (network.lane_first[port + 1] - network.lane_first[port])


@compiled(inline="always")
def _free_lane(network, port):  # type: ignore[no-untyped-def]
    best = network.lane_first[port]
    for lane in range(best + 1, network.lane_first[port + 1]):
        if network.lane_free[lane] < network.lane_free[best]:
            best = lane
    return best


@compiled()
def _leave(actions, devices, rank, now):  # type: ignore[no-untyped-def]
    """A rank goes on from the all-reduce that it has come to."""
    actions.end[devices.next[rank]] = now
    devices.next[rank] += 1
    devices.running[rank] = False
    devices.free[rank] = max(devices.free[rank], now)


@compiled()
def _join(rings, network, heap, devices, stage, now):  # type: ignore[no-untyped-def]
    """A replica has come to the exchange of its stage's gradients; the last one to come asks for
    the ports.
    """
    rings.came[stage] += 1
    if rings.came[stage] == devices.replica_first[stage + 1] - devices.replica_first[stage]:
        rings.came[stage] = 0
        rings.waiting[rings.counts[WAITING]] = stage
        rings.counts[WAITING] += 1
        _exchange_waiting(rings, network, heap, len(devices.free), now)


@compiled()
def _exchange_waiting(rings, network, heap, R, now):  # type: ignore[no-untyped-def]
    """Begin the all-reduces whose ports no other holds or has asked for before."""
    if rings.counts[WAITING] == 0:
        return
    rings.counts[SEARCHES] += 1
    for stage in range(len(rings.rounds)):
        if not np.isnan(rings.start[stage]):
            _claim(rings, stage)
    left = 0
    for place in range(rings.counts[WAITING]):
        stage = rings.waiting[place]
        if _claim(rings, stage):
            rings.waiting[left] = stage
            left += 1
        else:
            rings.start[stage] = now
            for entry in range(rings.first[stage], rings.first[stage + 1]):
                port = rings.port[entry]
                rings.before[entry] = max(
                    rings.counted[port], network.carried[port] - _booked_s(network, port, now)
                )
            _push(heap, _exchange_end(rings, network.carried, stage), 2 * R + stage)
    rings.counts[WAITING] = left


@compiled()
def _claim(rings, stage):  # type: ignore[no-untyped-def]
    """Claim the ports of a stage's ring in this search; whether one was claimed before."""
    taken = False
    for entry in range(rings.first[stage], rings.first[stage + 1]):
        port = rings.port[entry]
        taken = taken or rings.mark[port] == rings.counts[SEARCHES]
        rings.mark[port] = rings.counts[SEARCHES]
    return taken


@compiled()
def _exchange_end(rings, carried, stage):  # type: ignore[no-untyped-def]
    """When the all-reduce of a stage ends: it yields its ports to the transfers that it found there
    and those that came since.
    """
    longest = 0.0
    for entry in range(rings.first[stage], rings.first[stage + 1]):
        longest = max(
            longest, rings.load[entry] + (carried[rings.port[entry]] - rings.before[entry])
        )
    return rings.start[stage] + longest + rings.latency[stage]


@compiled()
def _exchanged(rings, network, heap, stage, R, now):  # type: ignore[no-untyped-def]
    """Whether the all-reduce of a stage is done and not delayed by transfers: then the next one may
    begin.
    """
    end = _exchange_end(rings, network.carried, stage)
    if end > now:
        _push(heap, end, 2 * R + stage)
        return False
    row = rings.done[rings.counts[DONE]]
    row[0], row[1], row[2], row[3] = stage, rings.rounds[stage], rings.start[stage], now
    rings.counts[DONE] += 1
    for entry in range(rings.first[stage], rings.first[stage + 1]):
        rings.counted[rings.port[entry]] = network.carried[rings.port[entry]]
    rings.start[stage] = np.nan
    rings.rounds[stage] += 1
    _exchange_waiting(rings, network, heap, R, now)
    return True


@compiled(inline="always")
def _push(heap, time, number):  # type: ignore[no-untyped-def]
    """Put an event into the heap."""
    child = heap.size[0]
    heap.size[0] += 1
    while child > 0:
        parent = (child - 1) // 2
        if (heap.time[parent], heap.number[parent]) <= (time, number):
            break
        heap.time[child], heap.number[child] = heap.time[parent], heap.number[parent]
        child = parent
    heap.time[child], heap.number[child] = time, number


@compiled(inline="always")
def _pop(heap):  # type: ignore[no-untyped-def]
    """Take the first event out of the heap: its time and its number."""
    first = heap.time[0], heap.number[0]
    heap.size[0] -= 1
    count = heap.size[0]
    time, number = heap.time[count], heap.number[count]
    place = 0
    while True:
        child = 2 * place + 1
        if child >= count:
            break
        if child + 1 < count and (heap.time[child + 1], heap.number[child + 1]) < (
            heap.time[child],
            heap.number[child],
        ):
            child += 1
        if (time, number) <= (heap.time[child], heap.number[child]):
            break
        heap.time[place], heap.number[place] = heap.time[child], heap.number[child]
        place = child
    heap.time[place], heap.number[place] = time, number
    return first
