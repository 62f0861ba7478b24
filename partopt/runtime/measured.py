"""What the ranks of a run recorded, put together as an execution like a simulated one.

Reports and traces that open a simulation open this.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from msgspec import UNSET, structs
from numpy.typing import NDArray

from partopt.cost.plan import layout_of
from partopt.documents.plan import Plan
from partopt.documents.topology import Topology
from partopt.runtime.actions import RankRecord, actions_of
from partopt.schedules import order, schedule
from partopt.schedules.order import KINDS, A, Order
from partopt.simulator.engine import simulate
from partopt.simulator.execution import Execution
from partopt.simulator.steady import steady_state
from partopt.simulator.timeline import Collectives, Timeline, Transfers
from partopt.simulator.work import work_of

Floats = NDArray[np.float64]

_NS = 1e-9


def measured_execution(
    plan: Plan, records: Sequence[RankRecord], step: int = -1, microbatches: int | None = None
) -> Execution:
    """The execution of `plan` in one step of a run, from the records of its ranks.

    `microbatches` are those that passed through an asynchronous plan. A message begins when both
    sides had posted it; where its receiver did not wait for it, it ended when it was sent at the
    sender, for nobody saw it arrive. Ranks of one host share a clock; the clocks of several are
    laid one over the other where the barrier before the step ended.
    """
    orders = order(plan.schedule, layout_of(plan, microbatches))
    ranks = sorted(records, key=lambda record: record.rank)  # the others have no actions
    origin_ns = _origins(ranks, step)
    timeline = Timeline(
        orders,
        _of_all("begin", ranks, step, origin_ns),
        _of_all("end", ranks, step, origin_ns),
        _transfers(orders, ranks, step, origin_ns),
        _collectives(orders, ranks, step, origin_ns),
    )
    work = work_of(plan, schedule(plan.schedule).recomputes)
    if not schedule(plan.schedule).asynchronous:
        return Execution(plan, orders, work, timeline, None, 0.0, float(timeline.makespan))
    steady = steady_state(timeline, [stage.replicas for stage in plan.stages])
    return Execution(plan, orders, work, timeline, steady, steady.start_s, steady.end_s)


def with_measured_times(measured: Execution) -> Execution:
    """The simulation of the same order, every action as long as it was in the run.

    What then remains between the two is the network's or the engine's, not the devices'. What
    messages take of their devices is in these times already.
    """
    timeline, work = measured.timeline, measured.work
    alone = np.ones((len(KINDS), len(work.ranks)))
    again = dataclasses.replace(
        work,
        seconds=alone,
        scale=timeline.end - timeline.start,
        topology=_without_handling(work.topology),
    )
    found = simulate(measured.order, again)
    return dataclasses.replace(measured, work=again, timeline=found, end_s=float(found.makespan))


def _without_handling(topology: Topology) -> Topology:
    """The topology without the time that messages take of their devices."""
    levels = [
        structs.replace(level, overhead_s=UNSET, copy_bytes_per_s=UNSET)
        for level in topology.levels
    ]
    return structs.replace(topology, levels=levels)


def _origins(records: Sequence[RankRecord], step: int) -> list[int]:
    """The time of each rank's clock at which the step begins."""
    first: dict[str, int] = {}
    for record in records:
        started = int(record.started_ns[step])
        first[record.host] = min(first.get(record.host, started), started)
    return [first[record.host] for record in records]


def _of_all(
    name: str, records: Sequence[RankRecord], step: int, origin_ns: Sequence[int]
) -> Floats:
    """A kind of times of all actions in the order, in seconds from the begin of the step."""
    times = [
        (getattr(record, name)[step] - origin) * _NS
        for record, origin in zip(records, origin_ns, strict=True)
    ]
    return np.concatenate(times).astype(np.float64)


def _transfers(
    orders: Order, records: Sequence[RankRecord], step: int, origin_ns: Sequence[int]
) -> Transfers:
    sends, receives = {}, {}
    for rank in range(orders.ranks):
        for action in actions_of(orders, rank):
            if action.message_out:
                sends[action.message_out] = int(orders.rows[rank]) + action.place
            if action.message_in:
                receives[action.message_in] = int(orders.rows[rank]) + action.place
    routes = sorted(sends, key=lambda route: (route.kind, route.stage, route.microbatch))
    made = np.array([sends[route] for route in routes], dtype=np.int64)
    taken = np.array([receives[route] for route in routes], dtype=np.int64)
    names = "send_posted", "sent", "receive_posted", "received"
    posted, sent, waiting, received = (
        _of_all(name, records, step, origin_ns)[places]
        for name, places in zip(names, (made, made, taken, taken), strict=True)
    )
    start = np.minimum(np.maximum(posted, waiting), received)
    columns = np.array(routes, dtype=np.int64).reshape(-1, 5).T
    kind, stage, microbatch, source, destination = columns
    return Transfers(
        kind.astype(np.int8),
        stage.astype(np.int32),
        microbatch.astype(np.int32),
        source.astype(np.int32),
        destination.astype(np.int32),
        start,
        np.maximum(start, np.minimum(sent, received)),
    )


def _collectives(
    orders: Order, records: Sequence[RankRecord], step: int, origin_ns: Sequence[int]
) -> Collectives:
    """From when the last replica came to when the last one had the sums."""
    exchanges = np.flatnonzero(orders.kind == A)
    came = _of_all("end", records, step, origin_ns)
    done = np.maximum(came, _of_all("exchanged", records, step, origin_ns))
    keys = orders.stage[exchanges].astype(np.int64), orders.microbatch[exchanges].astype(np.int64)
    pairs, which = np.unique(np.stack(keys, 1), axis=0, return_inverse=True)
    start, end = np.full(len(pairs), -np.inf), np.full(len(pairs), -np.inf)
    np.maximum.at(start, which.reshape(-1), came[exchanges])
    np.maximum.at(end, which.reshape(-1), done[exchanges])
    columns = pairs.reshape(-1, 2).T.astype(np.int32)
    return Collectives(columns[0], columns[1], start, end)
