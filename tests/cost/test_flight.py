import pytest

from partopt.cost.flight import (
    blocking_warmups,
    chunks_in_flight,
    in_flight,
    noam,
    warmup,
    weight_versions,
)


@pytest.mark.parametrize(
    "devices, input_replicas, expected", [(4, 1, 4), (16, 15, 2), (4, 3, 2), (8, 8, 1)]
)
def test_noam_is_devices_over_input_replicas_rounded_up(devices, input_replicas, expected):
    assert noam(devices, input_replicas) == expected


@pytest.mark.parametrize(
    "schedule, replicas, microbatches, expected",
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
def test_microbatches_in_flight_by_schedule(schedule, replicas, microbatches, expected):
    assert [
        in_flight(schedule, s, replicas, microbatches) for s in range(len(replicas))
    ] == expected


def test_noam_is_what_the_first_stage_holds():
    for replicas in ([1, 1], [3, 1], [15, 1], [2, 1, 1], [4, 3, 2]):
        assert in_flight("pipedream", 0, replicas, None) == noam(sum(replicas), replicas[0])


def test_warmup_is_the_downstream_devices_less_one_over_the_replicas_rounded_down():
    for replicas in ([1, 1, 1], [3, 1], [2, 1, 1], [1, 2], [5, 2, 3]):
        expected = [(sum(replicas[s:]) - 1) // replicas[s] for s in range(len(replicas))]
        assert [warmup("pipedream", s, replicas, None) for s in range(len(replicas))] == expected


def test_waiting_for_all_reduces_may_need_a_longer_warmup():
    assert blocking_warmups([1, 1, 1]) == [2, 1, 0]
    assert blocking_warmups([2, 1, 1]) == [1, 1, 0]
    assert blocking_warmups([15, 1]) == [1, 0]
    assert blocking_warmups([1, 3, 1]) == [5, 1, 0]
    assert blocking_warmups([2, 3, 1]) == [3, 1, 0]


def test_gpipe_forwards_everything_first():
    assert warmup("gpipe", 0, [1, 1], 8) == 8


def test_the_eager_warmup_is_twice_the_devices_downstream():
    assert [warmup("1f1b-eager", s, [1, 1, 1, 1], 16) for s in range(4)] == [6, 4, 2, 0]
    assert [warmup("1f1b-eager", s, [2, 1, 1], 16) for s in range(3)] == [2, 2, 0]


def test_interleaving_four_stages_with_two_chunks_each():
    """M = 8, v = 2, S = 4: 2(S-1-s) + (v-1)S + 1, at most Mv = 16."""
    assert [chunks_in_flight("interleaved", p, 4, 2, 8) for p in range(4)] == [11, 9, 7, 5]
    assert chunks_in_flight("interleaved", 0, 4, 2, 4) == 8


def test_weight_versions():
    assert [
        weight_versions(schedule, 3)
        for schedule in ("pipedream", "pipedream-2bw", "1f1b", "gpipe", "naive")
    ] == [3, 2, 1, 1, 1]
