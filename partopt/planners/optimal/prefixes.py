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

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from partopt.cost.compiled import compiled
from partopt.cost.kernels import Layers, layers_of, most_in_flight, replica_counts, stage_cost
from partopt.cost.links import run_sides_s
from partopt.cost.passes import stage_work_s
from partopt.cost.problem import Problem
from partopt.cost.together import end_s
from partopt.cost.deadline import ports_in_time
from partopt.cost.tolerances import EPSILON
from partopt.documents.topology import Topology

# [i, j)  a stage with r replicas, before which p devices are used
# x       seconds of the messages over cut i and all before it

STATES = 200_000  # prefixes that are kept at once, at the most
WORK = 2_000_000  # pairs of a prefix and a stage, for one T
_KEPT = 16  # prefixes of the same cut, devices and last replicas; more are merged
_WINDOWS = 8  # of the messages of a pipeline
_MESSAGES, _UPDATES, _START = 0, 1, 2  # of a prefix: seconds, seconds, and its last stage's start


def refuter(problem: Problem) -> Callable[[float], bool]:
    """Whether no plan takes so many seconds an iteration.

    It never is where the problem is large or the schedule asynchronous.
    """
    N, P, M = problem.chain.layers, problem.topology.devices, problem.microbatches
    most = min(P, M or 0)
    if M is None or (N + 1) * (P + 1) * (most + 1) * _KEPT > STATES * _KEPT:
        return lambda T: False
    layers, rings, latency = layers_of(problem), *_rings(problem.topology, most)
    shape = N + 1, P + 1, most + 1
    prefixes, counts = np.zeros((*shape, _KEPT, 3)), np.zeros(shape, dtype=np.int64)
    single = sum(level.size > 1 for level in problem.topology.levels) == 1

    def refutes(T: float) -> bool:
        work = WORK
        for least, largest in replica_counts(problem):
            if least > most:
                continue
            bounds = least, min(largest, most)
            work = search(
                layers, problem.network, rings, latency, T, bounds, single, prefixes, counts, work
            )
            if work <= 0:
                return False
        return True

    return refutes


def _rings(topology: Topology, most: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Seconds for a byte of a ring of r devices and its latency, at the best place; shape (most+1,).

    It crosses one level at the least. Where there is but one and it is a bus all r share it.
    """
    levels = [level for level in topology.levels if level.size > 1]
    r = np.maximum(np.arange(most + 1), 1)
    if not levels:
        return np.zeros(most + 1), np.zeros(most + 1)
    shared = r if len(levels) == 1 and levels[0].bus else 1
    rate = max(level.bandwidth_bytes_per_s * level.links for level in levels)
    latency = min(level.latency_s for level in levels)
    return 2 * (r - 1) / r * shared / rate, 2 * (r - 1) * latency


@compiled()
def search(layers, network, rings, latency, T, bounds, single, prefixes, counts, work):  # type: ignore[no-untyped-def]
    """The work that is left after a search for a pipeline within T; 0 or less where there may be one.

    Every stage has from `bounds[0]` to `bounds[1]` replicas; `single`: devices part at one level.
    """
    # one pass of a microbatch takes all messages twice
    most = (T * (1 + EPSILON) - layers.behind[0]) / 2
    if most < 0:
        return work
    windows = _WINDOWS if 2 * most * _WINDOWS > T * EPSILON else 1
    for window in range(windows):
        low, high = most * window / windows, most * (window + 1) / windows
        work = _fill(
            layers, network, rings, latency, T, bounds, single, low, high, prefixes, counts, work
        )
        if work <= 0:
            return 0
        for p in range(counts.shape[1]):
            for r in range(counts.shape[2]):
                for position in range(counts[-1, p, r]):
                    if prefixes[-1, p, r, position, _MESSAGES] >= low:
                        return 0
    return work


@compiled()
def _fill(layers, network, rings, latency, T, bounds, single, low, high, prefixes, counts, work):  # type: ignore[no-untyped-def]
    """Fill `prefixes` with those whose pipelines may have messages from `low` to `high` seconds.

    Returns the work that is left.
    """
    N, P, limit = len(layers.cuts) - 1, counts.shape[1] - 1, T * (1 + EPSILON)
    counts[:] = 0
    _insert(prefixes[0, 0, 0], counts[0, 0], 0, 0.0, -np.inf, 0)
    for i in range(N):
        if not counts[i].any():
            continue
        for j in range(i + 1, N + 1):
            behind = layers.M * (layers.compute[layers.first_mode, -1] - layers.compute[layers.first_mode, j])
            free = P - np.int64(np.ceil(behind / limit - EPSILON)) if limit > 0 else P
            for mode in range(layers.first_mode, layers.last_mode + 1):
                stage = stage_cost(layers, i, j, mode)
                F = most_in_flight(layers, stage)
                for r in range(bounds[0], min(bounds[1], free) + 1):
                    if F == 0 or not _may(layers, network, stage, r, T, single):
                        continue
                    update = (
                        (rings[r] + layers.optimizer_rate) * stage.weights + latency[r] + stage.tied_s
                    )
                    work -= _extend(layers, stage, F, r, update, free - r, limit, low, high, prefixes, counts)
                    if work <= 0:
                        return 0
    return work


@compiled()
def _may(layers, network, stage, r, T, single):  # type: ignore[no-untyped-def]
    """Whether a stage with r replicas is done in T, and its ports, whatever precedes it."""
    i, N = stage.start, len(layers.cuts) - 1
    rounds = -(-layers.M // r)
    least = layers.head[i] + rounds * (stage.forward_s + stage.backward_s)
    if least > T * (1 + EPSILON):
        return False
    if not single:
        return True
    before = after = both = 0.0
    if i > 0:
        before = run_sides_s(network, stage.before, 0.0, 0, r - 1, 1, len(network.group))
    if stage.stop < N:
        after = run_sides_s(network, 0.0, stage.after, 0, r - 1, len(network.group), 1)
    if i > 0 and stage.stop < N:
        both = run_sides_s(network, stage.before, stage.after, 0, r - 1, 1, 1)
    return ports_in_time(layers, stage, T, r, before, after, both)


@compiled()
def _extend(layers, stage, F, r, update, used, limit, low, high, prefixes, counts):  # type: ignore[no-untyped-def]
    """Add a stage to every prefix that it follows, on `used` devices at the most.

    Returns how many there are.
    """
    i, j, N, tried = stage.start, stage.stop, len(layers.cuts) - 1, 0
    tail, next_tail = layers.tail[i] - layers.message[i], layers.tail[j] - layers.message[j]
    head, message = layers.head[i] - layers.message[i], layers.message[i]
    own = 2 * layers.message[j]
    for p in range(used + 1):
        for q in range(counts.shape[2]):
            for position in range(counts[i, p, q]):
                tried += 1
                prefix = prefixes[i, p, q, position]
                x, updates = prefix[_MESSAGES] + message, prefix[_UPDATES] + message
                if x > high:
                    continue
                start = np.int64(prefix[_START])
                R = stage.round_s - own + max(own, 2 * (low - x))
                work = stage_work_s(
                    layers.M,
                    r,
                    F,
                    layers.devices,
                    1 if i > 0 else 0,
                    N - i,
                    stage.forward_s,
                    stage.backward_s,
                    stage.passing_s,
                    R,
                    layers.split,
                    layers.any_warmup,
                )
                passed = work
                if layers.split:
                    passed = -(-layers.M // r) * (stage.forward_s + stage.passing_s)
                seconds = end_s(
                    layers.M,
                    r,
                    work,
                    passed,
                    update,
                    tail + x,
                    updates,
                    q,
                    layers.forward[i] - layers.forward[start],
                    tail - (layers.tail[start] - layers.message[start]),
                )
                if head + x + seconds <= limit:
                    after = max(updates, update) + next_tail - tail
                    _insert(prefixes[j, p + r, r], counts[j, p + r], r, x, after, i)
    return tried


@compiled()
def _insert(prefixes, counts, r, messages, updates, start):  # type: ignore[no-untyped-def]
    """Add a prefix unless one that is there takes less, and drop those that take more.

    A last stage that begins later is shorter. Where there is no room, it is merged with the nearest:
    the prefix that takes no more than either.
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
        nearest = np.inf
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
