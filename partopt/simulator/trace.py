"""A timeline as a Chrome trace, which Perfetto shows: a process a rank.

Rank k is process k + 1, since viewers take process 0 and thread 0 for the idle ones of a kernel.
Each has a track of what it computes, tracks of what it sends and of its all-reduces, and counters
of its microbatches in flight and of its memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from msgspec import json
from numpy.typing import NDArray

from partopt.documents.actions import KINDS, WORDS, A, B, F, I, U
from partopt.documents.plan import Plan
from partopt.errors import PartoptError
from partopt.simulator.memory import Series, in_flight_over_time, memory_over_time
from partopt.simulator.timeline import Timeline, slots, working_ranks

MOST_ACTIONS = 1_000_000  # about 700 MB, which is what viewers load

# Tracks of a rank, by tid; transfers that overlap, as over several links, take further ones,
# and so do all-reduces.
_COMPUTE, _JOINED, _TRANSFERS, _ALLREDUCES = 1, 2, 100, 10_000

Integers = NDArray[np.int64]
Event = dict[str, Any]


class _Flows(NamedTuple):
    """Where the flows of n transfers begin and end: tracks, and times in nanoseconds."""

    made_tid: Integers  # shape (n,)
    made_at: Integers
    taken_tid: Integers
    taken_at: Integers


def write(timeline: Timeline, plan: Plan) -> Iterator[bytes]:
    """The trace as JSON, in pieces to be written one after the other.

    The same timeline gives the same bytes. Times are in microseconds, to the nanosecond. Raises
    PartoptError above MOST_ACTIONS.
    """
    actions = len(timeline.order.kind)
    if actions > MOST_ACTIONS:
        raise PartoptError(
            f"a trace of {actions:,} actions is more than a viewer can load; {MOST_ACTIONS:,} are",
            "simulate fewer `microbatches`",
            code="too-many-actions",
            actions=actions,
            limit=MOST_ACTIONS,
        )
    return _pieces(timeline, plan)


def _pieces(timeline: Timeline, plan: Plan) -> Iterator[bytes]:
    order, flows = timeline.order, _flows(timeline)
    sent = np.argsort(timeline.transfers.source, kind="stable")
    first = np.searchsorted(timeline.transfers.source[sent], np.arange(order.ranks + 1))
    about = {
        "model": plan.profile.name,
        "schedule": plan.schedule,
        "planner": plan.planner,
        "topology": plan.topology.name,
        "estimated": plan.profile.estimated,
    }
    yield b'{"displayTimeUnit":"ms","otherData":%s,"traceEvents":[\n' % json.encode(about)
    comma = b""
    for rank in working_ranks(order).tolist():
        of_rank = sent[first[rank] : first[rank + 1]]
        events = [
            *_actions(timeline, plan, rank),
            *_transfers(timeline, plan, rank, of_rank, flows),
            *_allreduces(timeline, plan, rank),
            *_counter(rank, "in flight", "microbatches", in_flight_over_time(timeline, rank)),
            *_counter(rank, "memory", "bytes", memory_over_time(timeline, plan, rank)),
        ]
        yield comma + b",\n".join(map(json.encode, events))
        comma = b",\n"
    yield b"\n]}\n"


def _actions(timeline: Timeline, plan: Plan, rank: int) -> Iterator[Event]:
    """What a rank computes; the second of two joined actions has a track to itself."""
    actions = slots(timeline, rank)
    stages = np.unique(actions.stage).tolist()
    replica = {s: plan.stages[s].ranks.index(rank) for s in stages}
    real = plan.topology.real_ranks(rank)  # more than one where the rank is a group
    name = f"rank {rank}" if len(real) == 1 else f"rank {rank} ({real.start}-{real.stop - 1})"
    held = [
        f"{s}" if plan.stages[s].replicas == 1 else f"{s} (replica {replica[s]})" for s in stages
    ]
    names = {"name": f"{name}, stage {' and '.join(held)}"}
    yield _event("M", "process_name", rank, _COMPUTE, args=names)
    yield _event("M", "process_sort_index", rank, _COMPUTE, args={"sort_index": rank})
    yield from _track(rank, _COMPUTE, "compute")
    if actions.pair.any():
        yield from _track(rank, _JOINED, "compute, at the same time")
    modules = {s: plan.stages[s].modules for s in stages}
    layers = {s: " .. ".join(dict.fromkeys([names[0], names[-1]])) for s, names in modules.items()}
    starts, seconds = _clock(actions.start, actions.end)
    columns = (actions.kind, actions.stage, actions.microbatch, actions.pair, starts, seconds)
    for kind, s, number, pair, ts, dur in _rows(*columns):
        if kind == A and dur == 0:
            continue  # the rank does not wait; the all-reduce has its own track
        which = {} if kind == U else {"round" if kind == A else "microbatch": number}
        args = {"stage": s, **which, "replica": replica[s], "layers": layers[s]}
        name = f"{s}{KINDS[kind]}{'' if kind == U else number}"
        tid = _JOINED if pair == 2 else _COMPUTE
        yield _slice(rank, tid, name, WORDS[KINDS[kind]], ts, dur, args)


def _transfers(
    timeline: Timeline, plan: Plan, rank: int, of_rank: Integers, flows: _Flows
) -> Iterator[Event]:
    """What a rank sends: slices with their bytes, and the flows through them.

    A flow leads from the action that makes a message to the one that takes it.
    """
    sent = timeline.transfers
    begin, seconds = _clock(sent.start[of_rank], sent.end[of_rank])
    lanes = _lanes(begin, seconds)
    yield from _tracks(rank, _TRANSFERS, "sends", lanes)
    columns = (sent.kind, sent.stage, sent.microbatch, sent.destination)
    about = (of_rank, *(column[of_rank] for column in columns))
    ends = (column[of_rank] for column in flows)
    for number, kind, s, microbatch, to, ts, dur, lane, *flow in _rows(
        *about, begin, seconds, lanes, *ends
    ):
        size = plan.stages[s + 1].input_bytes if kind == F else plan.stages[s].gradient_bytes
        what, tid = ("activations" if kind == F else "gradients"), _TRANSFERS + lane
        args = {"bytes": size, "source": rank, "destination": to, "microbatch": microbatch}
        yield _slice(rank, tid, f"{s}{KINDS[kind]}{microbatch} to rank {to}", what, ts, dur, args)
        message: Event = {"cat": "message", "id": number}
        made_tid, made_at, taken_tid, taken_at = flow
        yield _event("s", what, rank, made_tid, **message, ts=made_at / 1000)
        yield _event("t", what, rank, tid, **message, ts=ts / 1000)
        yield _event("f", what, to, taken_tid, **message, ts=taken_at / 1000, bp="e")


def _flows(timeline: Timeline) -> _Flows:
    """The flow of every transfer, from the action that makes the message to the one that takes it.

    It leaves in the last moment of the former and arrives at the start of the latter.
    """
    order, sent = timeline.order, timeline.transfers
    G, S = int(order.microbatch.max(initial=0)) + 1, int(order.stage.max(initial=0)) + 1
    place = np.zeros((2, S, G), dtype=np.int64)
    for direction, kinds in enumerate(((F,), (B, I))):
        chosen = np.flatnonzero(np.isin(order.kind, kinds))
        place[direction, order.stage[chosen], order.microbatch[chosen]] = chosen
    back = (sent.kind != F).astype(np.int64)
    made = place[back, sent.stage, sent.microbatch]
    taken = place[back, sent.stage + 1 - 2 * back, sent.microbatch]
    begin, seconds = _clock(timeline.start, timeline.end)
    tid = np.full(len(order.kind), _COMPUTE, dtype=np.int64)
    tid[1:][order.joined[:-1]] = _JOINED
    leaves = begin[made] + np.maximum(0, seconds[made] - 1)
    return _Flows(tid[made], leaves, tid[taken], begin[taken])


def _allreduces(timeline: Timeline, plan: Plan, rank: int) -> Iterator[Event]:
    """The all-reduces in which a rank takes part, as it does in those of all of its stages."""
    order, done = timeline.order, timeline.collectives
    stages = np.unique(order.stage[order.rows[rank] : order.rows[rank + 1]])
    of_rank = np.flatnonzero(np.isin(done.stage, stages))
    begin, seconds = _clock(done.start[of_rank], done.end[of_rank])
    lanes = _lanes(begin, seconds)
    yield from _tracks(rank, _ALLREDUCES, "all-reduces", lanes)
    tied = {
        s: sum(flow.bytes for flow in plan.communication if flow.kind == "tied" and flow.stage == s)
        for s in stages.tolist()
    }
    for s, number, ts, dur, lane in _rows(
        done.stage[of_rank], done.round[of_rank], begin, seconds, lanes
    ):
        stage = plan.stages[s]
        args = {
            "stage": s,
            "round": number,
            "bytes": stage.trained_bytes if stage.replicas > 1 else 0,
            "replicas": stage.replicas,
            "tied_bytes": tied[s],
        }
        yield _slice(rank, _ALLREDUCES + lane, f"{s}A{number}", WORDS["A"], ts, dur, args)


def _counter(rank: int, name: str, unit: str, series: Series) -> Iterator[Event]:
    """A quantity over time; the last of several values at one time."""
    times = np.rint(series.times * 1e9).astype(np.int64)
    last = np.diff(times, append=times[-1] + 1) > 0
    for ts, value in _rows(times[last], series.values[last]):
        yield _event("C", name, rank, _COMPUTE, ts=ts / 1000, args={unit: value})


def _clock(start: NDArray[np.float64], end: NDArray[np.float64]) -> tuple[Integers, Integers]:
    """Starts and durations in nanoseconds.

    They are rounded so that what follows without a gap still does.
    """
    begin = np.rint(start.astype(np.float64) * 1e9).astype(np.int64)
    return begin, np.rint(end.astype(np.float64) * 1e9).astype(np.int64) - begin


def _lanes(begin: Integers, seconds: Integers) -> Integers:
    """For some slices the first lane that is free at its start, shape of `begin`."""
    lanes = np.zeros(len(begin), dtype=np.int64)
    free: list[int] = []
    for place in np.lexsort((seconds, begin)).tolist():
        lane = next((lane for lane, end in enumerate(free) if end <= begin[place]), len(free))
        free[lane : lane + 1] = [int(begin[place] + seconds[place])]
        lanes[place] = lane
    return lanes


def _rows(*columns: NDArray[Any]) -> Iterator[tuple[Any, ...]]:
    """The rows of several columns, as plain numbers."""
    return zip(*(column.tolist() for column in columns), strict=True)


def _tracks(rank: int, tid: int, name: str, lanes: Integers) -> Iterator[Event]:
    for lane in range(int(lanes.max(initial=-1)) + 1):
        yield from _track(rank, tid + lane, name if lane == 0 else f"{name}, {lane + 1}")


def _track(rank: int, tid: int, name: str) -> Iterator[Event]:
    yield _event("M", "thread_name", rank, tid, args={"name": name})
    yield _event("M", "thread_sort_index", rank, tid, args={"sort_index": tid})


def _slice(rank: int, tid: int, name: str, category: str, ts: int, dur: int, args: Event) -> Event:
    times = {"ts": ts / 1000, "dur": dur / 1000}
    return _event("X", name, rank, tid, cat=category, **times, args=args)


def _event(phase: str, name: str, rank: int, tid: int, **more: Any) -> Event:
    return {"ph": phase, "name": name, "pid": rank + 1, "tid": tid, **more}
