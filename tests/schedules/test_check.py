"""Every schedule's orders pass the check, and each way of spoiling one is named."""

import time
from dataclasses import replace

import numpy as np
import pytest

from partopt.errors import PartoptError
from partopt.schedules import SCHEDULES, order, refusal
from partopt.schedules.check import check
from partopt.schedules.layout import Layout
from partopt.schedules.order import KINDS, Order
from tests.schedules.executed import built, chunks, layout_of, straight


def spelled(*rows, joined=()):
    """An order from the names of each rank's actions; `joined` are places in it."""
    names = [name for row in rows for name in row.split()]
    letters = [next(letter for letter in name if letter in KINDS) for name in names]
    parts = [name.split(letter) for name, letter in zip(names, letters, strict=True)]
    return Order(
        np.array([KINDS.index(letter) for letter in letters], dtype=np.int8),
        np.array([int(stage) for stage, _ in parts], dtype=np.int32),
        np.array([int(number or 0) for _, number in parts], dtype=np.int32),
        np.isin(np.arange(len(names)), joined),
        np.cumsum([0, *(len(row.split()) for row in rows)]),
    )


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_passes(name):
    for P in (1, 2, 4):
        for v in chunks(name):
            for M in (1, 2, 3, 8, 12):
                for d in (1, 2):
                    if refusal(name, P, v, M) is None:
                        check(
                            order(name, layout_of(name, P, v, M * d, d)),
                            layout_of(name, P, v, M * d, d),
                        )


def test_unequal_replicas_and_recomputation_pass():
    for name in ("pipedream", "1f1b", "gpipe"):
        layout = straight(name, [3, 1, 2], 7, recompute=[True, False, True])
        check(order(name, layout), layout)


TWO = Layout([[0], [1]], 2, 1)
REPLICATED = Layout([[0, 1]], 2, 2)
ONE = Layout([[0]], 1, 2)


@pytest.mark.parametrize(
    "layout, given, message",
    [
        (TWO, spelled("0F0 0B0", "2F0 1B0"), "rank 1: 2F0 names an unknown stage"),
        (TWO, spelled("0F0 0B0", "1F0 1B3"), "rank 1: 1B3 names an unknown microbatch"),
        (TWO, spelled("0F0 0B0 1F0", "1B0"), "rank 0: 1F0 is on the wrong rank"),
        (REPLICATED, spelled("0F0 0B0 0F1 0B1", ""), "rank 0: 0F1 is on the wrong rank"),
        (
            TWO,
            spelled("0F0 0B0 1U", "1F0 1B0"),
            "rank 0: 1U is on a rank that does not hold the stage",
        ),
        (TWO, spelled("0F0 0F0 0B0", "1F0 1B0"), "rank 0: 0F0 occurs twice"),
        (TWO, spelled("0F0 0B0", "1F0 1B0 1B0"), "rank 1: 1B0 occurs twice"),
        (TWO, spelled("0F0 0B0 0W0", "1F0 1B0"), "rank 0: 0W0 occurs beside a whole backward"),
        (TWO, spelled("0F0 0I0 0B0", "1F0 1B0"), "rank 0: 0I0 occurs beside a whole backward"),
        (TWO, spelled("0F0 0B0", "1B0"), "rank 1: 1F0 is missing"),
        (TWO, spelled("0F0 0B0", "1F0"), "rank 1: 1B0 is missing"),
        (TWO, spelled("0F0 0I0", "1F0 1B0"), "rank 0: 0W0 is missing"),
        (TWO, spelled("0F0 0W0", "1F0 1B0"), "rank 0: 0I0 is missing"),
        (REPLICATED, spelled("0F0 0B0", "0F1"), "rank 1: 0B1 is missing"),
        (TWO, spelled("0F0 0B0", "1B0 1F0"), "rank 1: 1B0 comes before its forward"),
        (TWO, spelled("0I0 0F0 0W0", "1F0 1B0"), "rank 0: 0I0 comes before its forward"),
        (TWO, spelled("0F0 0W0 0I0", "1F0 1B0"), "rank 0: 0W0 comes before the inputs' backward"),
        (TWO, spelled("0R0 0F0 0B0", "1F0 1B0"), "rank 0: 0R0 comes before its forward"),
        (TWO, spelled("0F0 0B0 0R0", "1F0 1B0"), "rank 0: 0B0 comes before its recomputation"),
        (
            ONE,
            spelled("0F0 0F1 0B0 0B1", joined=[0]),
            "rank 0: 0F0 is not joined with the backward",
        ),
        (
            ONE,
            spelled("0F0 0B0 0F1 0B1", joined=[2]),
            "rank 0: 0F1 is not joined with the backward",
        ),
        (
            ONE,
            spelled("0F0 0B0 0F1 0B1", joined=[1]),
            "rank 0: 0B0 is not joined with the backward",
        ),
        (
            ONE,
            spelled("0F0 0F1 0B0 0B1", joined=[3]),
            "rank 0: 0B1 is not joined with the backward",
        ),
        (
            ONE,
            spelled("0F0 0I0 0F1 0W0 0I1 0W1", joined=[2]),
            "rank 0: 0F1 is not joined with the backward",
        ),
        (
            ONE,
            spelled("0F0 0I0 0F1 0I1 0W0 0W1", joined=[1]),
            "rank 0: 0I0 is not joined with the backward",
        ),
        (
            ONE,
            spelled("0F0 0F1 0R0 0B0 0B1", joined=[1]),
            "rank 0: 0F1 is not joined with the backward",
        ),
    ],
)
def test_a_malformed_order_is_refused_by_rank_and_action(layout, given, message):
    with pytest.raises(PartoptError) as found:
        check(given, layout)
    assert found.value.message.startswith(message)
    assert found.value.hint


def test_a_joined_pair_may_be_of_two_microbatches():
    check(spelled("0F0 0F1 0B0 0B1", joined=[1]), ONE)
    check(spelled("0F0 0F1 0I0 0W0 0B1", joined=[1]), ONE)


def test_any_action_left_out_is_missed():
    layout = layout_of("zbv", 2, 2, 5)
    given = built("zbv", 2, 2, 5)
    for action in np.flatnonzero(given.kind != KINDS.index("U")):
        kept = np.arange(len(given.kind)) != action
        rows = given.rows - (given.rows > action)
        spoilt = Order(
            given.kind[kept], given.stage[kept], given.microbatch[kept], given.joined[kept], rows
        )
        with pytest.raises(PartoptError, match="is missing"):
            check(spoilt, layout)


def test_a_million_actions_are_checked_within_seconds():
    layout = layout_of("1f1b", 256, 1, 2048)
    given = order("1f1b", layout)
    start = time.perf_counter()
    check(given, layout)
    assert time.perf_counter() - start < 3.0
    swapped = replace(given, kind=given.kind.copy())
    swapped.kind[-2] = KINDS.index("F")
    with pytest.raises(PartoptError, match="rank 255"):
        check(swapped, layout)
