"""What the port of a server carries: a bound where stages share one, on clusters of servers.

Loads of single stages do not see that what stages of one server send passes one port. Here a
dynamic program places the stages of a contiguous pipeline one behind the other and counts, for
every member of the outermost level, the messages of microbatches that are inside on one side of a
cut and outside on the other; another one does so for the blocks of nested plans. Where neither has
a way within T, no plan takes T.

Beside these ports a stage has its work, its memory and its all-reduce on the best links there are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from partopt.cost.collectives import exposed_s
from partopt.cost.compiled import compiled
from partopt.cost.deadline import replicas_in_time, time_left_s
from partopt.cost.kernels import layers_of, most_in_flight, replica_counts, stage_cost, step_s
from partopt.cost.passes import NEVER
from partopt.cost.problem import Problem
from partopt.cost.ranges import between
from partopt.cost.tolerances import EPSILON
from partopt.planners.optimal.nested.probe import differs

# Q      servers: members of the outermost level that has several; G devices are in each
# r      replicas of a stage, x of which lie in a server
# [i, j) a stage, or a block of nested stages on m servers
# load   seconds for which the port of a server is busy, with what comes before and after

WORK = 50_000_000  # steps for one T: more take long
_STAGE = 20  # steps that it takes to look at a stage


class Servers(NamedTuple):
    """The outermost level of a topology that has several members."""

    devices: int  # G
    size: int  # Q
    message: NDArray[np.float64]  # seconds of a message over each cut, shape (N+1,)
    # of an all-reduce over n servers: seconds for a byte for which it holds their ports, 0 for one,
    # and for which it takes at the least, by its replicas too: shapes (Q+1,), (Q+1, P+1)
    ring: NDArray[np.float64]
    slope: NDArray[np.float64]
    left: NDArray[np.float64]  # what stages leave for it: `fill_left`


def refuter(problem: Problem) -> Callable[[float], bool]:
    """Whether no plan takes so many seconds, because of the ports of servers.

    Never, where the problem is large, the outermost level is a bus, or a server has one device.
    """
    levels = problem.topology.levels
    k = max((k for k, level in enumerate(levels, start=1) if level.size > 1), default=0)
    if k == 0 or levels[k - 1].bus or problem.topology.group_size(k - 1) == 1:
        return lambda T: False
    G, Q, N = problem.topology.group_size(k - 1), levels[k - 1].size, problem.chain.layers
    P, states = G * Q, 1 + G * Q * (G - 1)
    if N * P * (P * states + N * (P + _STAGE)) + Q * N**3 > WORK:
        return lambda T: False
    layers, counts, nests = layers_of(problem), replica_counts(problem), differs(problem)
    servers, load = _servers(problem, k), np.zeros((N + 1, P + 1, states))

    def refutes(T: float) -> bool:
        limit = T * (1 + EPSILON)
        fill_left(layers, limit, servers.left)
        return not any(
            carries_contiguous(layers, servers, limit, *each, load)
            or (nests and carries_nested(layers, servers, limit, *each))
            for each in counts
        )

    return refutes


def _servers(problem: Problem, k: int) -> Servers:
    """The members of level k. No algorithm moves less than a ring of servers, or one inside."""
    G, Q = problem.topology.group_size(k - 1), problem.topology.levels[k - 1].size
    N, P, network = problem.chain.layers, problem.topology.devices, problem.network
    message = problem.chain.traffic / float(network.rate[k - 1])
    message[[0, -1]] = 0.0
    n, r = np.maximum(np.arange(Q + 1), 1), np.maximum(np.arange(P + 1), 1)
    ring = 2 * (n - 1) / n * float(network.reduced_s[k - 1])
    inside = [
        network.reduced_s[h]
        for h, level in enumerate(problem.topology.levels[: k - 1])
        if level.size > 1
    ]
    slope = np.tile(ring[:, None], (1, P + 1))
    slope[1] = 2 * (r - 1) / r * min(inside)
    return Servers(G, Q, message, ring, slope, np.zeros((N + 1, N + 1, P + 1)))


@compiled()
def fill_left(layers, T, left):  # type: ignore[no-untyped-def]
    """Fill in how many seconds r replicas of [i, j) leave for their all-reduce in T.

    Below 0 where they have not the time or the memory. Shape (N+1, N+1, P+1).
    """
    left[:] = -1.0
    for i in range(len(left) - 1):
        for j in range(i + 1, len(left)):
            for mode in range(layers.first_mode, layers.last_mode + 1):
                stage = stage_cost(layers, i, j, mode)
                for r in range(1, left.shape[2]):
                    F = most_in_flight(layers, stage, r)
                    if replicas_in_time(layers, stage, T, F) > r:
                        continue
                    update = stage.tied_s + (step_s(layers, stage, r) if layers.M else 0.0)
                    seconds = time_left_s(layers, stage, T, F, r, 0.0) - update
                    left[i, j, r] = max(left[i, j, r], seconds)


@compiled()
def _exchanges(layers, servers, i, j, r, n):  # type: ignore[no-untyped-def]
    """Whether r replicas of layers [i, j) on n servers have the time for their all-reduce."""
    trained, gradients = between(layers.trained, i, j), layers.gradients[j] - layers.gradients[i]
    seconds = exposed_s(servers.slope[n, r] * trained, trained, gradients, layers.bucket)
    return seconds <= servers.left[i, j, r]


@compiled()
def carries_contiguous(layers, servers, T, least, most, load):  # type: ignore[no-untyped-def]
    """Whether the ports carry some contiguous pipeline, its stages of `least` to `most` replicas.

    `load[i, p]` are the least loads of the server that rank p lies in, with layers [0, i) before
    it: of the first kind where none of these are in that server, of others by the replicas of the
    last of them and how many are there (`_kind`).
    """
    N, P, G = load.shape[0] - 1, load.shape[1] - 1, servers.devices
    load[:], load[0, 0, 0] = np.inf, 0.0
    for i in range(N):
        for p in range(P):
            here, room = load[i, p], G - p % G
            _leave_idle(layers, servers, T, i, here, load[i, p + 1], room)
            for r in range(least, min(most, P - p) + 1):
                shared = _beside(layers, servers, here, i, min(r, room), r)
                for j in range(i + 1, N + 1 if min(here[0], shared) <= T else 0):
                    if _place(layers, servers, T, i, j, p, r, shared, load):
                        return True
    return False


@compiled()
def _kind(servers, r, x):  # type: ignore[no-untyped-def]
    """The kind of a server in which x of the r replicas of the last stage lie, and room is left."""
    return 1 + (r - 1) * (servers.devices - 1) + (x - 1)


@compiled()
def _of_kind(servers, kind):  # type: ignore[no-untyped-def]
    """The replicas of the last stage, and how many are there."""
    return (kind - 1) // (servers.devices - 1) + 1, (kind - 1) % (servers.devices - 1) + 1


@compiled()
def _leave_idle(layers, servers, T, i, here, there, room):  # type: ignore[no-untyped-def]
    """Leave a rank idle before layer i; the last of a server closes it."""
    for kind in range(len(here)):
        if here[kind] == np.inf:
            continue
        if room > 1:
            there[kind] = min(there[kind], here[kind])
        else:
            r, x = _of_kind(servers, kind)
            sent = _fewest(layers, x, r) * servers.message[i] if kind > 0 else 0.0
            if here[kind] + sent <= T:
                there[0] = 0.0


@compiled()
def _beside(layers, servers, here, i, y, r):  # type: ignore[no-untyped-def]
    """The least load of a server in which y of r replicas follow a stage that it holds too.

    Microbatches that both have there pass no port.
    """
    least = np.inf
    for kind in range(1, len(here)):
        if here[kind] < np.inf:
            q, x = _of_kind(servers, kind)
            apart = max(
                _fewest(layers, x, q) - _most(layers, y, r),
                _fewest(layers, y, r) - _most(layers, x, q),
                0.0,
            )
            least = min(least, here[kind] + apart * servers.message[i])
    return least


@compiled()
def _place(layers, servers, T, i, j, p, r, shared, load):  # type: ignore[no-untyped-def]
    """Put a stage on r ranks from p, where the ports carry it; whether it is the last.

    `shared` is the load of its first server with what other stages have there.
    """
    G, before, after = servers.devices, servers.message[i], servers.message[j]
    room, n = G - p % G, (p + r - 1) // G - p // G + 1
    if not _exchanges(layers, servers, i, j, r, n):
        return False
    own, ring = _own_s(layers, servers, i, j, r, n)
    first = load[i, p, 0] + own + _fewest(layers, min(r, room), r) * before
    first = min(first, shared + ring)
    closed, x = r >= room, r if r < room else (r - room) % G
    last = own + _fewest(layers, x, r) * before if closed else first
    if closed and first + _fewest(layers, room, r) * after > T:
        return False
    if r - room >= G and own + _fewest(layers, G, r) * (before + after) > T:
        return False
    if x > 0 and last > T:
        return False
    kind, last = (0, 0.0) if x == 0 else (_kind(servers, r, x), last)
    load[j, p + r, kind] = min(load[j, p + r, kind], last)
    return j == len(layers.cuts) - 1


@compiled(allocates=True)
def carries_nested(layers, servers, T, least, most):  # type: ignore[no-untyped-def]
    """Whether the ports carry some nested plan, its stages of `least` to `most` replicas."""
    N, G, Q = len(layers.cuts) - 1, servers.devices, servers.size
    used = np.full(N + 1, NEVER)  # servers for layers [0, j), at the least
    used[0] = 0
    needs = np.full((Q + 1, N + 1, N + 1), NEVER)
    for m in range(1, Q + 1):
        _fill_inside(layers, servers, needs[m], m, least, most)
    for j in range(1, N + 1):
        for i in range(j):
            for m in range(1, Q - used[i] + 1):
                sent = _fewest(layers, 1, m) * (servers.message[i] + servers.message[j])
                own, _ = _own_s(layers, servers, i, j, m * G, m)
                if needs[m, i, j] <= G and own + sent <= T:
                    used[j] = min(used[j], used[i] + m)
    return used[N] <= Q


@compiled()
def _fill_inside(layers, servers, needs, m, least, most):  # type: ignore[no-untyped-def]
    """The fewest devices of each of m servers that hold layers [i, j), NEVER where none do."""
    N = len(needs) - 1
    for i in range(N - 1, -1, -1):
        for k in range(i + 1, N + 1):
            x = -(-least // m)
            while x <= servers.devices and not _exchanges(layers, servers, i, k, m * x, m):
                x += 1
            if x > servers.devices or m * x > most:
                continue
            needs[i, k] = min(needs[i, k], x)
            for j in range(k + 1, N + 1):
                needs[i, j] = min(needs[i, j], x + needs[k, j])


@compiled()
def _fewest(layers, x, r):  # type: ignore[no-untyped-def]
    """Microbatches that x of r replicas get, at the least; a share of one, asynchronous."""
    return x * float(layers.M // r) if layers.M else x / r


@compiled()
def _most(layers, x, r):  # type: ignore[no-untyped-def]
    """Microbatches that x of r replicas get, at the most; a share of one, asynchronous."""
    return x * float(-(-layers.M // r)) if layers.M else x / r


@compiled()
def _own_s(layers, servers, i, j, r, n):  # type: ignore[no-untyped-def]
    """Seconds in which the port of a server carries no messages, for layers [i, j) alone.

    They are on r devices of n servers, and the first that this one holds. The second number is for
    a server that holds others before them. Asynchronous: the all-reduce, by the microbatch.

    In an iteration, what comes in are activations for i and later ones, and gradients for j - 1 and
    later ones; what goes out, the other way round. Either takes as long, or their mean is known.
    After the last of them the layers before have their backward, and the gradients their all-reduce
    in what time is left.
    """
    ring = servers.ring[n] * between(layers.trained, i, j)
    if layers.M == 0:
        return ring / r, ring / r
    back_i, back_j = layers.tail[i] - layers.message[i], layers.tail[j] - layers.message[j]
    got = layers.forward[i] + max(back_j, ring)
    sent = layers.forward[j] + max(back_i, ring)
    return min(got, sent) if layers.lopsided else max(got, sent), 0.0
