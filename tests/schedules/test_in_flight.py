"""Exact counts of microbatches in flight against a walk through every row, and on small orders by
hand.
"""

import pytest

from partopt.schedules import SCHEDULES, order, refusal
from partopt.schedules.layout import Layout
from partopt.schedules.order import in_flight
from tests.schedules.executed import built, chunks, straight


def walked(given):
    """The largest number of microbatches between their forward and their backward on each rank."""
    most = []
    for rank in range(given.ranks):
        held, peak = set(), 0
        for name in (
            " ".join(given.names(rank))
            .replace("(", "")
            .replace(")OVERLAP_F_B", "")
            .replace(";", " ")
            .split()
        ):
            letter = next(each for each in name if each.isalpha())
            of, microbatch = name.split(letter)
            if letter == "F":
                held.add((of, microbatch))
            elif letter in "BW":
                held.remove((of, microbatch))
            peak = max(peak, len(held))
        most.append(peak)
    return most


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_count_is_that_of_a_walk_through_the_rows(name):
    for P, M in ((1, 2), (2, 4), (4, 8), (4, 2)):
        for v in chunks(name):
            if refusal(name, P, v, M) is None:
                given = built(name, P, v, M)
                assert in_flight(given).tolist() == walked(given)


def test_unequal_replicas():
    layout = straight("pipedream", [3, 1], 9)
    assert in_flight(order("pipedream", layout)).tolist() == [2, 2, 2, 1]


def test_chunks_of_a_device_are_counted_together():
    assert in_flight(built("interleaved", 2, 2, 4)).tolist() == [5, 3]


def test_ranks_without_work_hold_nothing():
    given = order("1f1b", Layout([[1], [3]], 5, 2))
    assert in_flight(given).tolist() == [0, 2, 0, 1, 0]


def test_a_replica_without_microbatches_holds_none():
    assert in_flight(order("gpipe", straight("gpipe", [3], 2))).tolist() == [1, 1, 0]
