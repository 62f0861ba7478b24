"""Every schedule's orders pass the check, and each way of spoiling one is named."""

import time
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from partopt.documents.actions import KINDS
from partopt.errors import PartoptError
from partopt.schedules import SCHEDULES, order, refusal
from partopt.schedules.assemble import check
from partopt.schedules.order import Order, spell
from partopt.schedules.placement import Placement
from tests.schedules.executed import built, chunks, layout_of, spelled, straight


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_passes(name):
    sizes = product((1, 2, 4), chunks(name), (1, 2, 3, 8, 12), (1, 2))
    for P, v, M, d in sizes:
        if refusal(name, P, v, M) is None:
            layout = layout_of(name, P, v, M * d, d)
            check(order(name, layout), layout)
    if SCHEDULES[name].uneven:
        layout = straight(name, [3, 1, 2], 7, recompute=[True, False, True])
        check(order(name, layout), layout)


TWO = Placement([[0], [1]], 2, 1)
REPLICATED = Placement([[0, 1]], 2, 2)
ONE = Placement([[0]], 1, 2)


MALFORMED = [
    (TWO, ["0F0 0B0", "2F0 1B0"], [], "rank 1: 2F0 names an unknown stage"),
    (TWO, ["0F0 0B0", "1F0 1B3"], [], "rank 1: 1B3 names an unknown microbatch"),
    (TWO, ["0F0 0B0 1F0", "1B0"], [], "rank 0: 1F0 is on the wrong rank"),
    (REPLICATED, ["0F0 0B0 0F1 0B1", ""], [], "rank 0: 0F1 is on the wrong rank"),
    (TWO, ["0F0 0B0 1U", "1F0 1B0"], [], "rank 0: 1U is on a rank that does not hold the stage"),
    (TWO, ["0F0 0F0 0B0", "1F0 1B0"], [], "rank 0: 0F0 occurs twice"),
    (TWO, ["0F0 0B0", "1F0 1B0 1B0"], [], "rank 1: 1B0 occurs twice"),
    (TWO, ["0F0 0B0 0W0", "1F0 1B0"], [], "rank 0: 0W0 occurs beside a whole backward"),
    (TWO, ["0F0 0I0 0B0", "1F0 1B0"], [], "rank 0: 0I0 occurs beside a whole backward"),
    (TWO, ["0F0 0B0", "1B0"], [], "rank 1: 1F0 is missing"),
    (TWO, ["0F0 0B0", "1F0"], [], "rank 1: 1B0 is missing"),
    (TWO, ["0F0 0I0", "1F0 1B0"], [], "rank 0: 0W0 is missing"),
    (TWO, ["0F0 0W0", "1F0 1B0"], [], "rank 0: 0I0 is missing"),
    (REPLICATED, ["0F0 0B0", "0F1"], [], "rank 1: 0B1 is missing"),
    (TWO, ["0F0 0B0", "1B0 1F0"], [], "rank 1: 1B0 comes before its forward"),
    (TWO, ["0I0 0F0 0W0", "1F0 1B0"], [], "rank 0: 0I0 comes before its forward"),
    (TWO, ["0F0 0W0 0I0", "1F0 1B0"], [], "rank 0: 0W0 comes before the inputs' backward"),
    (TWO, ["0R0 0F0 0B0", "1F0 1B0"], [], "rank 0: 0R0 comes before its forward"),
    (TWO, ["0F0 0B0 0R0", "1F0 1B0"], [], "rank 0: 0B0 comes before its recomputation"),
    *(
        (ONE, [row], [place], f"rank 0: {name} is not joined with the backward")
        for row, place, name in (
            ("0F0 0F1 0B0 0B1", 0, "0F0"),
            ("0F0 0B0 0F1 0B1", 2, "0F1"),
            ("0F0 0B0 0F1 0B1", 1, "0B0"),
            ("0F0 0F1 0B0 0B1", 3, "0B1"),
            ("0F0 0I0 0F1 0W0 0I1 0W1", 2, "0F1"),
            ("0F0 0I0 0F1 0I1 0W0 0W1", 1, "0I0"),
            ("0F0 0F1 0R0 0B0 0B1", 1, "0F1"),
        )
    ),
]


@pytest.mark.parametrize("layout, rows, joined, message", MALFORMED)
def test_a_malformed_order_is_refused_by_rank_and_action(layout, rows, joined, message):
    with pytest.raises(PartoptError) as found:
        check(spelled(*rows, joined=joined), layout)
    assert found.value.message.startswith(message)
    assert found.value.hint


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "rank 0: 0F0 is missing"),
        ("FB", "rank 0: 0F1 is missing"),
        ("FFB", "rank 0: 0B1 is missing"),
        ("BFFB", "rank 0: 0B0 comes before its forward"),
        ("FFBBFB", "rank 0: 0F2 names an unknown microbatch"),
    ],
)
def test_a_row_that_a_schedule_of_ones_own_writes_wrongly_is_refused(text, message, monkeypatch):
    mine = replace(SCHEDULES["gpipe"], name="mine", row=lambda place: spell(text))
    monkeypatch.setitem(SCHEDULES.builtin, "mine", mine)
    with pytest.raises(PartoptError) as found:
        check(order("mine", ONE), ONE)
    assert found.value.message.startswith(message)


def test_a_joined_pair_may_be_of_two_microbatches():
    check(spelled("0F0 0F1 0B0 0B1", joined=[1]), ONE)
    check(spelled("0F0 0F1 0I0 0W0 0B1", joined=[1]), ONE)


def test_any_action_left_out_is_missed():
    given = built("zbv", 2, 2, 5)
    for action in np.flatnonzero(given.kind != KINDS.index("U")):
        kept = np.arange(len(given.kind)) != action
        columns = given.kind, given.stage, given.microbatch, given.joined
        spoilt = Order(*(each[kept] for each in columns), given.rows - (given.rows > action))
        with pytest.raises(PartoptError, match="is missing"):
            check(spoilt, layout_of("zbv", 2, 2, 5))


@pytest.mark.slow
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
