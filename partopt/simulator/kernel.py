"""Discrete events: when every action, message and all-reduce of an order begins and ends.

Each device does its actions in order; one begins when the device is free and its input has come. A
message takes a lane of the sender's port out and one of the receiver's port in, as soon as both are
free, and holds them for as long as its bytes take. An all-reduce begins when all replicas have come
to it and its ports have served those that asked before; it yields to messages.

The loop and all that it calls are compiled, and stand here alone: with `NUMBA_DISABLE_JIT=1` they
are plain Python to step through. Arrays are grouped by what they are about, since a group that a
function does not need costs time where it is passed. What runs for every action is inlined, which
saves a quarter.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from partopt.cost.compiled import compiled
from partopt.documents.actions import A, B, F, I, U
from partopt.errors import PartoptError
from partopt.schedules.order import Order
from partopt.simulator.timeline import Collectives, Timeline, Transfers
from partopt.simulator.work import Work

# R, S, G   ranks, stages, microbatches
# way       0 for activations, which go forward, 1 for gradients
#
# Events are ordered by time, then by number:
# b            rank b has ended its action
# R + b        look at rank b again
# 2R + s       the all-reduce of stage s ends, unless messages have delayed it
# 2R + S + b   rank b comes to an exchange before its backward ends

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Flags = NDArray[np.bool_]


class Actions(NamedTuple):
    """The order, what its actions take, and when they ran."""

    kind: NDArray[np.int8]
    stage: NDArray[np.int32]
    microbatch: NDArray[np.int32]
    joined: Flags
    rows: Integers
    seconds: Floats  # of every kind on every stage
    action_s: Floats  # of every action, in place of those; empty where they are the same
    start: Floats
    end: Floats
    left_s: Floats  # by which the run goes on behind an action; empty where it has no limit


class Devices(NamedTuple):
    """Who works on a stage, and how far ranks are."""

    rank_of: Integers  # ranks of stage s: rank_of[replica_first[s] : replica_first[s + 1]]
    replica_first: Integers
    next: Integers  # of a rank: the action that it comes to
    free: Floats  # of a rank: when it can begin that
    running: Flags
    woken: Flags  # an event will look at the rank again
    look: Integers  # ranks to look at before the next event
    looks: Integers  # how many, shape (1,)


class Network(NamedTuple):
    """Ports and their lanes, as in `partopt.simulator.work`, and the messages sent over them."""

    sizes: Integers
    first: Integers
    bus: Flags
    bandwidth: Floats
    latency: Floats
    lane_first: Integers  # lanes of port p: lane_free[lane_first[p] : lane_first[p + 1]]
    lane_free: Floats
    carried: Floats  # seconds for which messages held a port
    crossing: Floats  # bytes over a cut, by way, shape (2, S + 1)
    # by the stage that messages go to, shape (2, S, G)
    arrived: Floats  # infinite where not known yet
    sent: Floats  # when they went on the wire; nan where they did not


class Exchanges(NamedTuple):
    """All-reduces; the ring of stage s uses port[first[s] : first[s + 1]]."""

    first: Integers
    port: Integers
    load: Floats  # seconds for which an all-reduce keeps the port busy
    turn: Integers  # ports of one turn are busy at once, one turn after the other
    ticket: Integers  # rings that asked for the port before this one
    # what the port had carried when the all-reduce began, less what was booked and yet to pass
    before: Floats
    asked: Integers  # of a port: rings that have asked for it
    served: Integers  # of a port: rings that are done with it
    # of a port: how much of what it has carried has delayed an all-reduce, or passed before one
    counted: Floats
    latency: Floats  # of a stage
    tied: Floats  # of a stage: what its exchange with other stages takes
    tail: Floats  # of a stage: what takes place after its last backward at the least
    head_start: Floats  # of a stage: by which the exchange may begin before that ends
    ready: Floats  # of a stage: when the last backward of all replicas that have come ends
    early: Flags  # of a rank: it has come to the exchange before its backward ended
    due: Flags  # of a stage: there are all-reduces of it
    came: Integers  # of a stage: replicas that have come to the round
    asks: Flags  # of a stage: its all-reduce waits for ports
    start: Floats  # of a stage: of the all-reduce under way
    rounds: Integers  # of a stage: rounds exchanged
    done: Floats  # rows of stage, round, start, end, shape (all-reduces, 4)
    filled: Integers  # rows that are filled, shape (1,)


class Heap(NamedTuple):
    """Events by time, then by number."""

    time: Floats
    number: Integers
    size: Integers  # events in it, shape (1,)


class Run(NamedTuple):
    """An order that was executed, and what was seen on the way.

    `is_late`: it was broken off, for it would have passed its limit.
    """

    order: Order
    work: Work
    actions: Actions
    devices: Devices
    network: Network
    exchanges: Exchanges
    is_late: bool

    @property
    def is_stuck(self) -> bool:
        """Whether devices wait for each other for ever."""
        return bool((self.devices.next < self.actions.rows[1:]).any())

    @property
    def done(self) -> Floats:
        """Stage, round, start and end of the all-reduces, as they ended; shape (all-reduces, 4)."""
        return self.exchanges.done[: self.exchanges.filled[0]]

    @property
    def makespan_s(self) -> float:
        """Seconds until all has ended."""
        last = self.actions.end.max(initial=0.0), self.done[:, 3].max(initial=0.0)
        return float(max(last))

    @property
    def timeline(self) -> Timeline:
        """When everything ran. Raises PartoptError where devices wait for ever."""
        if self.is_stuck:
            raise deadlock_error(self.order, self.devices.next.tolist())
        done = self.done[np.lexsort((self.done[:, 1], self.done[:, 0]))]
        stage, number = done[:, :2].astype(np.int32).T
        collectives = Collectives(stage, number, done[:, 2], done[:, 3])
        times = self.actions.start, self.actions.end
        transfers = partial(_transfers, self.work, self.network)
        return Timeline(self.order, *times, transfers, collectives)


def simulate(order: Order, work: Work) -> Timeline:
    """Execute `order` at the costs of `work`. Raises PartoptError where it deadlocks."""
    return run_order(order, work).timeline


def run_order(
    order: Order, work: Work, limit_s: float = np.inf, follows_s: Floats | None = None
) -> Run:
    """Execute `order` at the costs of `work`.

    It is broken off as soon as a rank passes `limit_s` with all that it has left to do or with
    `follows_s`, the seconds that follow the last backward of a stage, shape (S,).
    """
    R, S, G = order.ranks, len(work.tied_s), int(order.microbatch.max(initial=0)) + 1
    (_, _, links, groups), rings = work.pipeline, work.rings
    ports, seconds = links.ports, np.ascontiguousarray(work.seconds)
    exchanged = order.stage[order.kind == A]
    actions = Actions(
        *(order.kind, order.stage, order.microbatch, order.joined, order.rows),
        *(seconds, work.action_s(order), np.zeros(len(order.kind)), np.zeros(len(order.kind))),
        left_s=np.zeros(0 if follows_s is None else len(order.kind)),
    )
    if follows_s is not None:
        of_actions = order.rows, order.kind, order.stage, order.joined
        fill_left(actions.left_s, *of_actions, seconds, follows_s)
    devices = Devices(
        rank_of=groups.rank_of,
        replica_first=groups.replica_first,
        next=order.rows[:-1].copy(),
        free=np.zeros(R),
        running=np.zeros(R, dtype=np.bool_),
        woken=np.zeros(R, dtype=np.bool_),
        look=np.concatenate([np.arange(R), np.zeros(R + 4, dtype=np.int64)]),
        looks=np.full(1, R),
    )
    network = Network(
        *(ports.sizes, ports.first, ports.bus, ports.bandwidth, ports.latency),
        lane_first=links.lanes,
        lane_free=np.zeros(int(links.lanes[-1])),
        carried=np.zeros(ports.count),
        crossing=work.crossing,
        arrived=np.full((2, S, G), np.inf),
        sent=np.full((2, S, G), np.nan),
    )
    exchanges = Exchanges(
        *(rings.first, rings.port, rings.load, rings.turn),
        ticket=np.zeros(len(rings.port), dtype=np.int64),
        before=np.zeros(len(rings.port)),
        asked=np.zeros(ports.count, dtype=np.int64),
        served=np.zeros(ports.count, dtype=np.int64),
        counted=np.zeros(ports.count),
        latency=rings.latency_s,
        tied=work.tied_s,
        tail=rings.tail_s,
        head_start=rings.head_start_s,
        ready=np.zeros(S),
        early=np.zeros(R, dtype=np.bool_),
        due=np.bincount(exchanged, minlength=S) > 0,
        came=np.zeros(S, dtype=np.int64),
        asks=np.zeros(S, dtype=np.bool_),
        start=np.zeros(S),
        rounds=np.zeros(S, dtype=np.int64),
        done=np.zeros((len(exchanged), 4)),
        filled=np.zeros(1, dtype=np.int64),
    )
    most = 3 * R + S + 2
    heap = Heap(np.zeros(most), np.zeros(most, dtype=np.int64), np.zeros(1, dtype=np.int64))
    waits = work.serial, work.blocking
    is_late = run(actions, devices, network, exchanges, heap, *waits, float(limit_s))
    return Run(order, work, actions, devices, network, exchanges, is_late)


def _transfers(work: Work, network: Network) -> Transfers:
    """The messages that were sent, by way, stage and microbatch."""
    went, (_, S, G) = ~np.isnan(network.sent), network.sent.shape
    numbers, stages = np.arange(G, dtype=np.int32), np.arange(S, dtype=np.int32)
    holder = np.array(
        [np.array(group, dtype=np.int32)[numbers % len(group)] for group in work.ranks]
    )
    counts = np.count_nonzero(went, axis=2)
    return Transfers(
        kind=np.repeat(np.array([F, B], dtype=np.int8), counts.sum(axis=1)),
        stage=np.repeat(np.concatenate([stages - 1, stages + 1]), counts.ravel()),
        microbatch=np.broadcast_to(numbers, went.shape)[went],
        source=np.stack([np.roll(holder, way, axis=0) for way in (1, -1)])[went],
        destination=np.broadcast_to(holder, went.shape)[went],
        start=network.sent[went],
        end=network.arrived[went],
    )


def deadlock_error(order: Order, reached: Sequence[int]) -> PartoptError:
    """The error of an order that deadlocks; `reached` is the action that every rank has come to."""
    stuck = [rank for rank in range(order.ranks) if reached[rank] < order.rows[rank + 1]]
    first = min(stuck, key=lambda rank: (reached[rank] - order.rows[rank], rank))
    action = order.name(reached[first])
    waiting = ", ".join(
        f"rank {rank} at {order.name(reached[rank])}" for rank in stuck[:4] if rank != first
    )
    others = f"; {waiting} wait too" if waiting else ""
    return PartoptError(
        f"the schedule deadlocks: rank {first} waits at {action} for ever{others}",
        "an action needs its input from an action that comes first in its own rank's row",
        code="deadlock",
        rank=first,
    )


@compiled()
def fill_left(left_s, rows, kind, stage, joined, seconds, follows_s):
    """Fill in for how long a rank goes on behind its actions, at the least.

    Two joined ones end together. What follows begins where the last of them ends that computes.
    """
    for rank in range(len(rows) - 1):
        left, computes = 0.0, False
        for place in range(rows[rank + 1] - 1, rows[rank] - 1, -1):
            if not computes and kind[place] != A and kind[place] != U:
                left, computes = max(left, follows_s[stage[place]]), True
            left_s[place] = left_s[place + 1] if joined[place] else left
            left += seconds[kind[place], stage[place]]


@compiled(nogil=True)
def run(actions, devices, network, exchanges, heap, serial, blocking, limit_s):
    """Execute an order: fill in when its actions, messages and all-reduces begin and end.

    Whether it is broken off, for it passes its limit.
    """
    R, S, now = len(devices.free), len(exchanges.rounds), 0.0
    while True:
        for place in range(devices.looks[0]):
            rank = devices.look[place]
            advance(actions, devices, network, exchanges, heap, rank, now, serial, blocking)
        devices.looks[0] = 0
        if heap.size[0] == 0:
            return False
        now, number = pop(heap)
        if number < R:
            if limit_s < np.inf and now + actions.left_s[devices.next[number]] > limit_s:
                return True
            end_action(actions, devices, network, number, now, serial, blocking)
        elif number < 2 * R:
            devices.woken[number - R] = False
            look_at(devices, number - R)
        elif number < 2 * R + S:
            stage = number - 2 * R
            if end_exchange(network, exchanges, heap, R, stage, now):
                for replica in range(
                    devices.replica_first[stage], devices.replica_first[stage + 1]
                ):
                    rank = devices.rank_of[replica]
                    if blocking:
                        leave(actions, devices, rank, now)
                        backward = devices.next[rank] - 2
                        send_result(actions, devices, network, backward, rank, now, serial)
                    look_at(devices, rank)
        else:
            rank = number - 2 * R - S
            exchanges.early[rank] = True
            join(devices, network, exchanges, heap, stage_after(actions, devices, rank), now)


@compiled(inline=True)
def advance(actions, devices, network, exchanges, heap, rank, now, serial, blocking):
    """Let a rank begin its next action, if its inputs are there or on their way."""
    # more than once where it passes an all-reduce that it need not wait for
    while not devices.running[rank] and devices.next[rank] < actions.rows[rank + 1]:
        place = devices.next[rank]
        begin, seconds = max(now, devices.free[rank]), 0.0
        for action in range(place, place + 1 + actions.joined[place]):
            begin = max(begin, input_s(actions, network, exchanges, action))
            if len(actions.action_s) > 0:
                seconds += actions.action_s[action]
            else:
                seconds += actions.seconds[actions.kind[action], actions.stage[action]]
        if begin == np.inf:
            return
        # a transfer may yet come before it
        if begin > now and (serial or actions.kind[place] == A):
            if not devices.woken[rank]:
                devices.woken[rank] = True
                push(heap, begin, len(devices.free) + rank)
            return
        devices.running[rank] = True
        actions.start[place] = begin
        if actions.joined[place]:
            actions.start[place + 1] = begin
        if actions.kind[place] != A:
            devices.free[rank] = begin + seconds
            push(heap, begin + seconds, rank)
            come_early(actions, devices, exchanges, heap, rank, begin, begin + seconds)
            return
        if not blocking:
            leave(actions, devices, rank, now)
        stage = np.int64(actions.stage[place])
        if exchanges.early[rank]:
            exchanges.early[rank] = False
        else:
            exchanges.ready[stage] = max(exchanges.ready[stage], now)
            join(devices, network, exchanges, heap, stage, now)


@compiled(inline=True)
def input_s(actions, network, exchanges, place):
    """When the input of an action is there; infinite where that is not known yet."""
    kind, stage, microbatch = actions.kind[place], actions.stage[place], actions.microbatch[place]
    if kind == F and stage > 0:
        return network.arrived[0, stage, microbatch]
    if kind in (B, I) and stage < len(exchanges.rounds) - 1:
        return network.arrived[1, stage, microbatch]
    if kind == A and exchanges.rounds[stage] < microbatch:
        return np.inf
    if kind == U and exchanges.due[stage] and exchanges.rounds[stage] == 0:
        return np.inf
    return 0.0


@compiled(inline=True)
def end_action(actions, devices, network, rank, now, serial, blocking):
    """End what a rank does, an action or two joined ones, and send the results on."""
    place = devices.next[rank]
    after = place + 1 + actions.joined[place]
    devices.next[rank] = after
    # it is free now, or when serial messages that were booked meanwhile have passed
    devices.running[rank] = False
    exchanges = blocking and after < actions.rows[rank + 1] and actions.kind[after] == A
    for action in range(place, after):
        actions.end[action] = now
        # else the backward is sent on when the gradients are exchanged
        if not (exchanges and actions.stage[after] == actions.stage[action]):
            send_result(actions, devices, network, action, rank, now, serial)
    look_at(devices, rank)


@compiled(inline=True)
def look_at(devices, rank):
    """Look at a rank again before the next event."""
    devices.look[devices.looks[0]] = rank
    devices.looks[0] += 1


@compiled(inline=True)
def send_result(actions, devices, network, place, rank, now, serial):
    """Send a stage's output to the replica of the next stage that works on this microbatch."""
    kind, stage, microbatch = actions.kind[place], actions.stage[place], actions.microbatch[place]
    if kind == F and stage < len(devices.replica_first) - 2:
        way, to, cut = 0, stage + 1, stage + 1
    elif kind in (B, I) and stage > 0:
        way, to, cut = 1, stage - 1, stage
    else:
        return
    replicas = devices.replica_first[to + 1] - devices.replica_first[to]
    destination = devices.rank_of[devices.replica_first[to] + microbatch % replicas]
    if destination == rank:
        network.arrived[way, to, microbatch] = now
        return
    earliest = max(now, devices.free[rank], devices.free[destination]) if serial else now
    begin, arrival = carry(network, network.crossing[way, cut], rank, destination, earliest)
    network.sent[way, to, microbatch] = begin
    network.arrived[way, to, microbatch] = arrival
    if serial:
        devices.free[rank] = devices.free[destination] = arrival
    look_at(devices, destination)


@compiled(inline=True)
def carry(network, size_bytes, source, destination, earliest):
    """When a message goes on the wire and when it arrives.

    It takes a lane of both its ports as soon as both are free.
    """
    k = 1
    while source // network.sizes[k] != destination // network.sizes[k]:
        k += 1
    if network.bus[k - 1]:
        out = into = network.first[k - 1] + source // network.sizes[k]
    else:
        out = network.first[k - 1] + 2 * (source // network.sizes[k - 1])
        into = network.first[k - 1] + 2 * (destination // network.sizes[k - 1]) + 1
    out_lane, into_lane = free_lane(network, out), free_lane(network, into)
    begin = max(earliest, network.lane_free[out_lane], network.lane_free[into_lane])
    seconds = size_bytes / network.bandwidth[k - 1]
    lanes = network.lane_first[out + 1] - network.lane_first[out]
    network.lane_free[out_lane] = network.lane_free[into_lane] = begin + seconds
    network.carried[out] += seconds / lanes
    if into != out:
        network.carried[into] += seconds / lanes
    return begin, begin + seconds + network.latency[k - 1]


@compiled(inline=True)
def free_lane(network, port):
    """The lane of a port that is free first."""
    best = network.lane_first[port]
    for lane in range(best + 1, network.lane_first[port + 1]):
        if network.lane_free[lane] < network.lane_free[best]:
            best = lane
    return best


@compiled(inline=True)
def stage_after(actions, devices, rank):
    """The stage whose gradients a rank exchanges after what it does now; -1 where it does not."""
    after = devices.next[rank] + 1 + actions.joined[devices.next[rank]]
    if after < actions.rows[rank + 1] and actions.kind[after] == A:
        return np.int64(actions.stage[after])
    return np.int64(-1)


@compiled(inner=True)
def come_early(actions, devices, exchanges, heap, rank, begin, end):
    """Let a rank come early to the exchange that follows what it does from `begin` to `end`.

    It may where gradients are exchanged in buckets, while the backward goes on.
    """
    stage = stage_after(actions, devices, rank)
    if stage >= 0:
        came = max(begin, end - exchanges.head_start[stage])
        if came < end:
            exchanges.ready[stage] = max(exchanges.ready[stage], end)
            push(heap, came, 2 * len(devices.free) + len(exchanges.rounds) + rank)


@compiled(inner=True)
def leave(actions, devices, rank, now):
    """A rank goes on from the all-reduce that it has come to."""
    actions.end[devices.next[rank]] = now
    devices.next[rank] += 1
    devices.running[rank] = False
    devices.free[rank] = max(devices.free[rank], now)


@compiled(inner=True)
def join(devices, network, exchanges, heap, stage, now):
    """Count a replica at the exchange of its stage's gradients; the last one asks for the ports."""
    exchanges.came[stage] += 1
    if exchanges.came[stage] == devices.replica_first[stage + 1] - devices.replica_first[stage]:
        exchanges.came[stage] = 0
        exchanges.asks[stage] = True
        for entry in range(exchanges.first[stage], exchanges.first[stage + 1]):
            exchanges.ticket[entry] = exchanges.asked[exchanges.port[entry]]
            exchanges.asked[exchanges.port[entry]] += 1
        begin_exchange(network, exchanges, heap, len(devices.free), stage, now)


@compiled(inner=True)
def begin_exchange(network, exchanges, heap, R, stage, now):
    """Begin the all-reduce of a stage if its ports have served all that asked before."""
    for entry in range(exchanges.first[stage], exchanges.first[stage + 1]):
        if exchanges.ticket[entry] > exchanges.served[exchanges.port[entry]]:
            return
    exchanges.asks[stage] = False
    exchanges.start[stage] = now
    for entry in range(exchanges.first[stage], exchanges.first[stage + 1]):
        port = exchanges.port[entry]
        booked_s = 0.0  # for which messages that are known now will hold the port
        for lane in range(network.lane_first[port], network.lane_first[port + 1]):
            booked_s += max(0.0, network.lane_free[lane] - now)
        booked_s /= network.lane_first[port + 1] - network.lane_first[port]
        exchanges.before[entry] = max(exchanges.counted[port], network.carried[port] - booked_s)
    push(heap, exchange_end(network.carried, exchanges, stage), 2 * R + stage)


@compiled(inner=True)
def exchange_end(carried, exchanges, stage):
    """When the exchange of a stage ends.

    The all-reduce yields its ports to the transfers booked before it began and to those that came
    since.
    """
    seconds, longest = 0.0, 0.0
    for entry in range(exchanges.first[stage], exchanges.first[stage + 1]):
        if entry > exchanges.first[stage] and exchanges.turn[entry] != exchanges.turn[entry - 1]:
            seconds, longest = seconds + longest, 0.0
        yielded = carried[exchanges.port[entry]] - exchanges.before[entry]
        longest = max(longest, exchanges.load[entry] + yielded)
    end = exchanges.start[stage] + (seconds + longest) + exchanges.latency[stage]
    return max(end, exchanges.ready[stage] + exchanges.tail[stage]) + exchanges.tied[stage]


@compiled(inner=True)
def end_exchange(network, exchanges, heap, R, stage, now):
    """End the all-reduce of a stage, and begin others; whether messages have not delayed it."""
    end = exchange_end(network.carried, exchanges, stage)
    if end > now:
        push(heap, end, 2 * R + stage)
        return False
    row = exchanges.done[exchanges.filled[0]]
    row[0], row[1], row[2], row[3] = stage, exchanges.rounds[stage], exchanges.start[stage], now
    exchanges.filled[0] += 1
    exchanges.rounds[stage] += 1
    for entry in range(exchanges.first[stage], exchanges.first[stage + 1]):
        exchanges.counted[exchanges.port[entry]] = network.carried[exchanges.port[entry]]
        exchanges.served[exchanges.port[entry]] += 1
    for other in range(len(exchanges.rounds)):
        if exchanges.asks[other]:
            begin_exchange(network, exchanges, heap, R, other, now)
    return True


@compiled(inner=True)
def push(heap, time, number):
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


@compiled(inline=True)
def pop(heap):
    """Take the first event out of the heap: its time and its number."""
    first = heap.time[0], heap.number[0]
    heap.size[0] -= 1
    count, place = heap.size[0], 0
    time, number = heap.time[count], heap.number[count]
    while 2 * place + 1 < count:
        child = 2 * place + 1
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
