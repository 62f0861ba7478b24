"""What ports, buses and waiting devices of a pipeline do one after the other, at the least.

Executed without contention (`partopt.cost.uncontended`) an action has a time before which it does
not begin, its head, and what follows it takes a time, its tail. A port sends one message at a time,
and a device that waits for its messages does nothing else meanwhile. Of jobs with heads and tails
no order is shorter than to do at any time what has the longest tail, stopping others for it
(Jackson's rule with preemption; Carlier, "The one-machine sequencing problem", EJOR 1982).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from partopt.cost.compiled import compiled
from partopt.cost.heap import Heap, heap_of, pop, push
from partopt.cost.uncontended import backward_s, end_s, forward_s

# s, g, k, r, c   as in `partopt.cost.uncontended`
# queue           a port, a bus or a device

_END = -1  # of a queue


class Queues(NamedTuple):
    """The jobs of all queues, and what follows the actions of a pipeline."""

    # from the start of an action to the end of the iteration, shape (S, M)
    forward: NDArray[np.float64]
    backward: NDArray[np.float64]
    worked: NDArray[np.float64]  # from when a device may do its next backward, shape (S, P)
    first: NDArray[np.int64]  # job of each queue
    next: NDArray[np.int64]  # job of its queue, as all that follow of each job
    head: NDArray[np.float64]
    length: NDArray[np.float64]
    tail: NDArray[np.float64]
    jobs: NDArray[np.int64]  # how many there are, shape (1,)
    coming: Heap
    waiting: Heap


def queues_of(S: int, M: int, P: int, ports: int) -> Queues:
    """Room for the jobs of S stages, M microbatches, P devices and so many ports."""
    most = 10 * S * M  # an action is one, a message two of ports and two of devices
    return Queues(
        forward=np.zeros((S, M)),
        backward=np.zeros((S, M)),
        worked=np.zeros((S, P)),
        first=np.zeros(ports + P, dtype=np.int64),
        next=np.zeros(most, dtype=np.int64),
        head=np.zeros(most),
        length=np.zeros(most),
        tail=np.zeros(most),
        jobs=np.zeros(1, dtype=np.int64),
        coming=heap_of(most),
        waiting=heap_of(most),
    )


@compiled()
def queued_s(line, S, times, queues, limit):  # type: ignore[no-untyped-def]
    """Seconds that no iteration of S stages goes below, at the `times` of executing them alone.

    No more is found out than that it is above `limit`.
    """
    _find_tails(line, S, times, queues)
    queues.first[:], queues.jobs[0] = _END, 0
    ports = len(queues.first) - line.rank.shape[1]
    for s in range(S):
        for g in range(line.message.shape[1]):
            _add_jobs(line, times, queues, ports, s, g)
    longest = 0.0
    for queue in range(len(queues.first)):
        longest = max(longest, _one_after_the_other_s(queues, queue))
        if longest > limit:
            break
    return longest


@compiled()
def _find_tails(line, S, times, queues):  # type: ignore[no-untyped-def]
    """Fill in what follows each action, from the last that was started to the first."""
    M, rows = line.message.shape[1], line.message.shape[0]
    forward, backward, worked = queues.forward, queues.backward, queues.worked
    forward[:S], backward[:S], worked[:S] = 0.0, 0.0, 0.0
    for place in range(2 * S * M - 1, -1, -1):
        number = times.started[place]
        s, g = number // M % rows, number % M
        r, shallow, deep = line.replicas[s], line.shallow[s], line.deep[s]
        k, c = g // r, g % r
        n = (M - 1 - c) // r + 1
        if number < rows * M:
            own = forward[s, g]
            if s > 0:
                before = line.forward[s - 1] + line.message[s, g]
                forward[s - 1, g] = max(forward[s - 1, g], before + own)
            between = 0.0
            if k > deep:
                between = backward_s(line, s, k - deep - 1, c)
                at = g - (deep + 1) * r
                backward[s, at] = max(backward[s, at], between + own)
                between += line.again[s]
            if k > 0:
                between += forward_s(line, s, k - 1, c)
                forward[s, g - r] = max(forward[s, g - r], between + own)
            continue
        if k == n - 1:
            backward[s, g] = max(backward[s, g], end_s(line, s, n) + line.update[s])
        own = backward[s, g]
        if s < S - 1:
            behind = line.backward[s + 1] + line.message[s + 1, g]
            backward[s + 1, g] = max(backward[s + 1, g], behind + own)
        ready, latest = max(own, worked[s, c]), min(k + shallow, n - 1)
        done = forward_s(line, s, latest, c) + line.again[s]
        at = latest * r + c
        forward[s, at] = max(forward[s, at], done + ready)
        if k > 0:
            turn = backward_s(line, s, k - 1, c) + line.again[s]
            more = forward_s(line, s, k + shallow, c) if k + shallow < n else 0.0
            worked[s, c] = ready + turn + more
            more = forward_s(line, s, k + deep, c) if k + deep < n else 0.0
            backward[s, g - r] = max(backward[s, g - r], own + turn + more)


@compiled()
def _add_jobs(line, times, queues, ports, s, g):  # type: ignore[no-untyped-def]
    """Put the actions of a microbatch on a stage, and its messages over the cut before that, into
    their queues.
    """
    f, b, own = line.forward[s], line.backward[s], line.rank[s, g % line.replicas[s]]
    if line.waits:
        _add(queues, ports + own, times.forward[s, g], f, queues.forward[s, g] - f)
        _add(queues, ports + own, times.backward[s, g], b, queues.backward[s, g] - b)
    if s == 0:
        return
    held, busy, delay = line.held[s, g], line.busy[s, g], line.delay[s, g]
    other = line.rank[s - 1, g % line.replicas[s - 1]]
    for way in range(2):
        if way == 0:
            head, tail = times.forward[s - 1, g] + line.forward[s - 1], queues.forward[s, g]
        else:
            head, tail = times.backward[s, g] + b, queues.backward[s - 1, g]
        for side in range(2):
            port = line.port[s, g, way, side]
            if side == 0 or port != line.port[s, g, way, 0]:
                _add(queues, port, head, busy, delay + tail)
        if held > 0.0:
            _add(queues, ports + own, head, held, tail)
            _add(queues, ports + other, head, held, tail)


@compiled()
def _add(queues, queue, head, length, tail):  # type: ignore[no-untyped-def]
    """Put a job into a queue."""
    job = queues.jobs[0]
    queues.jobs[0] += 1
    queues.head[job], queues.length[job], queues.tail[job] = head, length, tail
    queues.next[job], queues.first[queue] = queues.first[queue], job


@compiled()
def _one_after_the_other_s(queues, queue):  # type: ignore[no-untyped-def]
    """Seconds until what follows the jobs of a queue is done, at the least."""
    coming, waiting, longest, t = queues.coming, queues.waiting, 0.0, 0.0
    job = queues.first[queue]
    while job != _END:
        push(coming, queues.head[job], job)
        job = queues.next[job]
    while coming.size[0] > 0 or waiting.size[0] > 0:
        if waiting.size[0] == 0:
            t = max(t, coming.time[0])
        while coming.size[0] > 0 and coming.time[0] <= t:
            _, job = pop(coming)
            push(waiting, -queues.tail[job], job)
        job = waiting.number[0]
        left, until = queues.length[job], coming.time[0] - t if coming.size[0] > 0 else np.inf
        if left <= until:
            t += left
            longest = max(longest, t + queues.tail[job])
            pop(waiting)
        else:
            t += until
            queues.length[job] = left - until
    return longest
