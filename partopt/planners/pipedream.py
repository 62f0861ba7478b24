"""The partitioning recurrence of PipeDream (Narayanan et al., SOSP 2019, section 3.1), over any
number of levels, exactly.

    A^0(i..j, 1) = C(i, j)
    T^k(i..j, m) = max( A^{k-1}(i..j, n_{k-1}), 2(m-1) W(i, j) / B_k ) / m
    A^k(i..j, m) = min( T^k(i..j, m), min over i < s < j, m' < m of max( A^k(i..s, m-m'), 2 a_s / B_k, T^k(s..j, m') ) )

The answer is A^L(0..N, n_L): exactly m workers, every level a bus without latency, memory not
looked at; C includes recomputation where that is asked for. Ties: fewer stages, then the later cut.
Only the rows that are needed are filled: at the outermost level those of i = 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from partopt.cost.compiled import compiled
from partopt.cost.problem import NESTED, Decision, Partition, Problem, certify
from partopt.cost.recurrence import cut_s, stage_s
from partopt.errors import PartoptError
from partopt.planners.blocks import Block, stages_of
from partopt.planners.split import jumps, split_off

# N    layers; tables over ranges are indexed [s, j]: the search moves s slowly while j runs
# n    members of a component of the level
# m    members of the level given to layers [i, j)
# m'   of these, the members of the last stage (`last`)
# A    best bottleneck seconds of any pipeline over [i, j) with m members
# T    seconds when [i, j) is one stage replicated m times

LAYER_LIMIT = 5000  # tables of N^2 and n N numbers; about 1 GB there


@dataclass(frozen=True)
class _Level:
    """What level k is filled from: the tables of level k-1, and its own costs."""

    name: str
    n: int
    inner: NDArray[np.float64]  # A^{k-1}(s..j, n_{k-1}), shape (N+1, N+1)
    inner_floor: NDArray[np.float64]  # its minimum over all s' <= s
    inner_stages: NDArray[np.int32]  # stages of that pipeline
    cuts: NDArray[np.float64]  # seconds of each cut at this level, shape (N+1,)
    # the next s in either direction whose cut is not above that of s, shape (2, N+1)
    jump: NDArray[np.int32]
    B: float


@dataclass(frozen=True)
class _Row:
    """A^k(i..j, m) for one i, every m and j, with the choices that gave it; all of shape (n+1,
    N+1).
    """

    A: NDArray[np.float64]
    floor: NDArray[np.float64]  # the minimum of A[m, j'] over j' >= j
    stages: NDArray[np.int32]
    split: NDArray[np.int32]  # s, where the last stage begins
    last: NDArray[np.int32]  # m', its members; 0 where [i, j) is one stage

    @classmethod
    def empty(cls, n: int, layers: int) -> _Row:
        shape = (n + 1, layers + 1)
        return cls(np.empty(shape), np.empty(shape), *(np.empty(shape, np.int32) for _ in range(3)))

    def fill(self, level: _Level, weights: NDArray[np.float64], i: int, m: int) -> None:
        """Fill the entries of m, from those of fewer members."""
        tables = (
            level.inner,
            level.inner_floor,
            level.inner_stages,
            weights,
            level.cuts,
            level.jump,
            level.B,
        )
        _fill_members(i, m, *tables, self.A, self.floor, self.stages, self.split, self.last)


def plan(problem: Problem) -> Decision:
    """The partition that minimises the published recurrence.

    Raises PartoptError where its tables outgrow memory.
    """
    chain, topology = problem.chain, problem.topology
    largest = max(level.size for level in topology.levels)
    if chain.layers * max(chain.layers, largest) > LAYER_LIMIT**2:
        what = (
            f"{chain.layers} layers and a level of {largest}; its tables outgrow memory "
            f"above {LAYER_LIMIT} x {LAYER_LIMIT}"
        )
        raise PartoptError(
            f"pipedream: {what}",
            "profile coarser layers (--granularity block), or choose another planner",
        )
    weights = np.ascontiguousarray(chain.parameter_bytes.table())
    levels = _fill_levels(problem, weights)
    top = _Row.empty(levels[-1].n, chain.layers)
    for m in range(1, levels[-1].n + 1):
        top.fill(levels[-1], weights, 0, m)
        problem.progress("pipedream: plan", m, levels[-1].n)
    blocks = _backtrack(levels, weights, top, len(levels), 0, chain.layers)
    sizes = [topology.group_size(k) for k in range(len(levels) + 1)]
    status, proof = (
        "the least of the published recurrence, every link a bus",
        "the recurrence tries every split and all replicas",
    )
    period_s = float(top.A[-1, -1])
    partition = Partition(NESTED, stages_of(blocks, sizes))
    return Decision(partition, certify(period_s, period_s, status, proof))


def _fill_levels(problem: Problem, weights: NDArray[np.float64]) -> list[_Level]:
    """The tables of every level, innermost first; each is filled from the one before."""
    chain = problem.chain
    levels: list[_Level] = []
    prefix = chain.busy_prefix(problem.recompute)
    inner = np.maximum(prefix[None, :] - prefix[:, None], 0.0)
    stages = np.ones(inner.shape, dtype=np.int32)
    for level in problem.topology.levels:
        B = level.bandwidth_bytes_per_s * level.links
        if levels:
            inner, stages = _fill_table(levels[-1], weights, problem)
        cuts = np.array([cut_s(size, B) for size in chain.a])
        levels.append(
            _Level(
                level.name,
                level.size,
                inner,
                np.minimum.accumulate(inner, axis=0),
                stages,
                cuts,
                jumps(cuts),
                B,
            )
        )
    return levels


def _fill_table(
    level: _Level, weights: NDArray[np.float64], problem: Problem
) -> tuple[NDArray[np.float64], NDArray[np.int32]]:
    """A^k(i..j, n) and the stages of it for all i and j, both [i, j]."""
    table, count = np.zeros_like(level.inner), np.zeros_like(level.inner_stages)
    layers = len(level.cuts) - 1
    row = _Row.empty(level.n, layers)
    for i in range(layers):
        for m in range(1, level.n + 1):
            row.fill(level, weights, i, m)
        table[i, i + 1 :], count[i, i + 1 :] = row.A[-1, i + 1 :], row.stages[-1, i + 1 :]
        problem.progress(f"pipedream: inside a {level.name}", i + 1, layers)
    return table, count


def _backtrack(
    levels: list[_Level], weights: NDArray[np.float64], row: _Row, k: int, i: int, j: int
) -> list[Block]:
    """The stages behind A^k(i..j, n_k), of which `row` is the row; the inner ones by filling again
    the rows that they lie in.
    """
    blocks: list[Block] = []
    m = levels[k - 1].n
    while True:
        last, split = int(row.last[m, j]), int(row.split[m, j])
        start, members = (split, last) if last else (i, m)
        blocks.insert(
            0, Block(start, j, m - members, members, _inside(levels, weights, k - 1, start, j))
        )
        if not last:
            return blocks
        j, m = split, m - last


def _inside(
    levels: list[_Level], weights: NDArray[np.float64], k: int, i: int, j: int
) -> list[Block]:
    """The pipeline over [i, j) inside one level-k member; a device has none."""
    if k == 0:
        return []
    row = _Row.empty(levels[k - 1].n, len(levels[k - 1].cuts) - 1)
    for m in range(1, levels[k - 1].n + 1):
        row.fill(levels[k - 1], weights, i, m)
    return _backtrack(levels, weights, row, k, i, j)


@compiled()
def _fill_members(  # type: ignore[no-untyped-def]
    i, m, inner, inner_floor, inner_stages, weights, cuts, jump, B, A, floor, stages, split, last
):
    """Fill A[m, j] = A^k(i..j, m), its choices, and its floor, for every j."""
    layers = len(cuts) - 1
    for j in range(i + 1, layers + 1):
        A[m, j] = stage_s(inner[i, j], weights[i, j], m, B)
        stages[m, j], split[m, j], last[m, j] = inner_stages[i, j], i, 0
    for members in range(1, m):
        split_off(
            members,
            i,
            m,
            inner,
            inner_floor,
            inner_stages,
            weights,
            cuts,
            jump,
            B,
            A,
            floor,
            stages,
            split,
            last,
        )
    floor[m, layers] = A[m, layers]
    for j in range(layers - 1, i, -1):
        floor[m, j] = min(A[m, j], floor[m, j + 1])
