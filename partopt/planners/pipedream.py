"""PipeDream's partitioning recurrence, over any number of levels, exactly.

Narayanan et al., SOSP 2019, section 3.1:

    A^0(i..j, 1) = C(i, j)
    T^k(i..j, m) = max( A^{k-1}(i..j, n_{k-1}), 2(m-1) W(i, j) / B_k ) / m
    A^k(i..j, m) = min( T^k(i..j, m), min over i < s < j, m' < m of
                        max( A^k(i..s, m-m'), 2 a_s / B_k, T^k(s..j, m') ) )

The answer is A^L(0..N, n_L): exactly m workers, every level a bus without latency, memory ignored;
C includes recomputation where that is requested. Ties: fewer stages, then the later cut. Only the
rows that are needed are filled: at the outermost level those of i = 0.

For every j, A(i..s) rises with s and T(s..j) falls, but for bumps (exactly m workers can make a
longer range cheaper), so both are bounded from below by monotone envelopes. The search for s starts
where the envelopes cross, goes outward only as long as they allow an improvement or a tie, and
jumps over cuts that do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from partopt.cost.compiled import compiled
from partopt.cost.problem import NESTED, Assignment, Decision, Partition, Problem, certify
from partopt.errors import PartoptError

# N    layers; tables over ranges are indexed [s, j]: the search moves s slowly while j runs
# n    members of a component of the level
# m    members of the level given to layers [i, j)
# m'   of these, the members of the last stage (`last`)
# A    best bottleneck seconds of any pipeline over [i, j) with m members
# T    seconds when [i, j) is one stage replicated m times

LAYER_LIMIT = 5000  # tables of N^2 and n N numbers; about 1 GB there
# of members: N n^2 at the outermost level, N^2 n^2 / 2 inside; some 30 ns each
SPLIT_LIMIT = 2_000_000_000


class Inner(NamedTuple):
    """What a stage or a pipeline over [s, j) takes inside one member.

    Tables of shape (N+1, N+1) over s and j.
    """

    seconds: NDArray[np.float64]
    floor: NDArray[np.float64]  # the minimum of the seconds over all s' <= s
    stages: NDArray[np.int32]
    weights: NDArray[np.float64]  # bytes of parameters of [s, j)
    B: float  # bytes/s at which members exchange them


class Cuts(NamedTuple):
    """What the cuts take."""

    seconds: NDArray[np.float64]  # shape (N+1,)
    # the next s in either direction whose cut is not above that of s, shape (2, N+1)
    jump: NDArray[np.int32]


class Row(NamedTuple):
    """The best pipelines over [i, j) for one i and every m members and j, with their choices.

    All arrays have shape (n+1, N+1).
    """

    A: NDArray[np.float64]  # bottleneck seconds
    floor: NDArray[np.float64]  # the minimum of A[m, j'] over j' >= j
    stages: NDArray[np.int32]
    split: NDArray[np.int32]  # s, where the last stage begins
    last: NDArray[np.int32]  # members of the last stage; 0 where [i, j) is one stage

    @classmethod
    def empty(cls, n: int, layers: int) -> Row:
        """Infinite seconds, and no choices."""
        shape = (n + 1, layers + 1)
        return cls(
            np.full(shape, np.inf),
            np.full(shape, np.inf),
            *(np.zeros(shape, np.int32) for _ in range(3)),
        )


class _Level(NamedTuple):
    """What level k is filled from: the tables of level k-1, and its costs."""

    name: str
    n: int
    inner: Inner  # of A^{k-1}(s..j, n_{k-1})
    cuts: Cuts


def plan(problem: Problem) -> Decision:
    """The partition that minimises the published recurrence.

    Raises PartoptError where its tables outgrow memory, or filling them takes too long.
    """
    chain, levels = problem.chain, _fill_levels(problem)
    top = Row.empty(levels[-1].n, chain.layers)
    for m in range(1, levels[-1].n + 1):
        _fill_row(0, m, m, levels[-1].inner, levels[-1].cuts, top)
        problem.progress("pipedream: plan", m, levels[-1].n)
    status, proof = (
        "optimal for PipeDream's recurrence (links modelled as buses)",
        "the recurrence tries every split and all replicas",
    )
    period_s = float(top.A[-1, -1])
    partition = Partition(NESTED, _backtrack(levels, top, len(levels), 0, chain.layers))
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
        )


def _fill_levels(problem: Problem) -> list[_Level]:
    """The tables of every level, innermost first; a level is filled from the one before."""
    _check_size(problem)
    chain = problem.chain
    levels: list[_Level] = []
    weights = np.ascontiguousarray(chain.trained_bytes.table)
    prefix = chain.busy_prefix(problem.recompute_by_default)
    seconds = np.maximum(prefix[None, :] - prefix[:, None], 0.0)
    stages = np.ones(seconds.shape, dtype=np.int32)
    for level in problem.topology.levels:
        B = level.bandwidth_bytes_per_s * level.links
        if levels:
            seconds, stages = _fill_table(levels[-1], problem)
        cuts = np.array([cut_s(size, B) for size in chain.traffic])
        floor = np.minimum.accumulate(seconds, axis=0)
        inner = Inner(seconds, floor, stages, weights, B)
        levels.append(_Level(level.name, level.size, inner, Cuts(cuts, _jumps(cuts))))
    return levels


def _fill_table(level: _Level, problem: Problem) -> tuple[NDArray[np.float64], NDArray[np.int32]]:
    """A^k(i..j, n) and the stages of it for all i and j, both [i, j]."""
    table, count = np.zeros_like(level.inner.seconds), np.zeros_like(level.inner.stages)
    layers = problem.chain.layers
    row = Row.empty(level.n, layers)
    for i in range(layers):
        _fill_row(i, 1, level.n, level.inner, level.cuts, row)
        table[i, i + 1 :], count[i, i + 1 :] = row.A[-1, i + 1 :], row.stages[-1, i + 1 :]
        problem.progress(f"pipedream: inside a {level.name}", i + 1, layers)
    return table, count


def _backtrack(levels: list[_Level], row: Row, k: int, i: int, j: int) -> list[Assignment]:
    """The stages behind A^k(i..j, n_k), of which `row` is the row, on the ranks of a component."""
    stages = list[Assignment]()
    m, size = levels[k - 1].n, prod(level.n for level in levels[: k - 1])  # ranks of a member
    while True:
        last, split = int(row.last[m, j]), int(row.split[m, j])
        start, members = (split, last) if last else (i, m)
        inside = _inside(levels, k - 1, start, j)
        stages[:0] = on_members(inside, range(m - members, m), size)
        if not last:
            return stages
        j, m = split, m - last


def on_members(stages: Sequence[Assignment], members: range, size: int) -> list[Assignment]:
    """A pipeline inside a member of a level, of `size` ranks, on every one of some members.

    Copies take turns first: replica q of a pipeline on m members is q*m + c on member c.
    """
    return [
        replace(stage, ranks=[member * size + rank for rank in stage.ranks for member in members])
        for stage in stages
    ]


def _inside(levels: list[_Level], k: int, i: int, j: int) -> list[Assignment]:
    """The pipeline over [i, j) inside one level-k member, whose row is filled a second time."""
    if k == 0:
        return [Assignment(i, j, [0])]
    level = levels[k - 1]
    row = Row.empty(level.n, len(level.cuts.seconds) - 1)
    _fill_row(i, 1, level.n, level.inner, level.cuts, row)
    return _backtrack(levels, row, k, i, j)


def _jumps(cuts: NDArray[np.float64]) -> NDArray[np.int32]:
    """For every s the next index, upward and downward, with a cut not above that of s.

    An index past the ends where there is none.
    """
    jump = np.empty((2, len(cuts)), np.int32)
    for way, step in enumerate((1, -1)):
        for s in range(len(cuts))[::-step]:
            following = s + step
            while 0 <= following < len(cuts) and cuts[following] > cuts[s]:
                following = jump[way, following]
            jump[way, s] = following
    return jump


def cut_s(cut_bytes: float, B: float) -> float:
    """Seconds for the activation and its gradient across a cut, on a bus."""
    return 2.0 * cut_bytes / B


@compiled(inline=True)
def stage_s(inner_s: float, weight_bytes: float, m: int, B: float) -> float:
    """T: seconds per microbatch of one stage replicated m times.

    The slower of its compute and its weight exchange, over m.
    """
    return max(inner_s, 2.0 * (m - 1) * weight_bytes / B) / m


@compiled()
def _fill_row(i, first, last, inner, cuts, row):
    """Fill the row of i, for every m from `first` to `last`, from those of fewer members.

    That is A[m, j] = A^k(i..j, m), its choices, and its floor.
    """
    layers = len(cuts.seconds) - 1
    for m in range(first, last + 1):
        for j in range(i + 1, layers + 1):
            row.A[m, j] = stage_s(inner.seconds[i, j], inner.weights[i, j], m, inner.B)
            row.stages[m, j], row.split[m, j], row.last[m, j] = inner.stages[i, j], i, 0
        for members in range(1, m):
            split_off(members, i, m, inner, cuts, row)
        row.floor[m, layers] = row.A[m, layers]
        for j in range(layers - 1, i, -1):
            row.floor[m, j] = min(row.A[m, j], row.floor[m, j + 1])


@compiled(inner=True)
def split_off(members, i, m, inner, cuts, row):
    """Improve `row` at m, for every j, by the best split with `members` for the last stage.

    The search goes outward from where the envelopes cross. Any start is right; the crossing, which
    moves little from one j to the next, is the fastest.
    """
    A, floor, left, start = row.A, row.floor, m - members, i + 1
    for j in range(i + 2, len(cuts.seconds)):
        start = _crossing(floor[left], inner, members, i, j, start)
        for down in range(2):
            s = start - down
            while i < s < j:
                bound = _stage_floor_s(inner, s, j, members) if down else floor[left, s]
                if bound > A[m, j]:
                    break
                # so are the cuts up to the next one that is not above it
                if cuts.seconds[s] > A[m, j]:
                    s = cuts.jump[down, s]
                    continue
                stage = stage_s(inner.seconds[s, j], inner.weights[s, j], members, inner.B)
                seconds = max(A[left, s], cuts.seconds[s], stage)
                _improve(row, m, j, seconds, row.stages[left, s] + inner.stages[s, j], s, members)
                s += -1 if down else 1


@compiled(inline=True)
def _stage_floor_s(inner, s, j, members):
    """What no stage [s', j) with s' <= s goes below."""
    return stage_s(inner.floor[s, j], inner.weights[s, j], members, inner.B)


@compiled(inline=True)
def _crossing(floor, inner, members, i, j, start):
    """The first s, near `start`, at which what lies before it takes no less than the stage."""
    while start > i + 1 and floor[start - 1] >= _stage_floor_s(inner, start - 1, j, members):
        start -= 1
    while start < j - 1 and floor[start] < _stage_floor_s(inner, start, j, members):
        start += 1
    return start


@compiled(inline=True)
def _improve(row, m, j, seconds, count, s, members):
    """Take a split if it is faster; of equal ones that with fewer stages, then the later cut."""
    tie = seconds == row.A[m, j] and (count, -s) < (row.stages[m, j], -row.split[m, j])
    if seconds < row.A[m, j] or tie:
        row.A[m, j], row.stages[m, j] = seconds, count
        row.split[m, j], row.last[m, j] = s, members
