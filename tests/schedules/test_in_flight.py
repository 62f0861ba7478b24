"""Exact counts of microbatches in flight against a walk through every row, and on small orders by
hand.
"""

import numpy as np
import pytest

from partopt.schedules import SCHEDULES, order, refusal
from partopt.schedules.layout import Layout
from partopt.schedules.order import in_flight, in_flight_by_stage
from tests.schedules.executed import built, chunks, straight


def walked(given, stage=None):
    """The largest number of microbatches between their forward and their backward on each rank, of
    one stage or of all.
    """
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
            if stage in (None, int(of)):
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
                held = in_flight_by_stage(given)
                expected = {
                    (rank, s): walked(given, s)[rank]
                    for rank in range(P)
                    for s in {*given.stage.tolist()}
                }
                assert {(r, s): n for r, s, n in zip(*held, strict=True)} == {
                    key: n for key, n in expected.items() if n
                }


def test_unequal_replicas():
    layout = straight("pipedream", [3, 1], 9)
    held = in_flight_by_stage(order("pipedream", layout))
    assert [each.tolist() for each in held] == [[0, 1, 2, 3], [0, 0, 0, 1], [2, 2, 2, 1]]


def test_chunks_of_a_device_are_counted_apart_and_together():
    given = built("interleaved", 2, 2, 4)
    assert in_flight(given).tolist() == [5, 3]
    held = in_flight_by_stage(given)
    assert list(zip(held.rank.tolist(), held.stage.tolist(), held.most.tolist(), strict=True)) == [
        (0, 0, 4),
        (0, 2, 2),
        (1, 1, 3),
        (1, 3, 1),
    ]


def test_ranks_without_work_hold_nothing():
    given = order("1f1b", Layout([[1], [3]], 5, 2))
    assert in_flight(given).tolist() == [0, 2, 0, 1, 0]
    assert in_flight_by_stage(given).rank.tolist() == [1, 3]


def test_a_replica_without_microbatches_holds_none():
    assert in_flight(order("gpipe", straight("gpipe", [3], 2))).tolist() == [1, 1, 0]
    assert np.array_equal(
        in_flight_by_stage(order("gpipe", straight("gpipe", [3], 2))).most, [1, 1, 0]
    )
