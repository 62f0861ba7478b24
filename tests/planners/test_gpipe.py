from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partopt.planners import gpipe
from tests.examples import examples
from tests.planners.problems import chain, problem, topology


def squares(costs: list[int], bounds: tuple[int, ...]) -> int:
    return sum(
        sum(costs[start:stop]) ** 2
        for start, stop in zip((0, *bounds), (*bounds, len(costs)), strict=True)
    )


@pytest.mark.slow
@examples(200)
@given(st.lists(st.integers(0, 20), min_size=1, max_size=10), st.data())
def test_equals_exhaustive_search(costs, data):
    K = data.draw(st.integers(1, len(costs)))
    model = chain(costs, [0] * len(costs), [0] * (len(costs) - 1), [0] * len(costs))
    stages = gpipe.plan(problem(model, topology((16, 1.0)), stages=K)).partition.stages
    bounds = tuple(stage.start for stage in stages[1:])
    assert len(stages) == K
    assert squares(costs, bounds) == min(
        squares(costs, cuts) for cuts in combinations(range(1, len(costs)), K - 1)
    )


def test_least_variance_is_not_least_bottleneck():
    """Of 2, 9, 4, 3, 2 in three stages, 11-4-5 has squares 121+16+25 = 162; 2-9-9 would have a
    smaller largest stage but squares 166.
    """
    costs = [2, 9, 4, 3, 2]
    model = chain(costs, [0] * 5, [0] * 4, [0] * 5)
    stages = gpipe.plan(problem(model, topology((3, 1.0)))).partition.stages
    assert [sum(costs[stage.start : stage.stop]) for stage in stages] == [11, 4, 5]


def test_a_stage_a_device_by_default_and_no_more_than_there_are_layers():
    model = chain([1, 1, 1], [0] * 3, [0, 0], [0] * 3)
    assert len(gpipe.plan(problem(model, topology((8, 1.0)))).partition.stages) == 3
