"""Orders as pictures: a line a rank, `F3&B1` for two that run at once, stages named where a rank
holds several.
"""

import pytest

from partopt.errors import PartoptError
from partopt.schedules import order, refusal, schedule
from partopt.schedules.layout import Layout
from tests.schedules.executed import built, picture, straight


def test_naive_two_devices_two_microbatches():
    assert picture(built("naive", 2, 1, 2)) == [
        "F0 B0 F1 B1",
        "F0 B0 F1 B1",
    ]


def test_gpipe_two_devices_three_microbatches():
    assert picture(built("gpipe", 2, 1, 3)) == [
        "F0 F1 F2 B0 B1 B2",
        "F0 F1 F2 B0 B1 B2",
    ]


def test_1f1b_three_devices_four_microbatches():
    assert picture(built("1f1b", 3, 1, 4)) == [
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ]


def test_1f1b_eager_three_devices_six_microbatches():
    assert picture(built("1f1b-eager", 3, 1, 6)) == [
        "F0 F1 F2 F3 F4 B0 F5 B1 B2 B3 B4 B5",
        "F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 B4 B5",
        "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5",
    ]


def test_pipedream_two_devices_three_microbatches():
    assert picture(built("pipedream", 2, 1, 3)) == [
        "F0 F1 B0 F2 B1 B2",
        "F0 B0 F1 B1 F2 B2",
    ]


def test_pipedream_2bw_two_devices_three_microbatches():
    assert picture(built("pipedream-2bw", 2, 1, 3)) == [
        "F0 F1 B0 F2 B1 B2",
        "F0 B0 F1 B1 F2 B2",
    ]


def test_interleaved_two_devices_two_chunks_four_microbatches():
    assert picture(built("interleaved", 2, 2, 4)) == [
        "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3",
        "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3",
    ]


def test_zb_h1_three_devices_four_microbatches():
    assert picture(built("zb-h1", 3, 1, 4)) == [
        "F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3",
        "F0 F1 I0 F2 I1 W0 F3 I2 W1 I3 W2 W3",
        "F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3",
    ]


def test_interleaved_zb_two_devices_two_chunks_two_microbatches():
    assert picture(built("interleaved-zb", 2, 2, 2)) == [
        "0F0 0F1 2F0 2F1 2I0 2W0 2I1 2W1 0I0 0W0 0I1 0W1",
        "1F0 1F1 3F0 3I0 3F1 3I1 3W0 1I0 3W1 1I1 1W0 1W1",
    ]


def test_zbv_two_devices_two_chunks_four_microbatches():
    assert picture(built("zbv", 2, 2, 4)) == [
        (
            "0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 3I2 3W2 0I1 0W1 3F3 3I3 "
            "3W3 0I2 0W2 0I3 0W3"
        ),
        (
            "1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1F3 1I1 1W1 2F3 2I2 2W2 1I2 "
            "2I3 1I3 1W2 2W3 1W3"
        ),
    ]


def test_zbv_two_devices_two_chunks_two_microbatches():
    assert picture(built("zbv", 2, 2, 2)) == [
        "0F0 0F1 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 0I1 0W1",
        "1F0 2F0 1F1 2F1 2I0 2W0 1I0 1W0 2I1 2W1 1I1 1W1",
    ]


def test_dualpipe_two_devices_two_chunks_four_microbatches():
    assert picture(built("dualpipe", 2, 2, 4)) == [
        "0F0 1F1 0F2 1B1 1F3&0B0 1B3 1A0 0I2 0W2 0A0",
        "0F1 1F0 0F3 1B0 1F2&0B1 1B2 1A0 0I3 0W3 0A0",
    ]


def test_dualpipev_two_devices_two_chunks_four_microbatches():
    assert picture(built("dualpipev", 2, 2, 4)) == [
        "0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3&3B1 3F2&0B0 3B2 3F3&0B1 3B3 0I2 0W2 0I3 0W3",
        "1F0 2F0 1F1 2F1 1F2 2B0 2F2&1B0 1F3&2B1 2F3&1B1 2B2 1B2 2I3 1I3 2W3 1W3",
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
