import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from partopt.cost.kernels import largest
from partopt.cost.ranges import Group, RangeMax, RangeSum


def test_a_group_counts_once_for_a_range_that_touches_it():
    """Layers of 1, 10, 100 and 1000, and 5 shared by layers 0, 1 and 3."""
    sums = RangeSum([1, 10, 100, 1000], [Group([0, 1, 3], 5)])
    assert sums(0, 1) == 1 + 5
    assert sums(0, 2) == 11 + 5
    assert sums(2, 3) == 100
    assert sums(0, 4) == 1111 + 5
    assert sums(2, 2) == 0


@st.composite
def shared(draw):
    values = draw(st.lists(st.integers(0, 9), min_size=1, max_size=8))
    members = st.lists(st.integers(0, len(values) - 1), min_size=1, max_size=4)
    return values, [
        Group(*group) for group in draw(st.lists(st.tuples(members, st.integers(1, 9)), max_size=5))
    ]


@given(shared())
def test_every_range_equals_the_definition_and_the_table(case):
    values, groups = case
    sums = RangeSum(values, groups)
    table = sums.table()
    for i in range(len(values) + 1):
        for j in range(i, len(values) + 1):
            touched = sum(
                group.size for group in groups if any(i <= member < j for member in group.members)
            )
            assert sums(i, j) == table[i, j] == sum(values[i:j]) + touched
    assert np.all(np.tril(table, -1) == 0)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=20), st.data())
def test_the_largest_of_every_range_is_that_of_its_layers(values, data):
    most = RangeMax(values)
    table, maxima, N = most.table(), most.maxima(), len(values)
    assert np.all(np.tril(table) == 0)
    for i in range(N):
        for j in range(i + 1, N + 1):
            expected = max(values[i:j])
            assert most(i, j) == table[i, j] == largest(maxima, i, j) == expected
    bounds = [0, *sorted(data.draw(st.sets(st.integers(1, N - 1)))), N] if N > 1 else [0, 1]
    coarse = most.over(bounds)
    for i, start in enumerate(bounds[:-1]):
        for j, stop in enumerate(bounds[i + 1 :], start=i + 1):
            assert coarse(i, j) == most(start, stop)
