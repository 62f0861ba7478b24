"""Execute an order at the costs of a plan, in compiled code."""

from __future__ import annotations

import numpy as np

from partopt.cost.compiled import compiled
from partopt.cost.heap import heap_of
from partopt.schedules.order import A, B, F, Order
from partopt.simulator import state
from partopt.simulator.deadlock import deadlock_error
from partopt.simulator.events import run
from partopt.simulator.timeline import Collectives, Timeline, Transfers
from partopt.simulator.work import Work


def simulate(order: Order, work: Work) -> Timeline:
    """Execute `order` at the costs of `work`. Raises PartoptError where it deadlocks."""
    R, S = order.ranks, len(work.ranks)
    times = np.zeros(len(order.kind)), np.zeros(len(order.kind))
    actions = state.Actions(
        order.kind,
        order.stage,
        order.microbatch,
        order.joined,
        order.rows,
        np.ascontiguousarray(work.seconds),
        work.scale,
        work.handling_s(order),
        *times,
    )
    devices, network, rings = _devices(order, work), _network(order, work), _rings(order, work)
    heap = heap_of(3 * R + S + 2)
    early = any(own.head_start_s > 0 for own in work.exchanges_early)
    run(actions, devices, network, rings, heap, work.serial, work.blocking, early)
    if (devices.next < order.rows[1:]).any():
        raise deadlock_error(order, [int(place) for place in devices.next])
    sent = Transfers(*_messages(devices, network))
    return Timeline(order, *times, sent, _collectives(rings))


def _devices(order: Order, work: Work) -> state.Devices:
    R = order.ranks
    return state.Devices(
        rank_of=np.array([rank for ranks in work.ranks for rank in ranks], dtype=np.int64),
        replica_first=np.cumsum([0, *(len(ranks) for ranks in work.ranks)]),
        next=order.rows[:-1].copy(),
        free=np.zeros(R),
        running=np.zeros(R, dtype=np.bool_),
        woken=np.zeros(R, dtype=np.bool_),
        look=np.concatenate([np.arange(R), np.zeros(R + 4, dtype=np.int64)]),
        looks=np.zeros(1, dtype=np.int64),
    )


def _network(order: Order, work: Work) -> state.Network:
    ports = work.ports
    lanes = np.repeat(ports.lanes, np.diff(ports.first))
    shape = (2, len(work.ranks), int(order.microbatch.max(initial=0)) + 1)
    return state.Network(
        sizes=ports.sizes,
        first=ports.first,
        bus=ports.bus,
        bandwidth=ports.bandwidth,
        latency=ports.latency,
        lane_first=np.concatenate([[0], np.cumsum(lanes)]),
        lane_free=np.zeros(int(lanes.sum())),
        carried=np.zeros(ports.count),
        crossing=work.crossing,
        arrived=np.full(shape, np.inf),
        sent=np.full(shape, np.nan),
    )


def _rings(order: Order, work: Work) -> state.Rings:
    S, ports, exchanges = len(work.ranks), work.ports.count, order.kind == A
    rings = work.rings
    due = np.zeros(S, dtype=np.bool_)
    due[order.stage[exchanges]] = True
    return state.Rings(
        first=rings.first,
        port=rings.port,
        load=rings.load,
        turn=rings.turn,
        before=np.zeros(len(rings.port)),
        counted=np.zeros(ports),
        latency=rings.latency_s,
        tied=work.tied_s,
        tail=rings.tail_s,
        head_start=np.array([own.head_start_s for own in work.exchanges_early]),
        ready=np.zeros(S),
        early=np.zeros(order.ranks, dtype=np.bool_),
        due=due,
        came=np.zeros(S, dtype=np.int64),
        rounds=np.zeros(S, dtype=np.int64),
        start=np.full(S, np.nan),
        waiting=np.zeros(S, dtype=np.int64),
        mark=np.zeros(ports, dtype=np.int64),
        counts=np.zeros(3, dtype=np.int64),
        done=np.zeros((np.count_nonzero(exchanges), 4)),
    )


@compiled(allocates=True)
def _messages(devices, network):  # type: ignore[no-untyped-def]
    """The messages that were sent, as arrays of `Transfers`."""
    first, sent, n = devices.replica_first, network.sent, 0
    for direction in range(2):
        for to in range(sent.shape[1]):
            for g in range(sent.shape[2]):
                n += not np.isnan(sent[direction, to, g])
    kind = np.empty(n, np.int8)
    stage, microbatch = np.empty(n, np.int32), np.empty(n, np.int32)
    source, destination = np.empty(n, np.int32), np.empty(n, np.int32)
    start, end = np.empty(n), np.empty(n)
    n = 0
    for direction in range(2):
        for to in range(sent.shape[1]):
            own = to - 1 if direction == 0 else to + 1
            for g in range(sent.shape[2]):
                if np.isnan(sent[direction, to, g]):
                    continue
                kind[n], stage[n], microbatch[n] = F if direction == 0 else B, own, g
                source[n] = devices.rank_of[first[own] + g % (first[own + 1] - first[own])]
                destination[n] = devices.rank_of[first[to] + g % (first[to + 1] - first[to])]
                start[n], end[n] = sent[direction, to, g], network.arrived[direction, to, g]
                n += 1
    return kind, stage, microbatch, source, destination, start, end


def _collectives(rings: state.Rings) -> Collectives:
    done = rings.done[: rings.counts[state.DONE]]
    done = done[np.lexsort((done[:, 1], done[:, 0]))]
    return Collectives(
        done[:, 0].astype(np.int32), done[:, 1].astype(np.int32), done[:, 2], done[:, 3]
    )
