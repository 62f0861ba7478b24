"""PipeDream's partitioning recurrence, over any number of levels, exactly.

Narayanan et al., SOSP 2019, section 3.1:

    A^0(i..j, 1) = C(i, j)
    T^k(i..j, m) = max( A^{k-1}(i..j, n_{k-1}), 2(m-1) W(i, j) / B_k ) / m
    A^k(i..j, m) = min( T^k(i..j, m), min over i < s < j, m' < m of
                        max( A^k(i..s, m-m'), 2 a_s / B_k, T^k(s..j, m') ) )

The answer is A^L(0..N, n_L): exactly m workers, every level a bus without latency, memory ignored;
C includes recomputation where that is requested. Ties: fewer stages, then the later cut. Only the
rows that are needed are filled: at the outermost level those of i = 0.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from partopt.cost.compiled import compiled
from partopt.cost.problem import NESTED, Decision, Partition, Problem, certify
from partopt.cost.recurrence import cut_s, stage_s
from partopt.errors import PartoptError
from partopt.planners.blocks import Block, stages_of
from partopt.planners.split import Cuts, Inner, Row, split_off

# N    layers; tables over ranges are indexed [s, j]: the search moves s slowly while j runs
# n    members of a component of the level
# m    members of the level given to layers [i, j)
# m'   of these, the members of the last stage (`last`)
# A    best bottleneck seconds of any pipeline over [i, j) with m members
# T    seconds when [i, j) is one stage replicated m times

LAYER_LIMIT = 5000  # tables of N^2 and n N numbers; about 1 GB there
# of members: N n^2 at the outermost level, N^2 n^2 / 2 inside; some 30 ns each
SPLIT_LIMIT = 2_000_000_000


class _Level(NamedTuple):
    """What level k is filled from: the tables of level k-1, and its own costs."""

    name: str
    n: int
    inner: Inner  # of A^{k-1}(s..j, n_{k-1})
    cuts: Cuts


def plan(problem: Problem) -> Decision:
    """The partition that minimises the published recurrence.

    Raises PartoptError where its tables outgrow memory, or filling them takes too long.
    """
    chain, topology = problem.chain, problem.topology
    _check_size(problem)
    levels = _fill_levels(problem)
    top = Row.empty(levels[-1].n, chain.layers)
    for m in range(1, levels[-1].n + 1):
        _fill_members(0, m, levels[-1].inner, levels[-1].cuts, top)
        problem.progress("pipedream: plan", m, levels[-1].n)
    blocks = _backtrack(levels, top, len(levels), 0, chain.layers)
    sizes = [topology.group_size(k) for k in range(len(levels) + 1)]
    status, proof = (
        "optimal for PipeDream's recurrence (links modelled as buses)",
        "the recurrence tries every split and all replicas",
    )
    period_s = float(top.A[-1, -1])
    partition = Partition(NESTED, stages_of(blocks, sizes))
    return Decision(
        partition,
        certify(period_s, period_s, "nested plans, as the recurrence prices them", proof, status),
    )


def _check_size(problem: Problem) -> None:
    """Raise PartoptError where the tables outgrow memory, or filling them takes too long."""
    N, sizes = problem.chain.layers, [level.size for level in problem.topology.levels]
    splits = N * sizes[-1] ** 2 + sum(N * N * n * n // 2 for n in sizes[:-1])
    why = ""
    if N * max(N, *sizes) > LAYER_LIMIT**2:
        why = f"its tables outgrow memory above {LAYER_LIMIT} x {LAYER_LIMIT}"
    elif splits > SPLIT_LIMIT:
        why = f"it tries more than {SPLIT_LIMIT:,} splits"
    if why:
        raise PartoptError(
            f"pipedream: {N} layers and a level of {max(sizes)}; {why}",
            'profile coarser layers (`granularity="block"`), or choose another planner',
            code="chain-too-long",
            layers=N,
            level_size=max(sizes),
        )


def _fill_levels(problem: Problem) -> list[_Level]:
    """The tables of every level, innermost first; each is filled from the one before."""
    chain = problem.chain
    levels: list[_Level] = []
    weights = np.ascontiguousarray(chain.trained_bytes.table)
    prefix = chain.busy_prefix(problem.recompute)
    seconds = np.maximum(prefix[None, :] - prefix[:, None], 0.0)
    stages = np.ones(seconds.shape, dtype=np.int32)
    for level in problem.topology.levels:
        B = level.bandwidth_bytes_per_s * level.links
        if levels:
            seconds, stages = _fill_table(levels[-1], problem)
        cuts = Cuts.of(np.array([cut_s(size, B) for size in chain.traffic]))
        levels.append(_Level(level.name, level.size, Inner.of(seconds, stages, weights, B), cuts))
    return levels


def _fill_table(level: _Level, problem: Problem) -> tuple[NDArray[np.float64], NDArray[np.int32]]:
    """A^k(i..j, n) and the stages of it for all i and j, both [i, j]."""
    table, count = np.zeros_like(level.inner.seconds), np.zeros_like(level.inner.stages)
    layers = problem.chain.layers
    row = Row.empty(level.n, layers)
    for i in range(layers):
        _fill_row(i, level.n, level.inner, level.cuts, row)
        table[i, i + 1 :], count[i, i + 1 :] = row.A[-1, i + 1 :], row.stages[-1, i + 1 :]
        problem.progress(f"pipedream: inside a {level.name}", i + 1, layers)
    return table, count


def _backtrack(levels: list[_Level], row: Row, k: int, i: int, j: int) -> list[Block]:
    """The blocks behind A^k(i..j, n_k), of which `row` is the row.

    The inner ones are found by filling the rows that they lie in a second time.
    """
    blocks: list[Block] = []
    m = levels[k - 1].n
    while True:
        last, split = int(row.last[m, j]), int(row.split[m, j])
        start, members = (split, last) if last else (i, m)
        inside = _inside(levels, k - 1, start, j)
        blocks.insert(0, Block(start, j, m - members, members, inside))
        if not last:
            return blocks
        j, m = split, m - last


def _inside(levels: list[_Level], k: int, i: int, j: int) -> list[Block]:
    """The pipeline over [i, j) inside one level-k member; a device has none."""
    if k == 0:
        return []
    level = levels[k - 1]
    row = Row.empty(level.n, len(level.cuts.seconds) - 1)
    _fill_row(i, level.n, level.inner, level.cuts, row)
    return _backtrack(levels, row, k, i, j)


@compiled()
def _fill_members(i, m, inner, cuts, row):  # type: ignore[no-untyped-def]
    """Fill the row at m for every j from those of fewer members.

    That is A[m, j] = A^k(i..j, m), its choices, and its floor.
    """
    layers = len(cuts.seconds) - 1
    for j in range(i + 1, layers + 1):
        row.A[m, j] = stage_s(inner.seconds[i, j], inner.weights[i, j], m, inner.B)
        row.stages[m, j], row.split[m, j], row.last[m, j] = inner.stages[i, j], i, 0
    for members in range(1, m):
        split_off(members, i, m, inner, cuts, row)
    row.floor[m, layers] = row.A[m, layers]
    for j in range(layers - 1, i, -1):
        row.floor[m, j] = min(row.A[m, j], row.floor[m, j + 1])


@compiled()
def _fill_row(i, n, inner, cuts, row):  # type: ignore[no-untyped-def]
    """Fill the row of i, for every m up to n."""
    for m in range(1, n + 1):
        _fill_members(i, m, inner, cuts, row)
