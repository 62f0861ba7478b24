"""Where a rank posts its receives: all ranks keep to one sequence of actions and messages.

A message that waits for its other rank holds, on a GPU, what comes behind it: the stream of its
communicator, its queue of the hardware, and a host that waits for the whole device, as one does
that loads a kernel or frees memory. In one sequence nothing stops, whatever waits: the first
message that is not done has nothing undone before it on any rank.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from msgspec import structs

from partopt.documents.actions import A, B, F, I
from partopt.documents.plan import Plan
from partopt.documents.topology import Level
from partopt.runtime.actions import Route
from partopt.runtime.context import Context
from partopt.schedules.order import Order
from partopt.simulator.kernel import simulate
from partopt.simulator.runs import work_of
from partopt.simulator.timeline import Timeline
from partopt.simulator.work import Work

_NS_PER_S = 1e9


class GradientExchange(NamedTuple):
    """An all-reduce of a stage's gradients."""

    stage: int
    round: int


class Posting(NamedTuple):
    """What a rank begins at a place in its row: a receive, or an exchange that others come to late.

    Before action k of the row the place is 2 k, behind it and before its send 2 k + 1.
    """

    place: int
    what: Route | GradientExchange


def cached_postings(plan: Plan, order: Order, context: Context) -> dict[int, list[Posting]]:
    """`postings_of` the steps of a run, which all have one plan and an order alike."""
    key = "postings", id(plan), len(order.kind)
    _, found = context.once(key, lambda: (plan, postings_of(plan, order)))
    return found


def postings_of(plan: Plan, order: Order) -> dict[int, list[Posting]]:
    """What every rank that has anything to post begins, in its order.

    The sequence is that of the ends of actions in a simulation. So a receive is posted before the
    action during which its message is made, and is there in time.
    """
    timeline = simulate(replace(order, joined=np.zeros_like(order.joined)), _work(plan))
    made = _times_made(plan, timeline)
    ends = [timeline.end[of_rank].tolist() for of_rank in map(slice, order.rows, order.rows[1:])]
    # by rank, all at their places in the sequence: at one time messages follow by their senders
    found: defaultdict[int, list[tuple[float, int, Posting]]] = defaultdict(list)

    sent = timeline.transfers
    columns = (sent.kind, sent.stage, sent.microbatch, sent.source, sent.destination)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    for route in itertools.starmap(Route, rows):
        rank, time = route.destination, made[route.kind, route.stage, route.microbatch]
        place = 2 * bisect_left(ends[rank], time)
        if ends[rank][place // 2] == time:  # an action ends as the message is made
            place += 1 if route.source < rank else 2
        found[rank].append((time, route.source, Posting(place, route)))
    # buckets of gradients are exchanged within the last backward, else they are behind it
    overlaps = plan.microbatches is not None and plan.engine.allreduce == "overlap"
    early = [] if waits_in_exchanges(plan) else _early_exchanges(order, timeline)
    for rank, time, exchange in early:
        place = 2 * bisect_left(ends[rank], time if overlaps else np.nextafter(time, np.inf))
        found[rank].append((time, -1 if overlaps else order.ranks, Posting(place, exchange)))
    return {rank: [posting for *_, posting in sorted(of_rank)] for rank, of_rank in found.items()}


def _times_made(plan: Plan, timeline: Timeline) -> dict[tuple[int, int, int], float]:
    """When every message is there to be sent, by kind, stage and microbatch."""
    order, blocks = timeline.order, waits_in_exchanges(plan)
    columns = order.kind.tolist(), order.stage.tolist(), order.microbatch.tolist()
    ends, found = timeline.end.tolist(), {}
    for place, (kind, stage, microbatch) in enumerate(zip(*columns, strict=True)):
        if kind in (F, B, I):
            found[F if kind == F else B, stage, microbatch] = ends[place]
        elif kind == A and blocks:  # the backward before it is sent on behind it
            before = columns[2][place - 1]
            found[B, stage, before] = ends[place]
    return found


def waits_in_exchanges(plan: Plan) -> bool:
    """Whether an asynchronous stage exchanges its gradients before it sends them on."""
    return plan.microbatches is None and plan.engine.allreduce == "blocking"


def _early_exchanges(
    order: Order, timeline: Timeline
) -> Iterator[tuple[int, float, GradientExchange]]:
    """The ranks that come to an exchange before others, and when the last one comes to it."""
    ranks = np.repeat(np.arange(order.ranks), np.diff(order.rows))
    came: defaultdict[GradientExchange, list[tuple[int, float]]] = defaultdict(list)
    for place in np.flatnonzero(order.kind == A).tolist():
        exchange = GradientExchange(int(order.stage[place]), int(order.microbatch[place]))
        came[exchange].append((int(ranks[place]), float(timeline.start[place])))
    for exchange, every in came.items():
        last = max(time for _, time in every)
        yield from ((rank, last, exchange) for rank, time in every if time < last)


def _work(plan: Plan) -> Work:
    """The plan's work in whole nanoseconds, of which every host finds the same sums.

    Messages are as slow as the slowest between any two replicas.
    """
    work, topology = work_of(plan), plan.topology
    every = [[*before, *behind] for before, behind in itertools.pairwise([[], *work.ranks])]
    crossed = [topology.common_level(min(ranks), max(ranks)) for ranks in every]
    levels = [topology.levels[max(k, 1) - 1] for k in crossed]
    latency_s = np.array([*(level.latency_s for level in levels), 0.0])
    byte_s = np.array([*(1.0 / level.bandwidth_bytes_per_s for level in levels), 0.0])
    forward, back = _NS_PER_S * (latency_s + work.crossing * byte_s)
    nothing = np.zeros_like(work.gradient_bytes)
    alike = Level(name="all", size=topology.devices, bandwidth_bytes_per_s=1.0)
    return Work(
        ranks=work.ranks,
        seconds=np.maximum(1.0, np.rint(_NS_PER_S * work.seconds)),
        cut_bytes=np.rint(forward),
        back_bytes=np.rint(back),
        gradient_bytes=nothing,
        tied_s=nothing + 1.0,  # so that a send behind an exchange comes after it
        topology=structs.replace(topology, levels=[alike]),
        blocking=work.blocking,
    )
