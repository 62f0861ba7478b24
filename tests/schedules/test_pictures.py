"""Orders as pictures: a line a rank, `F3&B1` for two that run at once, stages named where a rank
holds several.
"""

from pathlib import Path

import pytest

from partopt.errors import PartoptError
from partopt.schedules import SCHEDULES, order, refusal, schedule
from partopt.schedules.layout import Layout
from tests.schedules.executed import built, picture, straight

PICTURES = Path(__file__).parent / "pictures"


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_order_is_that_of_the_picture(name):
    """`pictures/NAME.txt`: P, v and M, then a line a rank, by hand or checked against the paper."""
    path = PICTURES / f"{name}.txt"
    assert path.exists(), f"draw it by hand: {path.relative_to(PICTURES.parent)}"
    sizes, *rows = path.read_text().splitlines()
    assert picture(built(name, *map(int, sizes.split()))) == rows


def test_zbv_two_devices_two_chunks_two_microbatches():
    assert picture(built("zbv", 2, 2, 2)) == [
        "0F0 0F1 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 0I1 0W1",
        "1F0 2F0 1F1 2F1 2I0 2W0 1I0 1W0 2I1 2W1 1I1 1W1",
    ]


def test_gpipe_recomputes_before_every_backward():
    assert picture(order("gpipe", straight("gpipe", [1, 1], 2, recompute=[True, False]))) == [
        "F0 F1 R0 B0 R1 B1",
        "F0 F1 B0 B1",
    ]


def test_eager_1f1b_takes_the_warmup_that_it_is_given():
    assert picture(order("1f1b-eager", straight("1f1b-eager", [1, 1], 3, warmup=[1, 0]))) == [
        "F0 F1 B0 F2 B1 B2",
        "F0 B0 F1 B1 F2 B2",
    ]
    assert picture(order("1f1b-eager", straight("1f1b-eager", [1, 1], 3, warmup=[2, 0]))) == [
        "F0 F1 F2 B0 B1 B2",
        "F0 B0 F1 B1 F2 B2",
    ]


def test_pipedream_exchanges_after_every_whole_round():
    assert picture(order("pipedream", straight("pipedream", [2, 1], 5))) == [
        "F0 F2 B0 A0 F4 B2 A1 B4",
        "F1 F3 B1 A0 B3 A1",
        "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4",
    ]


def test_1f1b_exchanges_and_updates_once_an_iteration():
    assert picture(order("1f1b", straight("1f1b", [2, 1], 4)), updates=True) == [
        "F0 F2 B0 B2 A0 U",
        "F1 F3 B1 B3 A0 U",
        "F0 B0 F1 B1 F2 B2 F3 B3 U",
    ]


def test_a_replica_without_microbatches_exchanges_all_the_same():
    assert picture(order("1f1b", straight("1f1b", [3], 2)), updates=True) == [
        "F0 B0 A0 U",
        "F1 B1 A0 U",
        "A0 U",
    ]


def test_eager_1f1b_shares_its_warmup_among_replicas():
    assert picture(order("1f1b-eager", straight("1f1b-eager", [2, 1], 8))) == [
        "F0 F2 B0 F4 B2 F6 B4 B6 A0",
        "F1 F3 B1 F5 B3 F7 B5 B7 A0",
        "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7",
    ]


def test_interleaved_pipelines_side_by_side_take_every_other_microbatch():
    assert picture(built("interleaved", 2, 2, 4, d=2)) == [
        "0F0 0F2 2F0 2F2 2B0 2B2 2A0 0B0 0B2 0A0",
        "0F1 0F3 2F1 2F3 2B1 2B3 2A0 0B1 0B3 0A0",
        "1F0 1F2 3F0 3B0 3F2 3B2 3A0 1B0 1B2 1A0",
        "1F1 1F3 3F1 3B1 3F3 3B3 3A0 1B1 1B3 1A0",
    ]


def test_a_rank_without_work_does_nothing():
    assert picture(order("1f1b", Layout([[0], [2]], 3, 1))) == ["F0 B0", "", "F0 B0"]


@pytest.mark.parametrize(
    "name, P, v, microbatches, message, hint",
    [
        (
            "interleaved",
            4,
            2,
            9,
            "9 microbatches do not divide into 2 equal groups",
            "for example `microbatches=8`",
        ),
        (
            "interleaved-zb",
            2,
            3,
            7,
            "7 microbatches do not divide into 3 equal groups",
            "multiple of 2",
        ),
        ("dualpipe", 3, 2, 12, "3 devices do not divide into two equal halves", "dualpipev"),
        ("dualpipe", 4, 2, 9, "9 microbatches do not divide among 2 replicas", "multiple of 2"),
        (
            "dualpipe",
            4,
            2,
            6,
            "6 microbatches do not fill two copies of 4 stages",
            "`microbatches=8` or more",
        ),
        ("dualpipev", 4, 2, 7, "7 microbatches do not fill 8 stages", "`microbatches=8` or more"),
        ("zbv", 4, 3, 8, "`chunks=3`: zbv puts 2 on each device", "interleaved"),
        ("1f1b", 4, 2, 8, "`chunks=2`: 1f1b puts 1 on each device", "interleaved"),
        ("1f1b", 4, 1, 0, "`microbatches=0`: must be at least 1", "`microbatches=1` or more"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_is_planned(
    name, P, v, microbatches, message, hint
):
    error = refusal(name, P, v, microbatches)
    assert message in error.message
    assert hint in error.hint


def test_what_can_run_is_not_refused():
    assert refusal("interleaved", 4, 2, 10) is None
    assert refusal("dualpipe", 4, 2, 8) is None
    assert refusal("1f1b", 4, 1, 1) is None


@pytest.mark.parametrize(
    "name, layout, message",
    [
        ("1f1b", Layout([[0], [0]], 1, 4), "one stage on each device"),
        ("zb-h1", Layout([[0, 1], [2]], 3, 4), "equally many replicas"),
        ("interleaved", Layout([[0], [1], [1], [0]], 2, 4), "stages s, s + P"),
        ("zbv", Layout([[0], [1], [0], [1]], 2, 4), "stages s and 2P-1-s"),
        ("dualpipe", Layout([[0], [1]], 2, 4), "two copies of every stage"),
        ("dualpipe", Layout([[0, 1], [1, 0]], 2, 5), "do not divide among 2 replicas"),
    ],
)
def test_stages_that_lie_otherwise_are_refused(name, layout, message):
    with pytest.raises(PartoptError) as found:
        order(name, layout)
    assert message in found.value.message
    assert found.value.hint


def test_an_unknown_schedule_gets_a_suggestion():
    with pytest.raises(PartoptError) as found:
        schedule("dualpipe-v")
    assert found.value.hint == 'did you mean "dualpipev"?'
