"""Execute an order at the costs of a plan, in compiled code."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from partopt.cost.links import ring_latency_s, ring_loads
from partopt.schedules.order import A, B, F, Order
from partopt.simulator import state
from partopt.simulator.deadlock import deadlock_error
from partopt.simulator.events import run
from partopt.simulator.ports import Ports, ports_of
from partopt.simulator.timeline import Collectives, Timeline, Transfers
from partopt.simulator.work import Work


def simulate(order: Order, work: Work) -> Timeline:
    """Execute `order` at the costs of `work`. Raises PartoptError where it deadlocks."""
    ports, R, S = ports_of(work.topology), order.ranks, len(work.ranks)
    times = np.zeros(len(order.kind)), np.zeros(len(order.kind))
    actions = state.Actions(
        order.kind,
        order.stage,
        order.microbatch,
        order.joined,
        order.rows,
        np.ascontiguousarray(work.seconds),
        *times,
    )
    devices, network, rings = (
        _devices(order, work),
        _network(order, work, ports),
        _rings(order, work, ports),
    )
    heap = state.Heap(
        np.zeros(2 * R + S + 2),
        np.zeros(2 * R + S + 2, dtype=np.int64),
        np.zeros(1, dtype=np.int64),
    )
    run(actions, devices, network, rings, heap, work.serial, work.blocking)
    if (devices.next < order.rows[1:]).any():
        raise deadlock_error(order, [int(place) for place in devices.next])
    return Timeline(order, *times, _transfers(devices, network), _collectives(rings))


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


def _network(order: Order, work: Work, ports: Ports) -> state.Network:
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
        cut_bytes=work.cut_bytes,
        arrived=np.full(shape, np.inf),
        sent=np.full(shape, np.nan),
    )


def _rings(order: Order, work: Work, ports: Ports) -> state.Rings:
    S = len(work.ranks)
    rings = [
        ports.of_ring(ranks) if size else []
        for ranks, size in zip(work.ranks, work.gradient_bytes, strict=True)
    ]
    loads = [
        ring_loads(float(size), ranks, work.topology)
        for size, ranks in zip(work.gradient_bytes, work.ranks, strict=True)
    ]
    return state.Rings(
        first=np.cumsum([0, *(len(ring) for ring in rings)]),
        port=np.array([port for ring in rings for port, _ in ring], dtype=np.int64),
        load=np.array(
            [loads[s][k] for s, ring in enumerate(rings) for _, k in ring], dtype=np.float64
        ),
        before=np.zeros(sum(len(ring) for ring in rings)),
        counted=np.zeros(ports.count),
        latency=work.tied_s + [ring_latency_s(ranks, work.topology) for ranks in work.ranks],
        due=np.isin(np.arange(S), order.stage[order.kind == A]),
        came=np.zeros(S, dtype=np.int64),
        rounds=np.zeros(S, dtype=np.int64),
        start=np.full(S, np.nan),
        waiting=np.zeros(S, dtype=np.int64),
        mark=np.zeros(ports.count, dtype=np.int64),
        counts=np.zeros(3, dtype=np.int64),
        done=np.zeros((int((order.kind == A).sum()), 4)),
    )


def _transfers(devices: state.Devices, network: state.Network) -> Transfers:
    # ordered by the sender's stage too
    direction, to, microbatch = np.nonzero(~np.isnan(network.sent))
    stage = np.where(direction == 0, to - 1, to + 1)
    return Transfers(
        kind=np.where(direction == 0, F, B).astype(np.int8),
        stage=stage.astype(np.int32),
        microbatch=microbatch.astype(np.int32),
        source=_ranks(devices, stage, microbatch),
        destination=_ranks(devices, to, microbatch),
        start=network.sent[direction, to, microbatch],
        end=network.arrived[direction, to, microbatch],
    )


def _ranks(
    devices: state.Devices, stage: NDArray[Any], microbatch: NDArray[Any]
) -> NDArray[np.int32]:
    """The rank of the replica of each stage that works on each microbatch."""
    replicas = np.diff(devices.replica_first)
    ranks: NDArray[np.int32] = devices.rank_of[
        devices.replica_first[stage] + microbatch % replicas[stage]
    ].astype(np.int32)
    return ranks


def _collectives(rings: state.Rings) -> Collectives:
    done = rings.done[: rings.counts[state.DONE]]
    done = done[np.lexsort((done[:, 1], done[:, 0]))]
    return Collectives(
        done[:, 0].astype(np.int32), done[:, 1].astype(np.int32), done[:, 2], done[:, 3]
    )
