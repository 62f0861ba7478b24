"""Where to cut for a grid: what its devices compute is balanced, within what their memory holds."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from partopt.cost.compiled import compiled
from partopt.cost.flight import chunks_in_flight, in_flight, weight_versions
from partopt.cost.memory import memory_table
from partopt.cost.problem import Problem
from partopt.planners.placing import stage_multiple, stages_a_device
from partopt.schedules import schedule
from partopt.schedules.layout import STRAIGHT

# N   ranges of layers that no stage may split; c   one of their N + 1 boundaries
# S   stages; s   one of them
# P   devices of one pipeline; v   stages on a device; d   pipelines side by side

Floats = NDArray[np.float64]

# stages x ranges up to which a split within the memory is looked for
SIZE_LIMIT = 20_000_000


def balance_devices(cuts: Sequence[int], costs: Floats, device: Sequence[int]) -> list[int]:
    """The S + 1 `cuts`, moved a range at a time while the devices' loads become more equal.

    `costs` are the seconds of each range, shape (N,); `device` tells for each stage which it is on.
    """
    prefix = np.concatenate([[0.0], np.cumsum(costs)])
    moved = np.array(cuts, dtype=np.int64)
    _descend(prefix, moved, np.array(device, dtype=np.int64))
    return [int(cut) for cut in moved]


@compiled(allocates=True)
def _descend(prefix, cuts, device):  # type: ignore[no-untyped-def]
    """Move single cuts while the sum of the squares of the devices' loads falls."""
    load = np.zeros(device.max() + 1)
    for s in range(len(device)):
        load[device[s]] += prefix[cuts[s + 1]] - prefix[cuts[s]]
    moved = True
    while moved:
        moved = False
        for c in range(1, len(cuts) - 1):
            before, after = device[c - 1], device[c]
            for step in (-1, 1):
                cut = cuts[c] + step
                if cut <= cuts[c - 1] or cut >= cuts[c + 1] or before == after:
                    continue
                more = prefix[cut] - prefix[cuts[c]]
                # (a + m)^2 + (b - m)^2 < a^2 + b^2, by more than rounding
                if more * (load[before] - load[after] + more) < -1e-12 * load[before] ** 2:
                    load[before] += more
                    load[after] -= more
                    cuts[c] = cut
                    moved = True


def split_within_memory(S: int, d: int, problem: Problem) -> list[int] | None:
    """The boundaries of S stages of least variance of those that fit by the formulas.

    Where none fits, of those whose fullest stage needs least. Where a device has several stages,
    each gets an equal part of its memory. Every layer of `problem` may begin a stage. None without
    a limit, and where the search is long.
    """
    chain, limit = problem.chain, problem.memory_bytes
    N = chain.layers
    if limit is None or S * N * N > SIZE_LIMIT:
        return None
    held = _held(S, d, problem)
    tables, part = {count: _table(count, d, problem) for count in set(held)}, float(limit)
    if schedule(problem.schedule).shape != STRAIGHT:
        # one backward runs at a time on a device
        part = (limit - chain.transient(split=True)(0, N)) / stage_multiple(problem)
        transient = chain.transient(schedule(problem.schedule).split).table
        tables = {count: table - transient for count, table in tables.items()}
    prefix = np.concatenate([[0.0], np.cumsum(problem.cell_costs())])
    of_stage = np.array(sorted(tables)).searchsorted(held)
    needs = np.stack([tables[count] for count in sorted(tables)])
    return [int(cut) for cut in _balance_within(needs, of_stage, prefix, part)]


def _held(S: int, d: int, problem: Problem) -> list[int]:
    """Microbatches in flight of each of S stages of d pipelines, of a device's an even share."""
    name, M = problem.schedule, problem.microbatches
    assert M is not None
    if schedule(name).shape == STRAIGHT:
        return [in_flight(name, s, [d] * S, M) for s in range(S)]
    v = stage_multiple(problem)
    P = S // stages_a_device(problem)
    return [-(-chunks_in_flight(name, s % P, P, v, max(1, M // d)) // v) for s in range(S)]


def stage_bytes(bounds: Sequence[int], d: int, problem: Problem) -> tuple[Floats, Floats]:
    """Bytes on a device for each stage between `bounds`, of d pipelines, by the formulas.

    Those that it holds throughout, and those while a backward runs; shape (S,) each.
    """
    held, ranges = _held(len(bounds) - 1, d, problem), list(pairwise(bounds))
    beside = problem.chain.transient(schedule(problem.schedule).split).table
    transient = np.array([beside[own] for own in ranges])
    tables = {count: _table(count, d, problem) for count in set(held)}
    needs = np.array([tables[count][own] for count, own in zip(held, ranges, strict=True)])
    return needs - transient, transient


def _table(held: int, d: int, problem: Problem) -> Floats:
    versions = weight_versions(problem.schedule, held)
    split = schedule(problem.schedule).split
    return _memory_table(problem.chain, held, versions, problem.kept, d, problem.recompute, split)


_memory_table = lru_cache(maxsize=256)(memory_table)


@compiled(allocates=True)
def _balance_within(needs, of_stage, prefix, limit):  # type: ignore[no-untyped-def]
    """The cuts whose fullest stage needs least above `limit`, of these with the least squares.

    `needs[of_stage[s], i, j]` are the bytes of layers [i, j) as stage s.
    """
    S, N = len(of_stage), len(prefix) - 1
    peak, squares = np.full((S + 1, N + 1), np.inf), np.full((S + 1, N + 1), np.inf)
    first = np.zeros((S + 1, N + 1), np.int64)
    peak[0, 0], squares[0, 0] = limit, 0.0
    for s in range(S):
        for j in range(s + 1, N - (S - s - 1) + 1):
            for i in range(s, j):
                need = max(peak[s, i], needs[of_stage[s], i, j])
                total = squares[s, i] + (prefix[j] - prefix[i]) ** 2
                if need < peak[s + 1, j] or (need == peak[s + 1, j] and total < squares[s + 1, j]):
                    peak[s + 1, j], squares[s + 1, j], first[s + 1, j] = need, total, i
    cuts = np.empty(S + 1, np.int64)
    cuts[S] = N
    for s in range(S, 0, -1):
        cuts[s - 1] = first[s, cuts[s]]
    return cuts
