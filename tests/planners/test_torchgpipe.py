from itertools import accumulate, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from partopt.planners.torchgpipe import balance
from tests.examples import examples


def test_fifteen_equal_layers_over_eight_blocks_are_one_or_two_each():
    assert sorted(np.diff(balance([1.0] * 15, 8)).tolist()) == [1, 2, 2, 2, 2, 2, 2, 2]


def test_layers_of_zero_cost_do_not_keep_it_searching():
    assert balance([0.0, 0.0, 0.0, 1.0, 0.0, 0.0], 3)[-1] == 6


@pytest.mark.slow
@examples(300)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=14), st.data())
def test_blocks_tile_the_layers_and_none_is_empty(costs, data):
    K = data.draw(st.integers(1, len(costs)))
    bounds = balance([float(cost) for cost in costs], K)
    assert bounds[0] == 0 and bounds[-1] == len(costs) and len(bounds) == K + 1
    assert min(np.diff(bounds)) >= 1


@pytest.mark.slow
@examples(300)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=14), st.data())
def test_the_largest_and_the_smallest_block_differ_by_no_more_than_the_largest_layer(costs, data):
    """The theorem of Bárány and Grinberg, where no layer is free."""
    K = data.draw(st.integers(1, len(costs)))
    bounds = balance([float(cost) for cost in costs], K)
    blocks = [sum(costs[start:stop]) for start, stop in pairwise(bounds)]
    assert max(blocks) - min(blocks) <= max(costs)


def blocks_by_the_published_search(costs: list[int], K: int) -> list[list[int]]:
    """Bárány and Grinberg's search with lists of layers for blocks, as long as no block would be
    left empty: of the smallest blocks that nearest to the largest takes the layer beside it.
    """
    ends = [len(costs) * k // K for k in range(K + 1)]
    blocks = [costs[start:stop] for start, stop in pairwise(ends)]
    while max(map(sum, blocks)) - min(map(sum, blocks)) > max(costs):
        sums = [sum(block) for block in blocks]
        p = sums.index(max(sums))
        q = min((k for k in range(K) if sums[k] == min(sums)), key=lambda k: (abs(k - p), k))
        if q < p:
            blocks[q].append(blocks[q + 1].pop(0))
        else:
            blocks[q].insert(0, blocks[q - 1].pop())
        if not all(blocks):
            return []
    return blocks


@pytest.mark.slow
@examples(500)
@given(st.lists(st.integers(1, 30), min_size=2, max_size=16), st.data())
def test_the_blocks_are_those_of_the_published_search(costs, data):
    """Where that leaves a block empty it goes another way, and here a neighbour gives."""
    K = data.draw(st.integers(2, len(costs)))
    blocks = blocks_by_the_published_search(costs, K)
    if blocks:
        assert balance(costs, K) == [0, *accumulate(len(block) for block in blocks)]


@pytest.mark.parametrize(
    ("costs", "K", "bounds"),
    [
        # two of the cases that torchgpipe's own tests have
        ([1, 2, 3, 4, 5, 6], 2, [0, 4, 6]),
        ([6, 5, 4, 3, 2, 1], 2, [0, 2, 6]),
        # 12 | 2 | 12: of the largest the first gives; 8 | 6 | 12, the last gives; 8 | 10 | 8
        ([4, 4, 4, 1, 1, 0, 4, 4, 4], 3, [0, 2, 7, 9]),
        # 2 | 2 | 16: of the smallest the one beside the largest takes; 2 | 10 | 8
        ([1, 1, 1, 1, 8, 8], 3, [0, 2, 5, 6]),
        # 16 | 2 | 2: likewise; 8 | 10 | 2
        ([8, 8, 1, 1, 1, 1], 3, [0, 1, 4, 6]),
        # 2 | 10 | 2: of two as near the first takes; 7 | 5 | 2
        ([1, 1, 5, 5, 1, 1], 3, [0, 3, 4, 6]),
        # 6 | 4 | 3: nothing moves where the two differ by no more than the largest layer
        ([3, 3, 3, 1, 1, 1, 1], 3, [0, 2, 4, 7]),
        # 1 | 2 | 18: block 1 keeps its one layer, so that the largest gives for it; 3 | 9 | 9
        ([1, 2, 9, 9], 3, [0, 2, 3, 4]),
        # 5 | 18 | 2 | 1: likewise to the other side; 5 | 9 | 9 | 3
        ([5, 9, 9, 2, 1, 0], 4, [0, 1, 2, 3, 6]),
    ],
)
def test_moves_by_hand(costs, K, bounds):
    assert balance([float(cost) for cost in costs], K) == bounds
