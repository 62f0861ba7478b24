"""Where the stages of contiguous and nested plans may stand, and what may stand behind what.

Of places that are alike one is enough: a simulation is the same where all ranks of a plan are moved
and keep their order and the levels at which they part. So on one level no rank between two stages
need be idle; on several a contiguous stage also begins later, where its ranks then part elsewhere.
"""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from partopt.cost.compiled import compiled
from partopt.cost.problem import Problem
from partopt.documents.topology import Topology
from partopt.planners.optimal.nested.probe import differs

# r      replicas of a stage; replica k of a place is the k-th of its ranks
# o, m   of a nested stage, at each level: its first member, and how many

LIMIT = 1000  # places: more take long
Integers = NDArray[np.int64]


class Places(NamedTuple):
    """Ranks that a stage may have, n times, and what may follow.

    Those that may stand behind place q are `next[first[q] : first[q + 1]]`, and what may be the
    first of a pipeline stands behind place n.
    """

    ranks: Integers  # in the order of replicas, shape (n, P); 0 beyond them
    replicas: Integers  # shape (n,)
    room: Integers  # ranks that are left for the stages behind, shape (n,)
    ring: NDArray[np.float64]  # s for a byte that the replicas reduce, shape (n,)
    latency: NDArray[np.float64]  # s, of the same
    first: Integers  # shape (n + 2,)
    next: Integers
    # the least level at which the replicas of one microbatch part, of each in `next`; 0 of a first
    gap: Integers
    # s for a byte over the cut between, of all microbatches: how long it keeps a port of each
    # member busy, where its replicas send activations and where they get them; shape (pairs, ports)
    sent: NDArray[np.float64]
    got: NDArray[np.float64]
    links: Integers  # of each level, shape (L,)


class _Family(NamedTuple):
    """The places of one family."""

    ranks: list[list[int]]
    room: Integers
    starts: NDArray[np.bool_]  # shape (n,)
    follows: NDArray[np.bool_]  # whether the second stands behind the first, shape (n, n)


def places_of(problem: Problem) -> Places | None:
    """The places on the topology of a problem; None where there are too many."""
    topology = problem.topology
    P, sizes = topology.devices, [level.size for level in topology.levels if level.size > 1]
    nested = int(np.prod([size * (size + 1) // 2 for size in sizes])) if differs(problem) else 0
    if P * (P + 1) // 2 + nested > LIMIT:
        return None
    found = [_contiguous(topology)] + ([_nested(P, sizes)] if nested else [])
    ranks = [own for family in found for own in family.ranks]
    n, at = len(ranks), 0
    follows = np.zeros((n + 1, n), dtype=np.bool_)
    for family in found:
        own = slice(at, at + len(family.ranks))
        follows[own, own], follows[n, own] = family.follows, family.starts
        at += len(family.ranks)
    before, behind = np.nonzero(follows)
    table = np.array([own + [0] * (P - len(own)) for own in ranks], dtype=np.int64)
    replicas = np.array([len(own) for own in ranks], dtype=np.int64)
    reduced = [problem.allreduce_over(own) for own in ranks]
    network, M = problem.network, problem.microbatches
    links = np.array([level.links for level in topology.levels], dtype=np.int64)
    sent, got = _busy(table, replicas, before, behind, network, links, M)
    return Places(
        ranks=table,
        replicas=replicas,
        room=np.concatenate([family.room for family in found]),
        ring=np.array([each.slope for each in reduced]),
        latency=np.array([each.latency_s for each in reduced]),
        first=np.searchsorted(before, np.arange(n + 2)),
        next=behind,
        gap=_gaps(table, replicas, before, behind, problem.network.group),
        sent=sent,
        got=got,
        links=links,
    )


def _contiguous(topology: Topology) -> _Family:
    """Consecutive ranks: the first behind what is before, or any at which they part elsewhere."""
    P = topology.devices
    inner = next((level.size for level in topology.levels if level.size > 1), 1)
    runs = [range(a, b) for a in range(P) for b in range(a + 1, P + 1)]
    first, end = np.array([run.start for run in runs]), np.array([run.stop for run in runs])
    parted = (first - 1) // inner != (end - 1) // inner
    follows = (first == end[:, None]) | ((first > end[:, None]) & parted)
    return _Family([list(run) for run in runs], P - end, (first == 0) | parted, follows)


def _nested(P: int, sizes: list[int]) -> _Family:
    """Copies on members of every level: behind those of one, within the same of all further out."""
    each = [[(o, m) for o in range(size) for m in range(1, size - o + 1)] for size in sizes]
    pairs = np.array(list(product(*each)), dtype=np.int64)  # shape (n, levels, 2)
    o, m = pairs[:, :, 0], pairs[:, :, 1]
    group, ranks = np.concatenate([[1], np.cumprod(sizes)]), []
    for own in pairs.tolist():
        inside = [0]
        for k, (start, members) in enumerate(own):
            inside = [
                (start + copy) * int(group[k]) + rank for rank in inside for copy in range(members)
            ]
        ranks.append(inside)
    room, follows = np.zeros(len(ranks), dtype=np.int64), np.zeros((len(ranks),) * 2, np.bool_)
    for k, size in enumerate(sizes):
        room += (size - o[:, k] - m[:, k]) * group[k] * np.prod(m[:, k + 1 :], axis=1)
        alike = (pairs[:, None, k + 1 :] == pairs[None, :, k + 1 :]).all(axis=(2, 3))
        begins = (o[:, :k] == 0).all(axis=1)
        follows |= alike & begins & (o[:, k] == (o[:, k] + m[:, k])[:, None])
    return _Family(ranks, room, (o == 0).all(axis=1), follows)


@compiled(allocates=True)
def _gaps(ranks, replicas, before, behind, group):  # type: ignore[no-untyped-def]
    """The least level at which two replicas of one microbatch part, of each pair of places."""
    gaps = np.zeros(len(before), np.int64)
    for pair in range(len(before)):
        q, p = before[pair], behind[pair]
        if q == len(ranks):
            continue
        least = len(group)
        for g in range(replicas[q] * replicas[p]):
            level = level_between(group, ranks[q, g % replicas[q]], ranks[p, g % replicas[p]])
            least = min(least, level)
        gaps[pair] = least
    return gaps


@compiled()
def level_between(group, one, other):  # type: ignore[no-untyped-def]
    """The level at which two ranks part."""
    k = 0
    while one // group[k] != other // group[k]:
        k += 1
    return k


@compiled(allocates=True)
def _busy(ranks, replicas, before, behind, network, links, M):  # type: ignore[no-untyped-def]
    """`Places.sent` and `Places.got`. A bus carries the gradients too."""
    group, L = network.group, len(network.bus)
    first = np.zeros(L + 1, np.int64)
    for k in range(L):
        first[k + 1] = first[k] + group[L] // group[k + network.bus[k]]
    sent, got = np.zeros((len(before), first[L])), np.zeros((len(before), first[L]))
    for pair in range(len(before)):
        q, p = before[pair], behind[pair]
        for g in range(M if q < len(ranks) else 0):
            one, other = ranks[q, g % replicas[q]], ranks[p, g % replicas[p]]
            k = level_between(group, one, other) - 1
            seconds = 1 / (network.bandwidth[k] * links[k])
            if network.bus[k]:
                sent[pair, first[k] + one // group[k + 1]] += 2 * seconds
            else:
                sent[pair, first[k] + one // group[k]] += seconds
                got[pair, first[k] + other // group[k]] += seconds
    return sent, got
