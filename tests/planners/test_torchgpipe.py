from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from partopt.planners.torchgpipe import balance
from tests.examples import examples


def test_fifteen_equal_layers_over_eight_blocks_are_one_or_two_each():
    assert sorted(np.diff(balance([1.0] * 15, 8)).tolist()) == [1, 2, 2, 2, 2, 2, 2, 2]


def test_layers_of_zero_cost_do_not_keep_it_searching():
    assert balance([0.0, 0.0, 0.0, 1.0, 0.0, 0.0], 3)[-1] == 6


@examples(300)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=14), st.data())
def test_blocks_tile_the_layers_and_none_is_empty(costs, data):
    K = data.draw(st.integers(1, len(costs)))
    bounds = balance([float(cost) for cost in costs], K)
    assert bounds[0] == 0 and bounds[-1] == len(costs) and len(bounds) == K + 1
    assert min(np.diff(bounds)) >= 1


@examples(300)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=14), st.data())
def test_the_largest_and_the_smallest_block_differ_by_no_more_than_the_largest_layer(costs, data):
    """The theorem of Bárány and Grinberg, where no layer is free."""
    K = data.draw(st.integers(1, len(costs)))
    bounds = balance([float(cost) for cost in costs], K)
    blocks = [sum(costs[start:stop]) for start, stop in pairwise(bounds)]
    assert max(blocks) - min(blocks) <= max(costs)
