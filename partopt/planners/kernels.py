"""The loops over all ranges of layers in `partopt.planners`, compiled.

Tables are of every range [i, j), shape (N+1, N+1), infinite where it is no stage that fits. A range
may also have too little `room`: less than the `least` that its place in a plan asks for.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from partopt.cost.compiled import compiled

Floats = NDArray[np.float64]


class Ranges(NamedTuple):
    """Of every range as a stage, in the letters of `partopt.planners.costs`; (N+1, N+1)."""

    f: Floats
    C: Floats
    p: Floats
    W: Floats
    last: Floats  # the last backward's part beside which gradients are exchanged
    step: Floats  # the optimizer's step, where nobody shares it
    room: Floats  # F


class Boundaries(NamedTuple):
    """Of every boundary of layers; (N+1,)."""

    head: Floats  # seconds before the first microbatch comes
    tail: Floats  # behind the last gradient that leaves
    behind: Floats  # R of what comes behind, without messages
    traffic: Floats  # bytes of a microbatch and its gradient
    # for which a message before and behind a stage keeps its device from computing
    hold_before: Floats
    hold_behind: Floats
    came: Floats  # one message before a stage takes
    away: Floats  # a message behind a stage and its gradient take


class Replicated(NamedTuple):
    """The replicas of a stage and their exchange of gradients."""

    r: int
    sharers: int  # of the optimizer's state
    slope: float  # of the exchange, seconds a byte
    latency_s: float
    depth: int  # stages of the plan, where backwards are in two parts


class Rules(NamedTuple):
    """What a problem says of all its stages."""

    M: int  # 0 for an asynchronous schedule
    bucket_bytes: float
    blocks: bool  # devices wait for their exchanges
    limited: bool  # memory is
    split: bool  # backwards are in two parts


class Servers(NamedTuple):
    """What stages cost the ports of servers, which are the members of a level."""

    devices: int  # of a server
    # seconds a microbatch: its messages over a cut, shape (N+1,); and what a server pays at the
    # least, before its stages and behind them, for a share of the split stages there
    cut_s: Floats
    before_s: Floats
    behind_s: Floats
    # the share of the microbatches that a split stage has outside of a server, at the least, by how
    # many of its devices are for other stages
    outside: Floats


class StageTable(NamedTuple):
    """Of every range as a stage on some places of a plan: its seconds where it has room."""

    seconds: Floats
    room: Floats
    least: float  # of the room; 0 where the seconds are infinite without it


@compiled()
def fill_seconds(seconds, ranges, boundaries, ports, replicated, rules):
    """Fill in the seconds of a microbatch in a stage of every range; see `StageCosts.table`.

    `ports` are rows of `StageCosts.ports`, shape (ports, 3).
    """
    N, M, r = len(boundaries.traffic) - 1, rules.M, replicated.r
    n = -(-M // r)
    seconds[:] = np.inf
    for i in range(N):
        for j in range(i + 1, N + 1):
            if ranges.room[i, j] < 1:
                continue
            C, W, gradients = ranges.C[i, j], ranges.W[i, j], 0.0
            if r > 1:
                exchange = replicated.slope * W + replicated.latency_s
                later = 1.0 / max(1.0, np.ceil(W / rules.bucket_bytes))
                gradients = max(exchange * later, exchange - ranges.last[i, j] * (1.0 - later))
            messages = 2 * (boundaries.hold_before[i] + boundaries.hold_behind[j])
            trip = C + boundaries.behind[j] + boundaries.away[j]
            if M == 0:
                blocking = C + gradients if rules.blocks else gradients
                slowest = max(C + messages, blocking) / r
                if rules.limited:  # Little's law
                    slowest = max(slowest, trip / (ranges.room[i, j] * r))
            else:
                # the first message that comes in and the last that leaves may keep nothing waiting
                work = n * C + (n - 1) * messages
                depth = replicated.depth if rules.split else 0
                work = max(work, first_to_last_s(ranges, i, j, n, trip - C, depth))
                # where backwards are whole, the last gradient leaves when all the work is done
                back = 0.0 if rules.split else boundaries.tail[i] + boundaries.came[i]
                update = gradients + ranges.step[i, j] / replicated.sharers
                slowest = boundaries.head[i] + boundaries.came[i] + work + max(update, back)
                slowest /= M
            for k in range(len(ports)):
                sent = ports[k, 0] * boundaries.traffic[i] + ports[k, 1] * boundaries.traffic[j]
                slowest = max(slowest, sent + (ports[k, 2] * W if M == 0 else 0.0))
            seconds[i, j] = slowest


@compiled(inline=True)
def first_to_last_s(ranges, i, j, n, R, depth):
    """Seconds from the first forward of n microbatches to the last backward, at the least.

    They may be less than what the n take to compute. `depth` stages have backwards in two parts.
    """
    f, C, p = ranges.f[i, j], ranges.C[i, j], ranges.p[i, j]
    if depth:  # no more forwards precede the first gradient than there are stages
        return f + R + n * C - min(n, depth) * f
    F = min(ranges.room[i, j], float(n))
    trips = np.ceil(n / F) * (f + R + p)
    if n > F:  # F forwards or a round trip, one of each in turn, F backwards or a round trip
        return max(trips, max(F * f, f + R) + (n - F) * C + max(F * (C - f), R + p))
    return max(trips, f + R + p + (n - 1) * (C - f), n * f + R + p)


@compiled()
def relax(table, taken, behind, T, choice, most, suffix):
    """Take in a stage wherever it makes the slowest stage of plans faster.

    `taken` are its places and whether it recomputes. `behind` and T are the slowest stages of plans
    on the places behind the stage and on those with them, by stages and first layer, shape
    (S+1, N+1); `choice` says by which first stage T is reached: its end and what is taken. Plans
    have at most `most` stages behind this one, and `suffix` has room for a number of every layer.
    """
    seconds, room, least = table
    N = seconds.shape[0] - 1
    for i in range(N):
        # the fastest stage of all that end at j or later: nothing is gained beyond that
        suffix[N] = seconds[i, N] if room[i, N] >= least else np.inf
        for j in range(N - 1, i, -1):
            suffix[j] = suffix[j + 1]
            if room[i, j] >= least:
                suffix[j] = min(suffix[j], seconds[i, j])
        if suffix[i + 1] == np.inf:
            continue
        for s in range(most):
            best, chosen = T[s + 1, i], -1
            for j in range(i + 1, N + 1):
                if suffix[j] >= best:
                    break
                slowest = max(seconds[i, j], behind[s, j])
                if slowest < best and room[i, j] >= least:
                    best, chosen = slowest, j
            if chosen >= 0:
                T[s + 1, i] = best
                choice[0, s + 1, i], choice[1, s + 1, i] = chosen, taken[0]
                choice[2, s + 1, i] = taken[1]


@compiled()
def cheapen(rooms, least, price, total):
    """Find the least price of stages from every layer on, of stages of some kinds.

    A stage of kind k costs `price[k]` and has `least[k]` of any of its `rooms[k]`, shape (kinds,
    modes, N+1, N+1). `total` is infinite but for 0 at the end.
    """
    kinds, modes, N = rooms.shape[0], rooms.shape[1], rooms.shape[2] - 1
    for i in range(N - 1, -1, -1):
        for k in range(kinds):
            for mode in range(modes):
                for j in range(i + 1, N + 1):
                    if rooms[k, mode, i, j] >= least[k]:
                        total[i] = min(total[i], price[k] + total[j])


@compiled()
def extend(table, mode, begins, ends, slowest, longer, begun):
    """Find the least of the slowest stages with one more stage, by where that ends.

    `slowest` is of the stages before it, by where these end; those ends lie in `begins` and the
    stage's in `ends`, first and one behind the last. `begun` says where it begins, and its `mode`.
    """
    seconds, room, least = table
    for j in range(ends[0], ends[1]):
        k = j - ends[0]
        for i in range(begins[0], min(j, begins[1])):
            if room[i, j] >= least:
                value = max(slowest[i - begins[0]], seconds[i, j])
                if value < longer[k]:
                    longer[k], begun[0, k], begun[1, k] = value, i, mode


@compiled()
def fewest_servers(alone, spread, servers, T, share, joined, rest):
    """The fewest servers for a chain, of stages in one of them or split over several.

    A stage in one has `alone` devices of it. The port of a server counts for `share` of it, its
    devices for the others: `spread` is what a split stage takes of all servers. Work arrays:
    `joined` of stages on so many devices of a server, and split ones between, which are counted,
    shape (2, N+1, d+1, N+1); `rest` of what comes behind a cut, shape (3, N+1).
    """
    N, d, port = len(servers.cut_s) - 1, servers.devices, share / T
    joined[:], rest[:] = np.inf, np.inf
    # behind one of a server others of another server, behind a split one those, or a split one
    rest[0, N] = rest[2, N] = 0.0
    for i in range(N - 1, -1, -1):
        join_stages(alone, spread, servers, port, joined, i)
        for j in range(i + 1, N + 1):
            rest[2, i] = min(rest[2, i], spread[i, j] + min(rest[1, j], rest[2, j]))
            for a in range(1, d + 1):
                full, between = a == d, joined[0, i, a, j]
                if between == np.inf or (full and between > 0):  # a full one has no split stage
                    continue
                out = servers.outside[a]
                for before in range(2):  # 1: split stages
                    for behind in range(2):
                        leaves = (out if before else 1.0) * servers.cut_s[i]
                        comes = (out if behind else 1.0) * servers.cut_s[j]
                        least = leaves + comes
                        least += before * (1 - out) * servers.before_s[i]
                        least += behind * (1 - out) * servers.behind_s[j]
                        if least > T:
                            continue
                        taken = port * (leaves + comes) + (1 - share) * a / d
                        # the servers of split stages pay for these messages too
                        others = port * (before * leaves + behind * comes)
                        total = (1.0 if full else taken) + others + between
                        total += rest[2 if behind else 0, j]
                        rest[before, i] = min(rest[before, i], total)
    return min(rest[1, 0], rest[2, 0])


@compiled(inner=True)
def join_stages(alone, spread, servers, port, joined, i):
    """Fill in what is joined from layer i on: a stage in the server first (0), or a split one."""
    N, d = len(servers.cut_s) - 1, servers.devices
    for j in range(i + 1, N + 1):
        if alone[i, j] <= d:
            r = int(alone[i, j])
            joined[0, i, r, j] = 0.0
            for a in range(1, d + 1 - r):
                messages = 2 * port * servers.cut_s[j] * servers.outside[a + r]
                for k in range(j + 1, N + 1):
                    more = min(joined[0, j, a, k], joined[1, j, a, k] + messages)
                    joined[0, i, a + r, k] = min(joined[0, i, a + r, k], more)
        if spread[i, j] < np.inf:
            for a in range(1, d):
                messages = 2 * port * servers.cut_s[j] * servers.outside[a]
                for k in range(j + 1, N + 1):
                    more = min(joined[1, j, a, k], joined[0, j, a, k] + messages)
                    joined[1, i, a, k] = min(joined[1, i, a, k], spread[i, j] + more)
