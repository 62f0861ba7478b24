"""A timeline in the trace-event format of Perfetto and Chrome, written in pieces.

It opens in ui.perfetto.dev and chrome://tracing.

A process a rank: a track of what it computes, one of what it sends, one of its all-reduces, and
counters of what it holds. Flows lead from the action that makes a message through its transfer to
the action that takes it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from partopt.documents.plan import Plan
from partopt.errors import PartoptError
from partopt.report.looks import WORDS
from partopt.schedules.order import KINDS, A, B, F, I, U
from partopt.simulator.memory import Series, in_flight_over_time, memory_over_time
from partopt.simulator.timeline import Slots, Timeline, slots, working_ranks

MOST_ACTIONS = 1_000_000  # about 700 MB, which is what viewers load

# Rank k is process k + 1: viewers take process 0 and thread 0 for the idle ones of a kernel.
# Tracks of a rank, by tid; transfers that overlap, as over several links, take further ones,
# and so do all-reduces.
_COMPUTE, _JOINED, _TRANSFERS, _ALLREDUCES = 1, 2, 100, 10_000

Integers = NDArray[np.int64]


class _Flows(NamedTuple):
    """Where the flow of each of n transfers begins and ends: tracks, and times in nanoseconds."""

    made_tid: Integers  # shape (n,)
    made_at: Integers
    taken_tid: Integers
    taken_at: Integers


def write(timeline: Timeline, plan: Plan) -> Iterator[bytes]:
    """The trace as JSON, in pieces to be written one after the other.

    The same timeline gives the same bytes. Times are in microseconds, with three digits after the
    point. Raises PartoptError above MOST_ACTIONS.
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
    order = timeline.order
    flows = _flows(timeline)
    sent = np.argsort(timeline.transfers.source, kind="stable")
    first = np.searchsorted(timeline.transfers.source[sent], np.arange(order.ranks + 1))
    about = {
        "model": plan.profile.name,
        "schedule": plan.schedule,
        "planner": plan.planner,
        "topology": plan.topology.name,
        "estimated": plan.profile.estimated,
    }
    yield f'{{"displayTimeUnit":"ms","otherData":{json.dumps(about)},"traceEvents":[\n'.encode()
    comma = ""
    for rank in working_ranks(order).tolist():
        own = sent[first[rank] : first[rank + 1]]
        events = [
            *_actions(timeline, plan, rank),
            *_transfers(timeline, plan, rank, own, flows),
            *_allreduces(timeline, plan, rank),
            *_counter(rank, "in flight", "microbatches", in_flight_over_time(timeline, rank)),
            *_counter(rank, "memory", "bytes", memory_over_time(timeline, plan, rank)),
        ]
        yield (comma + ",\n".join(events)).encode()
        comma = ",\n"
    yield b"\n]}\n"


def _actions(timeline: Timeline, plan: Plan, rank: int) -> Iterator[str]:
    """The tracks of what a rank computes.

    The second of two joined actions has a track to itself.
    """
    own = slots(timeline, rank)
    stages = np.unique(own.stage).tolist()
    held = [
        f"{s}"
        if plan.stages[s].replicas == 1
        else f"{s} (replica {plan.stages[s].ranks.index(rank)})"
        for s in stages
    ]
    yield _name(rank, _COMPUTE, "process_name", f"{_rank(rank, plan)}, stage {' and '.join(held)}")
    yield _metadata(rank, _COMPUTE, "process_sort_index", f'{{"sort_index":{rank}}}')
    yield from _track(rank, _COMPUTE, "compute")
    if own.pair.any():
        yield from _track(rank, _JOINED, "compute, at the same time")
    yield from _action_slices(own, plan, rank, stages)


def _rank(rank: int, plan: Plan) -> str:
    """The rank; where it is a group, with the real ranks that it stands for."""
    real = plan.topology.real_ranks(rank)
    return f"rank {rank}" if len(real) == 1 else f"rank {rank} ({real.start}-{real.stop - 1})"


def _action_slices(own: Slots, plan: Plan, rank: int, stages: list[int]) -> Iterator[str]:
    layers = {s: json.dumps(_layers(plan.stages[s].modules)) for s in stages}
    replica = {s: plan.stages[s].ranks.index(rank) for s in stages}
    begin, seconds = _clock(own.start, own.end)
    columns = (own.kind, own.stage, own.microbatch, own.pair, begin, seconds)
    for kind, s, number, pair, ts, dur in zip(
        *(column.tolist() for column in columns), strict=True
    ):
        if kind == A and dur == 0:
            continue  # the rank does not wait; the all-reduce has its own track
        letter = KINDS[kind]
        name = f"{s}{letter}" if kind == U else f"{s}{letter}{number}"
        which = (
            "" if kind == U else f',"round":{number}' if kind == A else f',"microbatch":{number}'
        )
        args = f'{{"stage":{s}{which},"replica":{replica[s]},"layers":{layers[s]}}}'
        yield _slice(rank, _JOINED if pair == 2 else _COMPUTE, name, WORDS[letter], ts, dur, args)


def _layers(modules: list[str]) -> str:
    return modules[0] if len(modules) == 1 else f"{modules[0]} .. {modules[-1]}"


def _transfers(
    timeline: Timeline, plan: Plan, rank: int, own: Integers, flows: _Flows
) -> Iterator[str]:
    """What a rank sends: slices with their bytes, and the flows through them.

    A flow leads from the action that makes a message to the one that takes it.
    """
    sent = timeline.transfers
    begin, seconds = _clock(sent.start[own], sent.end[own])
    lanes = _lanes(begin, seconds)
    yield from _tracks(rank, _TRANSFERS, "sends", lanes)
    columns = (
        own,
        sent.kind[own],
        sent.stage[own],
        sent.microbatch[own],
        sent.destination[own],
        begin,
        seconds,
        lanes,
    )
    for number, kind, s, microbatch, to, ts, dur, lane in zip(
        *(column.tolist() for column in columns), strict=True
    ):
        size = plan.stages[s + 1].input_bytes if kind == F else plan.stages[s].gradient_bytes
        what, tid = ("activations" if kind == F else "gradients"), _TRANSFERS + lane
        args = f'{{"bytes":{size},"source":{rank},"destination":{to},"microbatch":{microbatch}}}'
        yield _slice(rank, tid, f"{s}{KINDS[kind]}{microbatch} to rank {to}", what, ts, dur, args)
        yield _flow("s", number, rank, flows.made_tid[number], flows.made_at[number], what)
        yield _flow("t", number, rank, tid, ts, what)
        yield _flow("f", number, to, flows.taken_tid[number], flows.taken_at[number], what)


def _flows(timeline: Timeline) -> _Flows:
    """The flow of each transfer, from the action that makes the message to the one that takes it.

    It leaves in the last moment of the former and arrives at the start of the latter.
    """
    order, sent = timeline.order, timeline.transfers
    G, S = int(order.microbatch.max(initial=0)) + 1, int(order.stage.max(initial=0)) + 1
    place = np.zeros((2, S, G), dtype=np.int64)
    for direction, kinds in enumerate(((F,), (B, I))):
        chosen = np.flatnonzero(np.isin(order.kind, kinds))
        place[direction, order.stage[chosen], order.microbatch[chosen]] = chosen
    back = (sent.kind != F).astype(np.int64)
    made, taken = (
        place[back, sent.stage, sent.microbatch],
        place[back, sent.stage + 1 - 2 * back, sent.microbatch],
    )
    begin, seconds = _clock(timeline.start, timeline.end)
    tid = np.full(len(order.kind), _COMPUTE, dtype=np.int64)
    tid[1:][order.joined[:-1]] = _JOINED
    return _Flows(
        tid[made], begin[made] + np.maximum(0, seconds[made] - 1), tid[taken], begin[taken]
    )


def _allreduces(timeline: Timeline, plan: Plan, rank: int) -> Iterator[str]:
    """The all-reduces in which a rank takes part, as it does in those of all of its stages."""
    order, done = timeline.order, timeline.collectives
    stages = np.unique(order.stage[order.rows[rank] : order.rows[rank + 1]])
    own = np.flatnonzero(np.isin(done.stage, stages))
    begin, seconds = _clock(done.start[own], done.end[own])
    lanes = _lanes(begin, seconds)
    yield from _tracks(rank, _ALLREDUCES, "all-reduces", lanes)
    columns = (done.stage[own], done.round[own], begin, seconds, lanes)
    tied = {
        s: sum(flow.bytes for flow in plan.communication if flow.kind == "tied" and flow.stage == s)
        for s in stages.tolist()
    }
    for s, number, ts, dur, lane in zip(*(column.tolist() for column in columns), strict=True):
        stage = plan.stages[s]
        size = stage.trained_bytes if stage.replicas > 1 else 0
        args = (
            f'{{"stage":{s},"round":{number},"bytes":{size},"replicas":{stage.replicas},'
            f'"tied_bytes":{tied[s]}}}'
        )
        yield _slice(rank, _ALLREDUCES + lane, f"{s}A{number}", WORDS["A"], ts, dur, args)


def _counter(rank: int, name: str, unit: str, series: Series) -> Iterator[str]:
    """A quantity over time; the last of several values at one time."""
    times = np.rint(series.times * 1e9).astype(np.int64)
    last = np.diff(times, append=times[-1] + 1) > 0
    for ts, value in zip(times[last].tolist(), series.values[last].tolist(), strict=True):
        when = f'{_event("C", name, rank, _COMPUTE)},"ts":{_us(ts)}'
        yield f'{when},"args":{{"{unit}":{value}}}}}'


def _clock(start: NDArray[np.float64], end: NDArray[np.float64]) -> tuple[Integers, Integers]:
    """Starts and durations in nanoseconds.

    They are rounded so that what follows without a gap still does.
    """
    begin = np.rint(start.astype(np.float64) * 1e9).astype(np.int64)
    return begin, np.rint(end.astype(np.float64) * 1e9).astype(np.int64) - begin


def _lanes(begin: Integers, seconds: Integers) -> Integers:
    """For each of some slices the first lane that is free at its start, shape of `begin`."""
    lanes = np.zeros(len(begin), dtype=np.int64)
    free: list[int] = []
    for place in np.lexsort((seconds, begin)).tolist():
        lane = next((lane for lane, end in enumerate(free) if end <= begin[place]), len(free))
        free[lane : lane + 1] = [int(begin[place] + seconds[place])]
        lanes[place] = lane
    return lanes


def _tracks(rank: int, tid: int, name: str, lanes: Integers) -> Iterator[str]:
    for lane in range(int(lanes.max(initial=-1)) + 1):
        yield from _track(rank, tid + lane, name if lane == 0 else f"{name}, {lane + 1}")


def _track(rank: int, tid: int, name: str) -> Iterator[str]:
    yield _name(rank, tid, "thread_name", name)
    yield _metadata(rank, tid, "thread_sort_index", f'{{"sort_index":{tid}}}')


def _name(rank: int, tid: int, what: str, name: str) -> str:
    return _metadata(rank, tid, what, f'{{"name":"{name}"}}')


def _metadata(rank: int, tid: int, what: str, args: str) -> str:
    return f'{_event("M", what, rank, tid)},"args":{args}}}'


def _slice(rank: int, tid: int, name: str, category: str, ts: int, dur: int, args: str) -> str:
    event = _event("X", name, rank, tid, f',"cat":"{category}"')
    return f'{event},"ts":{_us(ts)},"dur":{_us(dur)},"args":{args}}}'


def _flow(phase: str, number: int, rank: int, tid: int, ts: int, name: str) -> str:
    event = _event(phase, name, rank, tid, f',"cat":"message","id":{number}')
    end = ',"bp":"e"' if phase == "f" else ""
    return f'{event},"ts":{_us(ts)}{end}}}'


def _event(phase: str, name: str, rank: int, tid: int, more: str = "") -> str:
    """The beginning of an event, not closed."""
    return f'{{"ph":"{phase}","name":"{name}"{more},"pid":{rank + 1},"tid":{tid}'


def _us(nanoseconds: int) -> str:
    return f"{nanoseconds // 1000}.{nanoseconds % 1000:03d}"
