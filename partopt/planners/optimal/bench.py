"""Whole pipelines, executed without contention at every warm-up that may be the best."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from partopt.cost.compiled import compiled
from partopt.cost.kernels import most_in_flight, stage_cost
from partopt.cost.queues import Queues, queued_s, queues_of
from partopt.cost.uncontended import Pipeline, Times, times_of, uncontended_s
from partopt.planners.optimal.paths import update_s
from partopt.planners.optimal.places import level_between

NOTHING = -1
_QUEUED = 10  # steps of an action and its messages in their queues


class Bench(NamedTuple):
    """Where a whole pipeline is executed."""

    line: Pipeline
    times: Times
    queues: Queues
    # ranges of warm-ups that are to be looked at yet, shape (.., S)
    shallow: NDArray[np.int64]
    deep: NDArray[np.int64]
    ranges: NDArray[np.int64]  # how many, NOTHING where no pipeline lies here, shape (1,)


def bench_of(S: int, M: int, P: int, ports: int, waits: bool) -> Bench:
    """Room to execute S stages on P devices, which may wait for their messages."""
    counts, seconds = (np.zeros((12, S), dtype=kind) for kind in (np.int64, np.float64))
    line = Pipeline(
        replicas=counts[0],
        forward=seconds[0],
        again=seconds[1],
        backward=seconds[2],
        weights=seconds[3],
        lag=counts[1],
        update=seconds[4],
        shallow=counts[2],
        deep=counts[3],
        message=np.zeros((S, M)),
        held=np.zeros((S + 1, M)),
        delay=np.zeros((S, M)),
        busy=np.zeros((S, M)),
        port=np.zeros((S, M, 2, 2), dtype=np.int64),
        rank=np.zeros((S, P), dtype=np.int64),
        waits=waits,
    )
    halvings = S * M.bit_length() + 2
    shallow, deep = (np.zeros((halvings, S), dtype=np.int64) for _ in range(2))
    queues = queues_of(S, M, P, ports)
    return Bench(line, times_of(S, M, P), queues, shallow, deep, np.array([NOTHING]))


@compiled()
def lay(searched, path, bench, S):  # type: ignore[no-untyped-def]
    """Lay the S stages of a path on the bench, at any warm-up that fits or its schedule's own."""
    bench.ranges[0] = 1
    layers, places, line = searched.layers, searched.places, bench.line
    for s in range(S):
        place = path.place[s]
        stage = stage_cost(layers, path.start[s], path.stop[s], path.mode[s])
        r, rest = places.replicas[place], stage.backward_s - stage.passing_s
        for c in range(r):
            line.rank[s, c] = places.ranks[place, c]
        line.replicas[s], line.forward[s], line.backward[s] = r, stage.forward_s, stage.passing_s
        line.again[s], line.weights[s] = (0.0, rest) if layers.split else (rest, 0.0)
        line.lag[s] = s if layers.split else 0
        line.update[s] = update_s(layers, places, stage, place)
        last = -(-layers.M // r) - 1
        deepest = min(S - 1 - s, last) if layers.split else last
        if layers.any_warmup:
            deepest = min(last, most_in_flight(layers, stage, r) - 1) if S > 1 else 0
        bench.deep[0, s], bench.shallow[0, s] = deepest, 0 if layers.any_warmup else deepest
        if s > 0:
            _send(searched, line, path.place[s - 1], place, s, layers.cuts[path.start[s]])
    line.held[S] = 0.0


@compiled()
def _send(searched, line, before, place, s, size):  # type: ignore[no-untyped-def]
    """Seconds of each message over the cut before stage s."""
    places, network = searched.places, searched.network
    one, other = places.replicas[before], places.replicas[place]
    for g in range(searched.layers.M):
        source, target = places.ranks[before, g % one], places.ranks[place, g % other]
        k = level_between(network.group, source, target)
        line.message[s, g] = network.delay[k - 1] + size / network.bandwidth[k - 1]
        line.delay[s, g] = network.delay[k - 1]
        line.busy[s, g] = size / (network.bandwidth[k - 1] * places.links[k - 1])
        for way in range(2):
            sender, receiver = (source, target) if way == 0 else (target, source)
            line.port[s, g, way, 0] = _port(network, sender, k, 0)
            line.port[s, g, way, 1] = _port(network, receiver, k, 1)
        line.held[s, g] = network.waited[k - 1] + size * network.hold_byte[k - 1]


@compiled()
def _port(network, rank, k, side):  # type: ignore[no-untyped-def]
    """The number of the port by which a rank sends (side 0) or receives on level k.

    Two of each member of each level, of which a bus has one.
    """
    group, first = network.group, 0
    for level in range(k - 1):
        first += 2 * (group[-1] // group[level])
    if network.bus[k - 1]:
        return first + rank // group[k]
    return first + 2 * (rank // group[k - 1]) + side


@compiled()
def next_warmups(bench, S, T, left):  # type: ignore[no-untyped-def]
    """Go on to the next warm-ups at which what is on the bench may take T seconds or less.

    They are in `line.deep`. Ranges of warm-ups are halved as long as the least of them is in time.
    Returns the seconds there, infinite where nothing remains, and what is `left` of the work.
    """
    line, shallow, deep, ranges = bench.line, bench.shallow, bench.deep, bench.ranges
    while ranges[0] > 0 and left > 0:
        ranges[0] -= 1
        at = ranges[0]
        for s in range(S):
            line.shallow[s], line.deep[s] = shallow[at, s], deep[at, s]
        left -= 2 * S * line.message.shape[1]
        seconds = uncontended_s(line, S, bench.times)
        if seconds <= T and seconds < np.inf:
            left -= _QUEUED * S * line.message.shape[1]
            seconds = max(seconds, queued_s(line, S, bench.times, bench.queues, T))
        if seconds > T:
            continue
        widest = _widest(line, S)
        if line.deep[widest] == line.shallow[widest]:
            return seconds, left
        for s in range(S):
            shallow[at + 1, s], deep[at + 1, s] = line.shallow[s], line.deep[s]
        middle = (line.shallow[widest] + line.deep[widest]) // 2
        deep[at, widest], shallow[at + 1, widest] = middle, middle + 1
        ranges[0] += 2
    return np.inf, left


@compiled()
def _widest(line, S):  # type: ignore[no-untyped-def]
    """The stage whose range of warm-ups is the widest."""
    widest = 0
    for s in range(S):
        if line.deep[s] - line.shallow[s] > line.deep[widest] - line.shallow[widest]:
            widest = s
    return widest
