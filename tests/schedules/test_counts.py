import pytest

from partopt.schedules import schedule
from partopt.schedules.one_f_one_b import blocking_warmups, noam


def warmups(name, replicas, microbatches):
    return [schedule(name).counts(s, replicas, microbatches).warmup for s in range(len(replicas))]


@pytest.mark.parametrize(
    "devices, input_replicas, expected", [(4, 1, 4), (16, 15, 2), (4, 3, 2), (8, 8, 1)]
)
def test_noam_is_devices_over_input_replicas_rounded_up(devices, input_replicas, expected):
    assert noam(devices, input_replicas) == expected


@pytest.mark.parametrize(
    "name, replicas, microbatches, expected",
    [
        ("pipedream", [1, 1, 1, 1], None, [4, 3, 2, 1]),
        ("pipedream", [3, 1], None, [2, 1]),
        ("pipedream", [2, 1, 1], None, [2, 2, 1]),
        ("pipedream", [1, 2], None, [3, 1]),
        ("pipedream-2bw", [1, 1], None, [2, 1]),
        ("1f1b", [1, 1, 1, 1], 8, [4, 3, 2, 1]),
        ("1f1b", [1, 1, 1, 1], 2, [2, 2, 2, 1]),
        ("1f1b", [2, 2], 8, [2, 1]),
        ("gpipe", [1, 1], 8, [8, 8]),
        ("gpipe", [2, 2], 8, [4, 4]),
        ("naive", [1, 1], 8, [1, 1]),
        ("1f1b-eager", [1, 1, 1, 1], 16, [7, 5, 3, 1]),
        ("1f1b-eager", [1, 1, 1, 1], 4, [4, 4, 3, 1]),
        ("1f1b-eager", [2, 2, 2], 12, [5, 3, 1]),
        ("1f1b-eager", [3, 1], 12, [2, 1]),
        ("1f1b-eager", [1, 2], 12, [5, 1]),
        ("zb-h1", [1, 1, 1], 12, [3, 3, 3]),
        ("zb-h1", [1, 1, 1], 2, [2, 2, 2]),
    ],
)
def test_microbatches_in_flight_by_schedule(name, replicas, microbatches, expected):
    counts = [schedule(name).counts(s, replicas, microbatches) for s in range(len(replicas))]
    assert [own.held for own in counts] == expected


def test_noam_is_what_the_first_stage_holds():
    for replicas in ([1, 1], [3, 1], [15, 1], [2, 1, 1], [4, 3, 2]):
        assert schedule("pipedream").counts(0, replicas, None).held == noam(
            sum(replicas), replicas[0]
        )


def test_warmup_is_the_downstream_devices_less_one_over_the_replicas_rounded_down():
    for replicas in ([1, 1, 1], [3, 1], [2, 1, 1], [1, 2], [5, 2, 3]):
        expected = [(sum(replicas[s:]) - 1) // replicas[s] for s in range(len(replicas))]
        assert [
            schedule("pipedream").counts(s, replicas, None).warmup for s in range(len(replicas))
        ] == expected


def test_waiting_for_all_reduces_may_need_a_longer_warmup():
    assert blocking_warmups([1, 1, 1]) == [2, 1, 0]
    assert blocking_warmups([2, 1, 1]) == [1, 1, 0]
    assert blocking_warmups([15, 1]) == [1, 0]
    assert blocking_warmups([1, 3, 1]) == [5, 1, 0]
    assert blocking_warmups([2, 3, 1]) == [3, 1, 0]


def test_gpipe_forwards_everything_first():
    assert schedule("gpipe").counts(0, [1, 1], 8).warmup == 8


def test_the_eager_warmup_is_twice_the_devices_downstream():
    assert warmups("1f1b-eager", [1, 1, 1, 1], 16) == [
        6,
        4,
        2,
        0,
    ]
    assert warmups("1f1b-eager", [2, 1, 1], 16) == [2, 2, 0]


def test_interleaving_four_stages_with_two_chunks_each():
    """M = 8, v = 2, S = 4: 2(S-1-s) + (v-1)S + 1, at most Mv = 16."""
    assert [schedule("interleaved").in_flight(p, 4, 2, 8) for p in range(4)] == [11, 9, 7, 5]
    assert schedule("interleaved").in_flight(0, 4, 2, 4) == 8
