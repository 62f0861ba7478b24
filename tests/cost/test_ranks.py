"""Runs of ranks say what the ranks one by one say, and so does one pipeline of all."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from partopt.cost.collectives import members_crossed
from partopt.cost.ranks import FEW, array_of, copies_of, held_in, join, runs_of
from tests.examples import examples
from tests.helpers import two_level

RUNS = st.builds(
    lambda start, count, step: range(start, start + count * step, step),
    *(st.integers(0, 60), st.integers(1, 40), st.sampled_from([1, 2, 3, 4, 8, 16])),
)


def disjoint(runs):
    """Those of the runs that share no number with an earlier one."""
    found, seen = [], set()
    for run in runs:
        if seen.isdisjoint(run):
            found.append(run)
            seen |= set(run)
    return found


@examples(300)
@given(runs=st.lists(RUNS, min_size=1, max_size=8).map(disjoint), size=st.integers(1, 16))
def test_what_groups_hold_is_counted_by_runs_as_one_by_one(runs, size):
    expected = Counter(rank // size for run in runs for rank in run)
    found = [(group, many) for groups, many in held_in(runs, size).items() for group in groups]
    assert len(found) == len(expected)
    assert dict(found) == expected


@examples(300)
@given(runs=st.lists(RUNS, min_size=1, max_size=6))
def test_runs_are_the_ranks_in_their_order(runs):
    ranks = [rank for run in runs for rank in run]
    joined = join(runs)
    assert list(joined) == ranks == array_of(joined).tolist()
    assert [joined[k] for k in range(-len(ranks), len(ranks))] == ranks * 2
    assert [rank for run in runs_of(ranks) for rank in run] == ranks
    assert (ranks[0] in joined, -1 in joined, len(joined)) == (True, False, len(ranks))
    assert join(runs) == joined
    assert len({join(runs), joined}) == 1


def test_runs_of_many_ranks_are_few():
    ranks = [*range(0, 8 * FEW, 8), *range(1, 8 * FEW, 8)]
    assert len(runs_of(ranks)) == 3


@examples(100)
@given(RUNS, st.integers(0, 3), st.integers(1, 5), st.sampled_from([1, 8, 64, 100]))
def test_copies_lie_one_stride_apart(ranks, first, copies, stride):
    expected = [rank + (first + copy) * stride for copy in range(copies) for rank in ranks]
    assert list(copies_of(ranks, first, copies, stride)) == expected


@examples(200)
@given(runs=st.lists(RUNS, min_size=1, max_size=6).map(disjoint), sizes=st.sampled_from([2, 4, 8]))
def test_members_crossed_are_those_of_the_ranks_one_by_one(runs, sizes):
    cluster = two_level(sizes, 1024 // sizes)
    members, expected = {rank for run in runs for rank in run}, {}
    for k, level in enumerate(cluster.levels, 1):
        inside = Counter(member // level.size for member in members)
        expected[k] = max(inside.values())
        members = set(inside)
    expected = {k: n for k, n in expected.items() if n > 1}
    assert members_crossed(join(runs), cluster) == expected
    assert members_crossed(np.concatenate(runs).tolist(), cluster) == expected
