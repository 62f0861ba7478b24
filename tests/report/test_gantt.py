import time

import click
import msgspec
import numpy as np
import pytest

from partopt.documents.simulation import DrawnWindow
from partopt.report.gantt import render
from partopt.report.looks import tick_label, ticks
from partopt.schedules.order import B, F, Order
from partopt.simulator.document import drawn_timeline
from partopt.simulator.timeline import Collectives, Timeline, Transfers, drawn_ranks
from tests.helpers import flat
from tests.report.timelines import example, plan_of, simulated


def drawn(timeline, window=None):
    begin, end = window or (0.0, float(timeline.makespan))
    return drawn_timeline(timeline, [DrawnWindow(what="all", begin_s=begin, end_s=end)])


def picture(timeline, window=None, **options):
    page = render(drawn(timeline, window), **({"ascii_only": True} | options))
    return click.unstyle(page).splitlines()


def fast(schedule, P, M, **options):
    """A pipeline whose messages and optimizer take next to no time."""
    return example(schedule, P, M, topology=flat(P, 1e15), **({"optimizer_s": 0.0} | options))[1]


def long_timeline(ranks: int, microbatches: int) -> Timeline:
    """Ranks that do F B F B .. without a pause."""
    count = ranks * microbatches * 2
    kind = np.tile(np.array([F, B], np.int8), count // 2)
    stage = np.repeat(np.arange(ranks, dtype=np.int32), 2 * microbatches)
    microbatch = np.tile(np.repeat(np.arange(microbatches, dtype=np.int32), 2), ranks)
    order = Order(
        kind, stage, microbatch, np.zeros(count, np.bool_), np.arange(ranks + 1) * 2 * microbatches
    )
    start = np.tile(np.arange(2 * microbatches, dtype=np.float64), ranks)
    nothing = np.zeros(0)
    return Timeline(order, start, start + 1, Transfers(*[nothing] * 7), Collectives(*[nothing] * 4))


def test_1f1b_reads_like_the_picture_in_its_paper():
    assert picture(fast("1f1b", P=3, M=4), width=60) == [
        "RANK  |0 s                |10 ms           BUSY",
        "   0  F0F1F2........B0--F3B1--..B2--..B3--  67%",
        "   1  ..F0F1....B0--F2B1--F3B2--..B3--....  67%",
        "   2  ....F0B0--F1B1--F2B2--F3B3--........  67%",
        "F forward  B backward  . idle  a character is 500.0 us",
    ]


def test_the_second_chunk_of_a_rank_has_small_letters():
    assert picture(fast("zbv", P=2, M=3), width=60) == [
        "RANK  |0 s                |10 ms             BUSY",
        "   0  F0F1F2f0i0w0f1i1w1I0W0f2i2w2I1W1I2W2..  95%",
        "   1  ..F0f0F1f1i0w0F2I0W0f2i1w1I1i2I2W1w2W2  95%",
        "F forward  I backward of inputs  W backward of weights",
        ". idle  a character is 500.0 us",
        "small letters: a rank's second chunk",
    ]


def test_two_actions_at_once_stand_side_by_side():
    lines = picture(fast("dualpipe", P=2, M=4), width=60)
    assert lines[1] == "   0  F0--f1--F2--b1------f3----B0----b3------I2--W2-- 100%"
    assert lines[-1] == "two at once: side by side"


def test_recomputation_and_the_optimizer_have_their_letters():
    lines = picture(fast("gpipe", P=2, M=2, recompute=True, optimizer_s=1e-3), width=48)
    assert [line[6:-5].rstrip() for line in lines[1:3]] == [
        "F0-F1-R0-.........B0----R1-B1----U--",
        "...F0-F1-R0-B0----R1-B1----U--......",
    ]
    assert "R recomputation" in "\n".join(lines) and "U optimizer step" in "\n".join(lines)


def test_all_reduces_are_seen_where_a_rank_has_nothing_else_to_do():
    plan = plan_of(
        "1f1b", [[0, 1], [2, 3]], 4, parameter_bytes=10**6, topology=flat(4, 1e9), optimizer_s=0.0
    )
    lines = picture(simulated(plan, 4), width=80)
    assert (
        lines[1][6:].split()[0] == "F0----F2----............B0----------......B2----------AAAAAA."
    )
    blocking = plan_of(
        "pipedream",
        [[0, 1], [2]],
        None,
        parameter_bytes=10**6,
        allreduce="blocking",
        topology=flat(3, 1e9),
    )
    assert "A" in picture(simulated(blocking, 8), width=110)[1]


def test_where_names_do_not_fit_letters_stand_in_proportion_to_time():
    timeline = fast("1f1b", P=4, M=400)
    row = picture(timeline)[1][6:-5]
    assert len(row) == 68 + 1
    assert row.count("F") == pytest.approx(69 / 3, abs=2)
    assert row.count("B") == pytest.approx(69 * 2 / 3, abs=2)


@pytest.mark.parametrize("width", [40, 80, 140])
@pytest.mark.parametrize(
    "schedule, P, M", [("gpipe", 4, 8), ("1f1b", 32, 128), ("zbv", 4, 8), ("dualpipe", 8, 20)]
)
def test_no_line_is_wider_than_the_page(schedule, P, M, width):
    for colour in (False, True):
        assert max(map(len, picture(fast(schedule, P, M), width=width, colour=colour))) <= width


def test_a_window_shows_its_part_of_the_time():
    timeline = fast("1f1b", P=2, M=50)
    whole, part = picture(timeline), picture(timeline, window=(0.060, 0.078))
    assert "F20" not in whole[1]
    assert part[0].startswith("RANK  |60 ms")
    assert "B19---F21B20---" in part[1]


def test_colours_are_added_to_the_letters_and_do_not_replace_them():
    timeline = fast("1f1b", P=2, M=3)
    coloured = render(drawn(timeline), colour=True)
    assert "\x1b[38;5;16m\x1b[48;5;117mF0" in coloured
    plain = [line.replace("-", " ") for line in picture(timeline)]
    assert click.unstyle(coloured).replace("·", ".").splitlines() == plain


def test_without_colour_only_the_heading_is_styled():
    first, rest = render(drawn(fast("1f1b", P=2, M=3))).split("\n", 1)
    assert first.startswith("\x1b[1m")
    assert "\x1b" not in rest


def test_ascii_is_ascii_and_the_other_form_is_as_wide():
    timeline = fast("1f1b", P=4, M=8)
    plain, drawn = picture(timeline), picture(timeline, ascii_only=False)
    assert "\n".join(plain).isascii()
    assert not "\n".join(drawn).isascii()
    assert [len(line) for line in plain] == [len(line) for line in drawn]


def test_idle_ranks_are_left_out():
    plan = plan_of("1f1b", [[0], [2]], 2)
    assert [line.split()[0] for line in picture(simulated(plan, 2))[1:3]] == ["0", "2"]


def test_many_ranks_are_sampled_and_a_note_says_so():
    lines = picture(long_timeline(1024, 4))
    assert len(lines) == 1 + 32 + 1 + 1
    assert (lines[1].split()[0], lines[32].split()[0]) == ("0", "1023")
    assert lines[-1] == "32 of 1024 ranks are shown, at even distances"


def test_one_replica_stands_for_all_of_its_stage():
    plan = plan_of("1f1b", [list(range(20)), list(range(20, 40))], 40)
    assert drawn_ranks(simulated(plan, 40).order, 32) == (
        [0, 20],
        "2 of 40 ranks are shown, a replica of each stage",
    )


def test_nothing_to_draw_is_said():
    empty = Order(
        *(np.zeros(0, kind) for kind in (np.int8, np.int32, np.int32, np.bool_)),
        np.zeros(3, np.int64),
    )
    nothing = np.zeros(0)
    still = Timeline(
        empty, nothing, nothing, Transfers(*[nothing] * 7), Collectives(*[nothing] * 4)
    )
    assert render(drawn(still)) == "nothing happens"


def test_too_many_actions_are_left_out():
    timeline = long_timeline(4, 10)
    # and an eighth of the window more, in which 2 actions of each rank begin
    for end, most in ((20.0, 80), (10.0, 48)):
        windows = [DrawnWindow(what="beginning", begin_s=0.0, end_s=end)]
        assert drawn_timeline(timeline, windows, limit=most) is not None
        assert drawn_timeline(timeline, windows, limit=most - 1) is None


def test_millions_of_actions_are_drawn_in_seconds():
    timeline = long_timeline(1000, 1000)
    began = time.perf_counter()
    render(drawn(timeline))
    assert time.perf_counter() - began < 5


@pytest.mark.parametrize(
    "seconds, label",
    [(0, "0 s"), (0.02, "20 ms"), (0.0015, "1.5 ms"), (100, "100 s"), (2e-6, "2 us")],
)
def test_ticks_are_written_short(seconds, label):
    assert tick_label(seconds) == label


def test_ticks_are_round_and_inside():
    assert ticks(0.0, 0.033, 5) == [
        (0.0, "0 s"),
        (pytest.approx(0.01), "10 ms"),
        (pytest.approx(0.02), "20 ms"),
        (pytest.approx(0.03), "30 ms"),
    ]
    for end in (1e-9, 3.7e-5, 0.99, 1.0, 12345.6):
        inside = [time for time, _ in ticks(0.0, end, 6)]
        assert 2 <= len(inside) <= 7
        assert inside[-1] <= end * (1 + 1e-9)


def test_ranks_that_do_the_same_share_a_line():
    timeline = drawn(fast("gpipe", P=2, M=2))
    one, two = timeline.ranks
    copies = [msgspec.structs.replace(one, rank=n) for n in range(4)]
    ranks = [*copies, msgspec.structs.replace(two, rank=4)]
    lines = render(msgspec.structs.replace(timeline, ranks=ranks), ascii_only=True).splitlines()
    alone = render(timeline, ascii_only=True).splitlines()
    assert [line.strip().split("  ")[0] for line in lines[1:3]] == ["0-3 x4", "4"]
    assert [line.split()[-1] for line in lines[1:3]] == [line.split()[-1] for line in alone[1:3]]
    scattered = [copies[0], two, copies[3]]
    lines = render(msgspec.structs.replace(timeline, ranks=scattered)).splitlines()
    assert lines[1].startswith("0.. x2  ")
