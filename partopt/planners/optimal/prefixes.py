"""What the stages of an iteration take together: a bound on pipelines built from the first stage.

`partopt.cost.together` bounds the iteration of a pipeline by all its messages, by the updates that
follow a stage's last gradient and by replicas that get theirs together; the probes know one stage
at a time. Here a dynamic program asks whether any pipeline keeps those terms within T, for small
problems. A prefix, layers [0, i) on p devices, is known by its messages, its updates, and its last
stage; of equal ones those that take less remain. A round trip needs the messages behind, too: the
pipelines are asked for window by window of all their messages.

Ranks and links are the best there are, so that the bound holds for plans of any family.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from partopt.cost.collectives import algorithm_number, byte_in_level_s, choose
from partopt.cost.compiled import compiled
from partopt.cost.deadline import ports_in_time, work_in_layers_s
from partopt.cost.kernels import (
    last_exchange_s,
    layers_of,
    most_in_flight,
    replica_counts,
    stage_cost,
    step_s,
)
from partopt.cost.links import Network, run_sides_s
from partopt.cost.problem import Problem
from partopt.cost.together import end_s
from partopt.cost.tolerances import DEVICE, EPSILON, TINY

# [i, j)  a stage with r replicas, before which p devices are used
# x       seconds of the messages over cut i and all before it

STATES = 100_000  # triples of a cut, devices and replicas: more take long
WORK = 1_000_000  # pairs of a prefix and a stage, for one T
_KEPT = 16  # prefixes of one triple; more are merged
_WINDOWS = 8  # of the messages of a pipeline
_MESSAGES, _UPDATES, _START = 0, 1, 2  # of a prefix: seconds, seconds, and its last stage's start


class Wanted(NamedTuple):
    """The pipelines that are asked for."""

    limit: float  # T, and what rounding may add
    least: int  # replicas of a stage
    most: int
    low: float  # seconds of all messages
    high: float


class Links(NamedTuple):
    """What the network takes at the least, wherever replicas lie."""

    ring: NDArray[np.float64]  # s for a byte that r replicas reduce, shape (most + 1,)
    latency: NDArray[np.float64]  # s, of the same
    network: Network
    single: bool  # devices part at one level: all ports of a stage are alike


class Table(NamedTuple):
    """The prefixes of each cut, number of devices used, and replicas of the last stage."""

    prefixes: NDArray[np.float64]  # shape (N+1, P+1, most + 1, _KEPT, 3)
    counts: NDArray[np.int64]  # shape (N+1, P+1, most + 1)


def refuter(problem: Problem) -> Callable[[float], bool]:
    """Whether no plan takes so many seconds an iteration.

    Never, where the problem is large or the schedule asynchronous.
    """
    N, P = problem.chain.layers, problem.topology.devices
    most = min(P, problem.microbatches or 0)
    if most == 0 or (N + 1) * (P + 1) * (most + 1) > STATES:
        return lambda T: False
    layers, links = layers_of(problem), _links(problem, most)
    shape = N + 1, P + 1, most + 1
    table = Table(np.zeros((*shape, _KEPT, 3)), np.zeros(shape, dtype=np.int64))
    every = [(least, min(largest, most)) for least, largest in replica_counts(problem)]

    def refutes(T: float) -> bool:
        left = WORK
        for wanted in _windows(T, float(layers.behind[0]), every):
            left = fill(layers, links, wanted, table, left)
            if left <= 0 or reaches_end(wanted, table):
                return False
        return True

    return refutes


def _windows(T: float, one_pass_s: float, counts: Sequence[tuple[int, int]]) -> Iterator[Wanted]:
    """What to ask for, so that it covers all pipelines.

    A microbatch passes through the whole chain and over each cut twice within T.
    """
    limit = T * (1 + EPSILON)
    most = (limit - one_pass_s) / 2
    edges = [most * window / _WINDOWS for window in range(_WINDOWS + 1)]
    for least, largest in counts:
        for low, high in itertools.pairwise(edges) if most >= 0 and least <= largest else []:
            yield Wanted(limit, least, largest, low, high)


def _links(problem: Problem, most: int) -> Links:
    """All-reduces over the best ranks there are.

    On one level r ranks share it. On several, no algorithm moves less than a ring on the fastest,
    or makes fewer than 2 log2(r) steps.
    """
    levels = [level for level in problem.topology.levels if level.size > 1]
    single, allowed = len(levels) == 1, algorithm_number(problem.topology)
    ring, waits = np.zeros(most + 1), np.zeros(most + 1)
    for r in range(2, most + 1 if levels else 0):
        byte_s = min(byte_in_level_s(level, r if single else 1) for level in levels)
        delay = min(level.allreduce_latency_s for level in levels)
        if single:
            _, ring[r], waits[r] = choose(allowed, r, byte_s, delay, math.inf, math.inf)
        else:
            ring[r], waits[r] = 2 * (r - 1) / r * byte_s, 2 * math.log2(r) * delay
    return Links(ring, waits, problem.network, single)


@compiled()
def reaches_end(wanted, table):  # type: ignore[no-untyped-def]
    """Whether a prefix is a whole pipeline with the messages wanted."""
    _, devices, replicas = table.counts.shape
    for p in range(devices):
        for r in range(replicas):
            for position in range(table.counts[-1, p, r]):
                if table.prefixes[-1, p, r, position, _MESSAGES] >= wanted.low:
                    return True
    return False


@compiled()
def fill(layers, links, wanted, table, left):  # type: ignore[no-untyped-def]
    """Fill the table with the prefixes of all pipelines wanted.

    Returns what is `left` of the work; 0 or less where it was not enough.
    """
    N, P = len(layers.cuts) - 1, table.counts.shape[1] - 1
    table.counts[:] = 0
    _insert(table.prefixes[0, 0, 0], table.counts[0, 0], 0, 0.0, -np.inf, 0)
    for i in range(N):
        if not table.counts[i].any():
            continue
        for j in range(i + 1, N + 1):
            compute = layers.compute[layers.first_mode]
            behind = layers.M * (compute[N] - compute[j]) / max(wanted.limit, TINY)
            free = P - np.int64(np.ceil(behind - DEVICE))
            for mode in range(layers.first_mode, layers.last_mode + 1):
                stage = stage_cost(layers, i, j, mode)
                for r in range(wanted.least, min(wanted.most, free) + 1):
                    F = most_in_flight(layers, stage, r)
                    if F > 0 and _is_in_time(layers, links, wanted, stage, r):
                        left -= _extend(layers, links, wanted, table, stage, F, r, free - r)
                    if left <= 0:
                        return left
    return left


@compiled()
def _is_in_time(layers, links, wanted, stage, r):  # type: ignore[no-untyped-def]
    """Whether r replicas of a stage, and their ports, have the time, whatever precedes them."""
    i, j, N, none = stage.start, stage.stop, len(layers.cuts) - 1, len(links.network.group)
    computing = -(-layers.M // r) * (stage.forward_s + stage.backward_s)
    if layers.head[i] + computing > wanted.limit:
        return False
    if not links.single:
        return True
    gap_before, gap_after = 1 if i > 0 else none, 1 if j < N else none
    before = run_sides_s(links.network, stage.traffic_before, 0.0, 0, r - 1, gap_before, none)
    after = run_sides_s(links.network, 0.0, stage.traffic_after, 0, r - 1, none, gap_after)
    both = run_sides_s(
        links.network, stage.traffic_before, stage.traffic_after, 0, r - 1, gap_before, gap_after
    )
    return ports_in_time(layers, stage, wanted.limit, r, before, after, both)


@compiled()
def _extend(layers, links, wanted, table, stage, F, r, used):  # type: ignore[no-untyped-def]
    """Add a stage with r replicas to every prefix on `used` devices or fewer that leaves it time.

    Returns how many were tried.
    """
    i, j, M, tried = stage.start, stage.stop, layers.M, 0
    tail, next_tail = layers.tail[i] - layers.message[i], layers.tail[j] - layers.message[j]
    update = last_exchange_s(layers, stage, links.ring[r], links.latency[r])
    update += step_s(layers, stage, r) + stage.tied_s
    for p in range(used + 1):
        for q in range(table.counts.shape[2]):
            for position in range(table.counts[i, p, q]):
                prefix, tried = table.prefixes[i, p, q, position], tried + 1
                x = prefix[_MESSAGES] + layers.message[i]
                updates = prefix[_UPDATES] + layers.message[i]
                start = np.int64(prefix[_START])
                if x > wanted.high:
                    continue
                own = 2 * layers.message[j]
                R = stage.round_s - own + max(own, 2 * (wanted.low - x))
                work = work_in_layers_s(layers, stage, F, r, R)
                passed = work
                if layers.split:
                    passed = -(-M // r) * (stage.forward_s + stage.passing_s)
                forward = layers.forward[i] - layers.forward[start]
                passing = tail - (layers.tail[start] - layers.message[start])
                seconds = end_s(M, r, work, passed, update, tail + x, updates, q, forward, passing)
                if layers.forward[i] + x + seconds <= wanted.limit:
                    after = max(updates, update) + next_tail - tail
                    _insert(table.prefixes[j, p + r, r], table.counts[j, p + r], r, x, after, i)
    return tried


@compiled()
def _insert(prefixes, counts, r, messages, updates, start):  # type: ignore[no-untyped-def]
    """Add a prefix unless one that is there takes less, and drop those that take more.

    A last stage that begins later is shorter. Where there is no room, the prefix is merged with the
    nearest: the two give way to one that takes no more than either.
    """
    kept = 0
    for position in range(counts[r]):
        other = prefixes[position]
        if other[_MESSAGES] <= messages and other[_UPDATES] <= updates and other[_START] >= start:
            return
    for position in range(counts[r]):
        other = prefixes[position]
        if not (
            messages <= other[_MESSAGES] and updates <= other[_UPDATES] and start >= other[_START]
        ):
            prefixes[kept, 0], prefixes[kept, 1], prefixes[kept, 2] = other[0], other[1], other[2]
            kept += 1
    place = kept
    if kept == len(prefixes):
        place, nearest = 0, np.inf
        for position in range(kept):
            apart = abs(prefixes[position, _MESSAGES] - messages)
            if apart < nearest:
                nearest, place = apart, position
        messages = min(messages, prefixes[place, _MESSAGES])
        updates = min(updates, prefixes[place, _UPDATES])
        start = max(start, np.int64(prefixes[place, _START]))
        kept -= 1
    prefixes[place, _MESSAGES], prefixes[place, _UPDATES] = messages, updates
    prefixes[place, _START] = start
    counts[r] = kept + 1
