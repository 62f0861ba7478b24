"""Seconds that no plan goes below, whatever its stages and its ranks.

Every stage is given the best that any devices could give it: the fastest all-reduce of so many
ranks, all links of a device at once, the quickest level for its messages, all microbatches in
flight that fit. The least that the slowest stage takes is then found by bisection: for a limit of
seconds, devices are counted from the end of the chain, the fewest behind every cut.
"""

from __future__ import annotations

from itertools import product
from math import inf, prod

import numpy as np
from msgspec import structs

from partopt.cost.collectives import algorithm_number, byte_in_level_s, choose
from partopt.cost.messages import port_rates
from partopt.cost.problem import EXCHANGE, FREE, NONE, Problem, certify
from partopt.documents.plan import Plan, seconds_of
from partopt.planners.costs import StageCosts, Table
from partopt.schedules import schedule
from partopt.units import format_bytes

PROOF = "the slowest stage of no plan is faster"
NUMBERS = 6e7  # in the arrays of all replicas: half a gigabyte


def lower_bound_s(problem: Problem) -> float:
    """Seconds of a microbatch that no plan goes below.

    Where the arrays would be too large: those of all devices computing all the time.
    """
    P, N = problem.topology.devices, len(problem.boundaries()) - 1
    computing_s = float(problem.chain.busy_prefix(problem.all_recompute)[-1]) / P
    sizes = [1] if problem.request.replication == NONE else range(1, P + 1)
    if len(sizes) * (N + 1) ** 2 > NUMBERS:
        return computing_s
    costs, tables, slowest_s = StageCosts(problem.coarsen()), dict[int, Table](), list[float]()
    for r in sizes:
        problem.progress("bound", len(tables), len(sizes))
        tables[r] = _least(costs, r)
    for allowed in [[r] for r in sizes] if costs.even else [list(sizes)]:
        problem.progress("bound", len(slowest_s), len(sizes))
        slowest_s.append(_slowest_stage_s(tables, allowed, P))
    return max(computing_s, min(slowest_s))


def _least(costs: StageCosts, r: int) -> Table:
    """Seconds of a stage with r replicas, at the least."""
    topology, P = costs.problem.topology, costs.problem.topology.devices
    rate = sum(port_rates(topology))
    ports = ((1 / (r * rate), 1 / (r * rate), 0.0),) if 0 < rate < inf else ()
    fastest, depth = _fastest_allreduce(costs.problem, r), min(costs.N, P // r)
    seconds = [costs.table(r, ports, *fastest, (1, 1), again, depth) for again in costs.modes]
    least: Table = np.minimum.reduce(seconds)
    return least


def _fastest_allreduce(problem: Problem, r: int) -> tuple[float, float]:
    """The least seconds a byte, and the least latency, of all-reduces over any r ranks.

    These have n_k members of a component of level k at most, and the product of all n_k is r where
    they lie evenly, or more.
    """
    topology, slopes, latencies = problem.exchange_topology, [], []
    levels = topology.levels
    for inner in product(*(range(1, min(r, level.size) + 1) for level in levels[:-1])):
        outer = -(-r // prod(inner))
        if outer > levels[-1].size:
            continue
        crossed = [(level, n) for level, n in zip(levels, (*inner, outer), strict=True) if n > 1]
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
        slopes.append(float(slope))
        latencies.append(float(latency_s))
    return min(slopes), min(latencies)


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
