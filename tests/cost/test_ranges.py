import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

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


@st.composite
def sums_and_values(draw):
    """The sums of some layers, and values of the same layers."""
    numbers, groups = draw(shared())
    N = len(numbers)
    values = draw(st.lists(st.integers(0, 30), min_size=N, max_size=N))
    return RangeSum(numbers, groups), values


@pytest.mark.slow
@given(shared())
def test_every_range_equals_the_definition_and_the_table(case):
    values, groups = case
    sums = RangeSum(values, groups)
    table = sums.table
    for i in range(len(values) + 1):
        for j in range(i, len(values) + 1):
            touched = sum(
                group.size for group in groups if any(i <= member < j for member in group.members)
            )
            assert sums(i, j) == table[i, j] == sum(values[i:j]) + touched
    assert np.all(np.tril(table, -1) == 0)


@pytest.mark.slow
@given(sums_and_values())
def test_the_largest_of_every_range_is_that_of_its_layers(case):
    """Each value counts less what the layers behind it add to the sum: alone it counts whole."""
    sums, values = case
    N = len(values)
    most, alone = RangeMax(values, sums), RangeMax(values)
    tables = most.table, alone.table
    for table in tables:
        assert np.all(np.tril(table) == 0)
    for i in range(N):
        assert most(i, i) == 0
        for j in range(i + 1, N + 1):
            beside = max(values[k] + sums(i, k + 1) for k in range(i, j)) - sums(i, j)
            assert most(i, j) == tables[0][i, j] == beside
            whole = max(values[i:j])
            assert alone(i, j) == tables[1][i, j] == whole
            assert most.alone(i, j) == whole


@pytest.mark.slow
@given(sums_and_values())
def test_with_the_sum_the_largest_never_falls_as_a_range_grows(case):
    """At either end; what is beside the sum alone may fall."""
    sums, values = case
    N = len(values)
    peaks = sums.table + RangeMax(values, sums).table
    within = np.triu(np.ones((N + 1, N + 1), dtype=bool))
    assert (np.diff(peaks, axis=1)[within[:, :-1]] >= 0).all()
    assert (np.diff(peaks, axis=0)[within[1:]] <= 0).all()


@pytest.mark.slow
@given(sums_and_values(), st.data())
def test_between_boundaries_the_largest_is_that_of_the_layers_between(case, data):
    sums, values = case
    N, most = len(values), RangeMax(values, sums)
    inner = st.sets(st.integers(1, N - 1)) if N > 1 else st.just(set())
    bounds = [0, *sorted(data.draw(inner)), N]
    for fine, coarse in ((most, most.over(bounds)), (most.alone, most.over(bounds).alone)):
        table = coarse.table
        for i, start in enumerate(bounds[:-1]):
            for j, stop in enumerate(bounds[i + 1 :], start=i + 1):
                expected = fine(start, stop)
                assert coarse(i, j) == table[i, j] == expected
    twice = most.over(bounds).over([0, len(bounds) - 1])
    assert twice(0, 1) == most(0, N)
