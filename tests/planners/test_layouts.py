"""The orders in which pipelines pass devices, and shapes on them."""

from __future__ import annotations

import pytest
from hypothesis import given

from partopt.cost.problem import CONTIGUOUS, NESTED, Partition, consecutive
from partopt.planners.layouts import PLACES, Shape, groupings, layouts, layouts_of, shape_of
from tests.examples import examples
from tests.planners.problems import clusters, topology


def test_the_layouts_of_two_servers_of_two():
    """One server alone, ranks in order, and copies side by side."""
    assert [tuple(map(tuple, places)) for places in layouts([2, 2], PLACES, whole=False)] == [
        ((0,), (1,)),
        ((0,), (1,), (2,), (3,)),
        ((0, 2), (1, 3)),
    ]


def test_groups_of_servers_need_not_be_equal():
    """Of three servers, two side by side pass to the third."""
    found = [tuple(map(tuple, places)) for places in layouts([2, 3], PLACES, whole=False)]
    assert ((0, 2), (1, 3), (4,), (5,)) in found
    assert sorted(groupings(3)) == [(1, 1, 1), (1, 2), (2, 1), (3,)]


def test_unequal_groups_are_tried_of_up_to_sixteen_members():
    unequal = {n: [own for own in groupings(n) if len(set(own)) > 1] for n in (7, 16, 17)}
    assert unequal[7] == [(first, 7 - first) for first in range(1, 7)]
    assert unequal[16] == [(first, 16 - first) for first in range(1, 16) if first != 8]
    assert unequal[17] == []


@pytest.mark.parametrize("sizes", [(8, 128), (4, 4, 8), (256,), (1024, 2), (7, 13), (1, 1)])
def test_a_layout_has_few_places_and_no_rank_twice(sizes):
    given = topology(*[(size, 1.0) for size in sizes])
    found = layouts_of(given)
    assert found
    for places in found:
        ranks = [rank for place in places for rank in place]
        assert len(places) <= PLACES
        assert len(set(ranks)) == len(ranks) <= given.devices
        assert set(ranks) <= set(range(given.devices))


@examples(40)
@given(clusters(devices=12))
def test_all_layouts_are_different(cluster):
    found = layouts_of(cluster)
    assert len(set(found)) == len(found)


def test_a_shape_says_the_ranks_of_its_stages():
    """Stages of one and two places, an idle one between them, on pairs of two servers."""
    places = ((0, 4), (1, 5), (2, 6), (3, 7))
    shape = Shape(places, (0, 3, 8), (1, 2), (0, 1), (None, None))
    partition = shape.partition()
    assert partition.family == NESTED
    assert [list(stage.ranks) for stage in partition.stages] == [[0, 4], [2, 6, 3, 7]]
    again = shape_of(partition, 8)
    assert [list(ranks) for ranks in again.ranks] == [[0, 4], [2, 6, 3, 7]]
    # its boundaries are ranges of two layers, and then of one
    assert shape.on_cells(range(0, 18, 2), range(17)).bounds == (0, 6, 16)


def test_a_shape_on_consecutive_ranks_keeps_its_idle_ones():
    places = tuple(range(rank, rank + 1) for rank in range(6))
    shape = Shape(places, (0, 3, 8), (1, 2), (1, 1), (True, False))
    assert shape.partition().family == CONTIGUOUS
    assert shape_of(shape.partition(), 6) == shape


@pytest.mark.parametrize(("counts", "width"), [((5461, 5461, 5461), 1), ((4096, 8192), 4096)])
def test_places_of_thousands_of_devices_are_as_wide_as_stages_and_idle_ones_allow(counts, width):
    """Of 3 stages of 5,461 one device is idle behind them."""
    bounds = list(range(len(counts) + 1))
    shape = shape_of(Partition(CONTIGUOUS, consecutive(bounds, list(counts))), 16384)
    assert {len(place) for place in shape.places} == {width}
    assert len(shape.places) * width == 16384 and [*map(len, shape.ranks)] == list(counts)
