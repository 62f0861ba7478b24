"""Seconds that no plan goes below, whatever its stages and its ranks.

Every stage is given the best that any devices could give it: the fastest all-reduce of so many
ranks, all links of a device at once, the quickest level for its messages, all microbatches in
flight that fit. The least that the slowest stage takes is then found by bisection: for a limit of
seconds, devices are counted from the end of the chain, the fewest behind every cut.

Then servers are counted, which are the members of a level. A stage lies in one of them, or is split
over several, which exchange its gradients through their ports. At the cuts around the stages of one
server its port carries messages. Of a limit of seconds a server has as much for its devices and for
its port: no plan keeps to it if that takes more servers than there are (`kernels.fewest_servers`).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from math import inf, prod

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from partopt.cost.collectives import algorithm_number, byte_in_level_s, choose
from partopt.cost.messages import port_rates
from partopt.cost.problem import EXCHANGE, FREE, NONE, Problem, certify
from partopt.documents.plan import Plan, seconds_of
from partopt.planners.costs import StageCosts, Table
from partopt.planners.kernels import Servers, fewest_servers
from partopt.schedules import schedule
from partopt.units import format_bytes

# P, M, N   devices, microbatches of an iteration, layers
# d         devices of a server
# r         replicas of a stage

PROOF = "the slowest stage of no plan is faster"
NUMBERS = 6e7  # in the arrays of all replicas: half a gigabyte
STEPS = 2e7  # d N^3 of servers that are counted, at most
PORT_SHARES = (0.3, 0.15, 0.0, 0.5)  # of what a server has, that of its port; any proves
NEAR = 2e-3  # relative: how far a limit is bisected
ROUNDING = 1e-9  # relative


def proved_s(problem: Problem, lower_s: float | None = None) -> float:
    """`lower_bound_s`, which may be known, or less where what replicas share is open."""
    others = [problem.with_shard(shard) for shard in problem.shards if shard != problem.shard]
    known_s = lower_bound_s(problem) if lower_s is None else lower_s
    return min([known_s, *map(lower_bound_s, others)])


def lower_bound_s(problem: Problem) -> float:
    """Seconds of a microbatch that no plan goes below.

    Where the arrays would be too large: those of all devices computing all the time.
    """
    P, N = problem.topology.devices, len(problem.boundaries()) - 1
    computing_s = float(problem.chain.busy_prefix(problem.all_recompute)[-1]) / P
    sizes = [1] if problem.request.replication == NONE else range(1, P + 1)
    if len(sizes) * (N + 1) ** 2 > NUMBERS:
        return computing_s
    costs, tables = StageCosts(problem.coarsen()), dict[int, list[Table]]()
    bounds = list[tuple[float, list[int]]]()
    for r in sizes:
        problem.progress("bound", len(tables), len(sizes))
        tables[r] = _least(costs, r)
    fastest = {r: np.minimum.reduce(tables[r]) for r in sizes}
    for allowed in [[r] for r in sizes] if costs.even else [list(sizes)]:
        problem.progress("bound", len(bounds), len(sizes))
        bounds.append((_slowest_stage_s(fastest, allowed, P), allowed))
    least_s = inf
    for seconds, allowed in sorted(bounds):
        if seconds >= least_s:
            break
        raised_s = max(computing_s, seconds)
        for k in range(2, len(problem.topology.levels) + 1):
            raised_s = _enough_servers_s(costs, tables, allowed, k, raised_s)
        least_s = min(least_s, raised_s)
    return max(computing_s, least_s)


def _least(costs: StageCosts, r: int) -> list[Table]:
    """Seconds of a stage with r replicas, at the least, by the outermost level at which they part.

    Of none, 0, and of every level.
    """
    topology, P = costs.problem.topology, costs.problem.topology.devices
    rate = sum(port_rates(topology))
    ports = ((1 / (r * rate), 1 / (r * rate), 0.0),) if 0 < rate < inf else ()
    depth, held = min(costs.N, P // r), costs.least_in_flight(r, 0, 1)
    limited = costs.problem.memory_bytes is not None
    every = [np.full_like(costs.W, inf) for _ in range(len(topology.levels) + 1)]
    for level, fastest in _fastest_allreduces(costs.problem, r).items():
        for again in costs.modes:
            seconds = costs.table(r, ports, *fastest, (1, 1), again, depth)
            if limited and held > 1:
                seconds = np.where(costs.room(r, again) >= held, seconds, inf)
            every[level] = np.minimum(every[level], seconds)
    return every


def _fastest_allreduces(problem: Problem, r: int) -> dict[int, tuple[float, float]]:
    """The least seconds a byte, and the least latency, of all-reduces over any r ranks.

    By the outermost level at which these part. They have n_k members of a component of level k at
    most, and the product of all n_k is r where they lie evenly, or more.
    """
    topology, found = problem.exchange_topology, dict[int, tuple[float, float]]()
    levels = topology.levels
    for inner in product(*(range(1, min(r, level.size) + 1) for level in levels[:-1])):
        outer = -(-r // prod(inner))
        if outer > levels[-1].size:
            continue
        members = list(enumerate(zip(levels, (*inner, outer), strict=True), start=1))
        crossed = [(level, n) for _, (level, n) in members if n > 1]
        outermost = max((k for k, (_, n) in members if n > 1), default=0)
        byte_s = [byte_in_level_s(level, n) for level, n in crossed]
        delays = [level.allreduce_latency_s for level, _ in crossed]
        in_turn = delay = inf
        if prod(inner) * outer == r:
            in_turn = sum(2 * (n - 1) / n * s for (_, n), s in zip(crossed, byte_s, strict=True))
            delay = sum(2.0 * (n - 1) * s for (_, n), s in zip(crossed, delays, strict=True))
        _, slope, latency_s = choose(
            algorithm_number(topology),
            r,
            max(byte_s, default=0.0),
            max(delays, default=0.0),
            float(in_turn),
            float(delay),
        )
        best_slope, best_s = found.get(outermost, (inf, inf))
        found[outermost] = min(best_slope, float(slope)), min(best_s, float(latency_s))
    return found


def _slowest_stage_s(tables: dict[int, Table], sizes: list[int], P: int) -> float:
    """The least that the slowest stage takes, of stages with so many replicas, on P devices."""
    stack = np.stack([tables[r] for r in sizes])
    known = np.unique(stack[np.isfinite(stack)])  # it is one of these
    low, high, N = 0, len(known), stack.shape[1] - 1
    while low < high:
        middle = (low + high) // 2
        within = stack <= known[middle]
        devices = np.where(within.any(axis=0), np.array(sizes)[within.argmax(axis=0)], P + 1)
        fewest = np.zeros(N + 1)
        for i in range(N - 1, -1, -1):
            fewest[i] = (devices[i, i + 1 :] + fewest[i + 1 :]).min()
        low, high = (low, middle) if fewest[0] <= P else (middle + 1, high)
    return float(known[low]) if low < len(known) else np.inf


def _enough_servers_s(
    costs: StageCosts, tables: dict[int, list[Table]], sizes: list[int], k: int, low_s: float
) -> float:
    """`low_s`, or more seconds for which the members of level k are too few."""
    problem, N, M = costs.problem, costs.N, costs.M
    topology, levels = problem.topology, problem.exchange_topology.levels[k - 1 :]
    P, d, rates = topology.devices, topology.group_size(k - 1), port_rates(topology)[k - 1 :]
    if not 1 < d < P or not 0 < sum(rates) < inf or d * N**3 > STEPS or low_s == inf:
        return low_s
    # of a byte that is exchanged, in all ports outward
    byte_s = min(
        rate * byte_in_level_s(level, 1) for rate, level in zip(rates, levels, strict=True) if rate
    ) / sum(rates)
    cut_s = costs.traffic / sum(rates)
    cut_s[[0, -1]] = 0.0
    # a server that has a share of a split stage exchanges no less than that share of its gradients
    exchanged = costs.W[0] * byte_s / (M or d - 1)
    before_s = np.minimum.accumulate(cut_s - exchanged) + exchanged
    behind_s = np.minimum.accumulate((cut_s + exchanged)[::-1])[::-1] - exchanged
    outside = np.array([_outside(d - a, P, M) for a in range(d + 1)])
    servers = Servers(d, cut_s, before_s, behind_s, outside)
    joined, rest = np.empty((2, N + 1, d + 1, N + 1)), np.empty((3, N + 1))
    inside_s = [(r, np.minimum.reduce(tables[r][:k])) for r in reversed(sizes) if r <= d]
    split_s = [(r, np.minimum.reduce(tables[r][k:])) for r in sizes if r > 1]

    def suffice(seconds: float) -> bool:
        T = seconds * (1 + ROUNDING)
        alone = np.full((N + 1, N + 1), inf)
        for r, stage_s in inside_s:
            alone[stage_s <= T] = r
        within, fewer = list[tuple[int, NDArray[np.bool_]]](), np.zeros((N + 1, N + 1), np.bool_)
        for r, stage_s in split_s:
            fits = (stage_s <= T) & ~fewer
            if M is not None:  # more replicas exchange no less in an iteration
                fewer |= fits
            if fits.any():
                within.append((r, fits))
        for share in PORT_SHARES:
            spread = np.full((N + 1, N + 1), inf)
            for r, fits in within:
                # n servers exchange 2 (n - 1) times the gradients at the least
                exchange_s = 2 * (max(2, -(-r // d)) - 1) * byte_s / (M or r)
                taken = share / T * exchange_s * costs.W + (1 - share) * r / d
                np.minimum(spread, taken, out=spread, where=fits)
            needed = fewest_servers(alone, spread, servers, T, share, joined, rest)
            if needed > P // d * (1 + ROUNDING):
                return False
        return True

    return _bisect(suffice, low_s)


def _outside(most: int, P: int, M: int | None) -> float:
    """The least share of the microbatches outside of a server that has `most` devices for a stage.

    The stage has replicas outside too.
    """
    return min(
        (r - min(most, r - 1)) * (1 / r if M is None else M // r / M) for r in range(2, P + 1)
    )


def _bisect(suffice: Callable[[float], bool], low_s: float) -> float:
    """The most seconds from `low_s` on that do not suffice, nearly; `low_s` if that does."""
    high_s, step = low_s, NEAR
    while not suffice(high_s):
        low_s, high_s, step = high_s, high_s * (1 + step), 4 * step
    while high_s > low_s * (1 + NEAR):
        middle_s = (low_s + high_s) / 2
        low_s, high_s = (low_s, middle_s) if suffice(middle_s) else (middle_s, high_s)
    return low_s


def certify_simulated(plan: Plan, lower_s: float, problem: Problem) -> Plan:
    """The simulated plan with what the bound says of it; nothing where it does not fit.

    `lower_s` is that of an iteration or, asynchronous, of a microbatch.
    """
    if not plan.fits:
        return structs.replace(plan, certificate=None)
    certificate = certify(seconds_of(plan), lower_s, scope(problem), PROOF)
    return structs.replace(plan, certificate=certificate)


def scope(problem: Problem) -> str:
    """The plans of which the bound speaks, in words."""
    entry, chain, M = schedule(problem.schedule), problem.chain, problem.microbatches
    limit, request = problem.memory_bytes, problem.request
    again = "all recomputed" if problem.recompute_by_default else ""
    if problem.recompute_per_stage and limit is not None:
        blocks = "all blocks of a stage recomputed or none"
        again = blocks if problem.engine.recomputes_blocks else "stages recompute or not"
    elif problem.first:
        again = f"the first {problem.first} blocks of a stage recomputed"
    words = [
        f"plans under {problem.schedule}",
        "any warm-up" if entry.takes_warmup else "",
        f"{'' if M is None else f'{M} '}microbatches of {chain.microbatch_size}",
        "" if limit is None else f"{format_bytes(limit)} a device",
        "" if request.stages is None else f"{request.stages} stages",
        "" if request.replication == FREE else f"replication {request.replication}",
        again,
        "whatever replicas share" if request.any_shard else "",
        "tied layers together" if request.tied != EXCHANGE and chain.tied else "",
        "serial transfers" if problem.waits else "",
        "blocking all-reduces" if problem.blocks else "",
        _places_to_cut(problem),
    ]
    return ", ".join(word for word in words if word)


def _places_to_cut(problem: Problem) -> str:
    """How many there are, where there are fewer than layers in the profile, in words."""
    places = len(problem.boundaries()) - 2
    fewer = problem.profile and places < len(problem.profile.layers) - 1
    return f"{places} places to cut" if fewer else ""
