"""An iteration in which no message waits for another: no simulation of a pipeline is shorter.

Each device does its actions in the order of its schedule, each as soon as its input has come and,
where devices wait for their messages, what it sent has arrived. Messages and all-reduces have all
ports for themselves. The start of an action is then a longest path over the actions before it,
which nothing that the simulator knows besides makes shorter.

Under schedules that take a warm-up a replica with n microbatches does w forwards first, then a
backward and a forward in turn. Of a stage whose w lies between `shallow` and `deep` only what holds
for all of these is kept: what comes between two actions of a device at the least.

    from          to    at the least, with
    forward j     backward k     `shallow`
    anything else                `deep`
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from partopt.cost.compiled import compiled

# S, s   stages, and which one; r its replicas
# g, k   a microbatch of M, and which of its replica's: g = k r + c on replica c
# turn   what a device does for one microbatch from its backward on: recomputation that is apart,
#        the backward, and the gradients of weights of the microbatch `lag` before


class Pipeline(NamedTuple):
    """The stages of a pipeline, with room for more than the S that it has."""

    replicas: NDArray[np.int64]  # shape (S,), as all that follow
    forward: NDArray[np.float64]  # seconds
    again: NDArray[np.float64]  # seconds, of recomputation while the gradient is waited for
    backward: NDArray[np.float64]  # seconds until the gradient leaves
    weights: NDArray[np.float64]  # seconds, of the gradients of weights where those are apart
    lag: NDArray[np.int64]  # backwards before the first of these
    update: NDArray[np.float64]  # seconds after the last
    shallow: NDArray[np.int64]  # warm-up
    deep: NDArray[np.int64]
    message: NDArray[np.float64]  # seconds over the cut before each stage, shape (S, M)
    # seconds for which it keeps its devices from computing, shape (S + 1, M)
    held: NDArray[np.float64]
    # of each message its latency, and for how long it keeps a port busy, shape (S, M)
    delay: NDArray[np.float64]
    busy: NDArray[np.float64]
    # ports by which activations and gradients leave and come, of a bus the same, shape (S, M, 2, 2)
    port: NDArray[np.int64]
    rank: NDArray[np.int64]  # of each replica, shape (S, P)
    waits: bool  # devices wait for their messages


class Times(NamedTuple):
    """When actions start, and how many of each replica are known."""

    forward: NDArray[np.float64]  # shape (S, M)
    backward: NDArray[np.float64]
    worked: NDArray[np.float64]  # when a device has done what precedes a backward, shape (S, P)
    forwards: NDArray[np.int64]  # shape (S, P)
    backwards: NDArray[np.int64]
    # actions in an order in which they may start: s M + g of forwards, (S + s) M + g of backwards
    started: NDArray[np.int64]
    known: NDArray[np.int64]  # how many of them are known, shape (1,)


def times_of(S: int, M: int, P: int) -> Times:
    """Room for the times of S stages, M microbatches and P replicas of a stage."""
    counts = [np.zeros((S, P), dtype=np.int64) for _ in range(2)]
    started, known = np.zeros(2 * S * M, dtype=np.int64), np.zeros(1, dtype=np.int64)
    forward, backward, worked = np.zeros((S, M)), np.zeros((S, M)), np.zeros((S, P))
    return Times(forward, backward, worked, counts[0], counts[1], started, known)


@compiled()
def uncontended_s(line, S, times):  # type: ignore[no-untyped-def]
    """Seconds of the iteration of S stages, infinite where the order cannot go on."""
    M = line.message.shape[1]
    times.forwards[:S] = 0
    times.backwards[:S] = 0
    times.known[0] = 0
    left, before = 2 * M * S, 0
    down = True
    while left > 0 and left != before:
        before = left
        for turn in range(S):
            s = turn if down else S - 1 - turn
            for c in range(min(line.replicas[s], M)):
                left -= _go_on(line, S, times, s, c)
        down = not down
    longest = np.inf if left > 0 else 0.0
    for s in range(S if left == 0 else 0):
        longest = max(longest, _end_s(line, times, s) + line.update[s])
    return longest


@compiled()
def _go_on(line, S, times, s, c):  # type: ignore[no-untyped-def]
    """Start the actions of a replica whose inputs are known; returns how many."""
    M, r = line.message.shape[1], line.replicas[s]
    n = (M - 1 - c) // r + 1
    first = times.forwards[s, c] + times.backwards[s, c]
    going = True
    while going:
        going = False
        while times.forwards[s, c] < n and _start_forward(line, times, s, c):
            going = True
        while times.backwards[s, c] < n and _start_backward(line, S, times, s, c, n):
            going = True
    return times.forwards[s, c] + times.backwards[s, c] - first


@compiled()
def _start_forward(line, times, s, c):  # type: ignore[no-untyped-def]
    """Whether the start of a replica's next forward is known; it is recorded."""
    r, k, deep = line.replicas[s], times.forwards[s, c], line.deep[s]
    g, t = k * r + c, 0.0
    if s > 0:
        before = line.replicas[s - 1]
        if times.forwards[s - 1, g % before] <= g // before:
            return False
        t = times.forward[s - 1, g] + line.forward[s - 1] + line.message[s, g]
    if k > deep:
        if times.backwards[s, c] < k - deep:
            return False
        t = max(t, times.backward[s, g - (deep + 1) * r] + backward_s(line, s, k - deep - 1, c))
    if k > 0:
        between = forward_s(line, s, k - 1, c)
        if k > deep:
            between += line.again[s] + backward_s(line, s, k - deep - 1, c)
        t = max(t, times.forward[s, g - r] + between)
    times.forward[s, g] = t
    times.forwards[s, c] += 1
    _record(line, times, s, g)
    return True


@compiled()
def _start_backward(line, S, times, s, c, n):  # type: ignore[no-untyped-def]
    """Whether the start of a replica's next backward, of n, is known; it is recorded."""
    r, k = line.replicas[s], times.backwards[s, c]
    g, latest, t = k * r + c, min(k + line.shallow[s], n - 1), 0.0
    if times.forwards[s, c] <= latest:
        return False
    if s < S - 1:
        after = line.replicas[s + 1]
        if times.backwards[s + 1, g % after] <= g // after:
            return False
        t = times.backward[s + 1, g] + line.backward[s + 1] + line.message[s + 1, g]
    worked = times.forward[s, latest * r + c] + forward_s(line, s, latest, c) + line.again[s]
    if k > 0:
        turn = backward_s(line, s, k - 1, c) + line.again[s]
        last = k + line.shallow[s]
        forward = forward_s(line, s, last, c) if last < n else 0.0
        worked = max(worked, times.worked[s, c] + turn + forward)
        last = k + line.deep[s]
        forward = forward_s(line, s, last, c) if last < n else 0.0
        t = max(t, times.backward[s, g - r] + turn + forward)
    times.worked[s, c] = worked
    times.backward[s, g] = max(t, worked)
    times.backwards[s, c] += 1
    _record(line, times, len(line.message) + s, g)
    return True


@compiled()
def _record(line, times, row, g):  # type: ignore[no-untyped-def]
    """Record that an action may start now."""
    times.started[times.known[0]] = row * line.message.shape[1] + g
    times.known[0] += 1


@compiled()
def forward_s(line, s, k, c):  # type: ignore[no-untyped-def]
    """Seconds of the k-th forward of a replica, and of waiting until what it sends has come."""
    return line.forward[s] + line.held[s + 1, k * line.replicas[s] + c]


@compiled()
def backward_s(line, s, k, c):  # type: ignore[no-untyped-def]
    """Seconds of the k-th backward of a replica, of what follows it, and of waiting likewise."""
    held = line.held[s, k * line.replicas[s] + c]
    return line.backward[s] + _weights_s(line, s, k) + held


@compiled()
def _weights_s(line, s, k):  # type: ignore[no-untyped-def]
    """Seconds for gradients of weights behind the k-th backward."""
    return line.weights[s] if k >= line.lag[s] else 0.0


@compiled()
def _end_s(line, times, s):  # type: ignore[no-untyped-def]
    """When the last replica of a stage has all gradients."""
    M, r, end = line.message.shape[1], line.replicas[s], 0.0
    for c in range(min(r, M)):
        n = (M - 1 - c) // r + 1
        end = max(end, times.backward[s, (n - 1) * r + c] + end_s(line, s, n))
    return end


@compiled()
def end_s(line, s, n):  # type: ignore[no-untyped-def]
    """Seconds from the start of the last of a replica's n backwards until it has all gradients."""
    return line.backward[s] + _weights_s(line, s, n - 1) + min(line.lag[s], n) * line.weights[s]
