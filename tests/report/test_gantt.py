"""Timelines in characters: what is drawn, and that nothing is drawn that does not happen."""

import itertools
import re
import time

import click
import numpy as np
import pytest
from msgspec.structs import replace

from partopt.cost.pricing import under
from partopt.documents.actions import KINDS, B, F
from partopt.documents.simulation import DrawnWindow
from partopt.report.gantt import render
from partopt.report.looks import tick_label, ticks
from partopt.report.text import page_style
from partopt.schedules.order import Order
from partopt.simulator.execution import execute
from partopt.simulator.timeline import (
    Collectives,
    Timeline,
    Transfers,
    drawn_ranks,
    exchanges,
    slots,
)
from partopt.units import parse_seconds
from partopt.what_if.document import drawn_timeline, drawn_windows
from tests.helpers import flat
from tests.report.timelines import example, plan_of, simulated


def drawn(timeline, window=None):
    begin, end = window or (0.0, float(timeline.makespan))
    return drawn_timeline(timeline, [DrawnWindow(what="all", begin_s=begin, end_s=end)])


def picture(timeline, window=None, **options):
    with page_style(**{"ascii_only": True} | options):
        return click.unstyle(render(drawn(timeline, window))).splitlines()


def fast(schedule, P, M, **options):
    """A pipeline whose messages and optimizer take next to no time."""
    return example(schedule, P, M, topology=flat(P, 1e15), **({"optimizer_s": 0.0} | options))[1]


def long_timeline(ranks, microbatches):
    """Ranks that do F B F B .. without a pause."""
    count, length = ranks * microbatches * 2, 2 * microbatches
    kind = np.tile(np.array([F, B], np.int8), count // 2)
    stage = np.repeat(np.arange(ranks, dtype=np.int32), length)
    microbatch = np.tile(np.repeat(np.arange(microbatches, dtype=np.int32), 2), ranks)
    joined, rows = np.zeros(count, np.bool_), np.arange(ranks + 1) * length
    start, nothing = np.tile(np.arange(length, dtype=np.float64), ranks), np.zeros(0)
    order = Order(kind, stage, microbatch, joined, rows)
    transfers = Transfers(*[nothing] * 7)
    return Timeline(order, start, start + 1, lambda: transfers, Collectives(*[nothing] * 4))


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
    options = {"parameter_bytes": 10**6, "optimizer_s": 0.0}
    plan = plan_of("1f1b", [[0, 1], [2, 3]], 4, topology=flat(4, 1e9), **options)
    row = picture(simulated(plan, 4), width=80)[1][6:].split()[0]
    assert row == "F0----F2----............B0----------......B2----------AAAAAA."
    blocking = {"allreduce": "blocking", "topology": flat(3, 1e9), **options}
    plan = plan_of("pipedream", [[0, 1], [2]], None, **blocking)
    assert "A" in picture(simulated(plan, 8), width=110)[1]
    # idle ranks are left out
    rows = picture(simulated(plan_of("1f1b", [[0], [2]], 2), 2))[1:3]
    assert [line.split()[0] for line in rows] == ["0", "2"]


def test_where_names_do_not_fit_letters_stand_in_proportion_to_time():
    timeline = fast("1f1b", P=4, M=400)
    row = picture(timeline)[1][6:-5]
    assert len(row) == 68 + 1
    assert row.count("F") == pytest.approx(69 / 3, abs=2)
    assert row.count("B") == pytest.approx(69 * 2 / 3, abs=2)


@pytest.mark.slow
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
    with page_style(colour=True):
        coloured = render(drawn(timeline))
    assert "\x1b[38;5;16m\x1b[48;5;117mF0" in coloured
    plain = [line.replace("-", " ") for line in picture(timeline)]
    assert click.unstyle(coloured).replace("·", ".").splitlines() == plain
    first, rest = render(drawn(timeline)).split("\n", 1)
    assert first.startswith("\x1b[1m") and "\x1b" not in rest  # only the heading is styled
    ascii_only, other = picture(timeline), picture(timeline, ascii_only=False)
    assert "\n".join(ascii_only).isascii() and not "\n".join(other).isascii()
    assert [len(line) for line in ascii_only] == [len(line) for line in other]


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
    assert render(drawn(long_timeline(2, 0))) == "nothing happens"


def test_too_many_actions_are_left_out():
    timeline = long_timeline(4, 10)
    # and an eighth of the window more, in which 2 actions of each rank begin
    for end, most in ((20.0, 80), (10.0, 48)):
        windows = [DrawnWindow(what="beginning", begin_s=0.0, end_s=end)]
        assert drawn_timeline(timeline, windows, limit=most) is not None
        assert drawn_timeline(timeline, windows, limit=most - 1) is None


@pytest.mark.slow
def test_millions_of_actions_are_drawn_in_seconds():
    timeline = long_timeline(1000, 1000)
    began = time.perf_counter()
    render(drawn(timeline))
    assert time.perf_counter() - began < 5


def test_ticks_are_round_and_inside_and_written_short():
    found = ticks(0.0, 0.033, 5)
    assert [label for _, label in found] == ["0 s", "10 ms", "20 ms", "30 ms"]
    assert [time for time, _ in found] == pytest.approx([0.0, 0.01, 0.02, 0.03])
    for end in (1e-9, 3.7e-5, 0.99, 1.0, 12345.6):
        inside = [time for time, _ in ticks(0.0, end, 6)]
        assert 2 <= len(inside) <= 7
        assert inside[-1] <= end * (1 + 1e-9)
    for seconds, label in {0: "0 s", 0.0015: "1.5 ms", 100: "100 s", 2e-6: "2 us"}.items():
        assert tick_label(seconds) == label


def test_ranks_that_do_the_same_share_a_line():
    timeline = drawn(fast("gpipe", P=2, M=2))
    one, two = timeline.ranks
    copies = [replace(one, rank=n) for n in range(4)]
    ranks = [*copies, replace(two, rank=4)]
    with page_style(ascii_only=True):
        lines = render(replace(timeline, ranks=ranks)).splitlines()
        alone = render(timeline).splitlines()
    assert [line.strip().split("  ")[0] for line in lines[1:3]] == ["0-3 x4", "4"]
    assert [line.split()[-1] for line in lines[1:3]] == [line.split()[-1] for line in alone[1:3]]
    scattered = [copies[0], two, copies[3]]
    lines = render(replace(timeline, ranks=scattered)).splitlines()
    assert lines[1].startswith("0.. x2  ")


def unequal():
    """A model of 84 layers, cut into 19, 20, 22 and 23 of them."""
    plan = example("1f1b", P=4, M=1024, topology=flat(4, 1e15))[0]
    stages = [
        replace(stage, forward_s=3.1e-3 * layers, backward_s=8.3e-3 * layers)
        for stage, layers in zip(plan.stages, (19, 20, 22, 23), strict=True)
    ]
    return replace(plan, stages=stages)


CASES = {
    "unequal": unequal,
    "1f1b": lambda: example("1f1b", P=4, M=400)[0],
    "short": lambda: example("1f1b", P=3, M=7)[0],
    "deep": lambda: example("1f1b", P=24, M=10, topology=flat(24, 1e15), forward_s=1.3e-3)[0],
    "gpipe": lambda: example("gpipe", P=4, M=100, recompute=True)[0],
    "interleaved": lambda: example("interleaved", P=4, M=64, v=3, topology=flat(4, 1e15))[0],
    "zbv": lambda: example("zbv", P=4, M=64, backward_s=2.3e-3)[0],
    "dualpipe": lambda: example("dualpipe", P=4, M=64)[0],
    "replicas": lambda: plan_of("1f1b", [[0, 1, 2, 3, 4], [5]], 100, topology=flat(6, 1e6)),
    "pipedream": lambda: plan_of("pipedream", [[0, 1, 2, 3, 4, 5, 6], [7, 8]], None),
    "slow network": lambda: example("1f1b", P=4, M=90, topology=flat(4, 1000))[0],
}


def page_of(case, width, whole=False):
    """An execution, what is drawn of it, and its page: the cells of each rank in each window."""
    execution = execute(under(CASES[case]()))
    windows = drawn_windows(execution, 10**9 if whole else 68)
    drawn = drawn_timeline(execution.timeline, windows)
    with page_style(width=width, ascii_only=True):
        page = click.unstyle(render(drawn))
    ranks = re.findall(r"^ *([0-9]+)(?:\S* x\S+)?  (.*?)(?: +[0-9]+%)?$", page, re.MULTILINE)
    rows = {int(rank): text.split(":") if len(windows) > 1 else [text] for rank, text in ranks}
    return execution, drawn, page, rows


def runs(text):
    """`F12--B1` as its actions: letter, number, from and to which column."""
    for found in re.finditer(r"([A-Za-z])([0-9]*)-*", text):
        yield found[1], found[2], found.start(), found.end()


@pytest.mark.parametrize("width, whole", [(60, False), (80, True), (150, False)])
@pytest.mark.parametrize("case", CASES)
def test_every_character_is_an_action_of_its_rank_at_its_time(case, whole, width):
    execution, drawn, page, rows = page_of(case, width, whole)
    cell = parse_seconds(re.search(r"a\s+character\s+is\s+(\S+\s\S+)", page)[1])
    seen = 0
    for rank, parts in rows.items():
        own, (starts, ends) = slots(execution.timeline, rank), exchanges(execution.timeline, rank)
        for window, text in zip(drawn.windows, parts, strict=True):
            for letter, number, first, last in runs(text):
                near = 0.02 * cell * last  # as its seconds are written
                kind, odd = KINDS.index(letter.upper()), letter.islower()
                alike = (own.kind == kind) & (own.chunk % 2 == odd)
                if number:
                    alike &= own.microbatch == int(number)
                begins, stops = own.start[alike], own.end[alike]
                if letter == "A":
                    begins, stops = starts, ends
                for at in (window.begin_s + cell * n for n in range(first, last)):
                    over = (begins < at + cell + near) & (stops > at - near)
                    assert over.any(), (rank, letter + number, at)
                    seen += 1
    assert seen > 20


PARTS = {name: ["beginning", "steady", "end"] for name in ("1f1b", "interleaved", "zbv")}
PARTS |= {name: ["beginning", "steady", "end"] for name in ("dualpipe", "replicas")}
PARTS |= {name: ["beginning", "middle", "end"] for name in ("deep", "gpipe")}
PARTS |= {"short": ["all"], "pipedream": ["beginning", "steady"]}


@pytest.mark.parametrize("case", PARTS)
def test_a_long_timeline_is_its_beginning_a_part_of_its_middle_and_its_end(case):
    execution, drawn, page, _ = page_of(case, 80)
    windows, names = drawn.windows, PARTS[case]
    assert [each.what for each in windows] == names
    assert windows[0].begin_s == 0
    if execution.steady is None:
        assert windows[-1].end_s == execution.makespan_s
    assert all(a.end_s <= b.begin_s for a, b in itertools.pairwise(windows))
    lengths = [each.end_s - each.begin_s for each in windows]
    assert lengths == pytest.approx([lengths[0]] * len(windows))
    if len(names) > 1:
        assert page.splitlines()[0].replace(":", " ").split() == names
        assert "BUSY" not in page
        # the heading says from when to when
        written = re.findall(r"([0-9.]+)-([0-9.]+) (ms|s)", page.splitlines()[1])
        for window, (begin, end, unit) in zip(windows, written, strict=True):
            near = (window.end_s - window.begin_s) / 20
            assert parse_seconds(f"{begin} {unit}") == pytest.approx(window.begin_s, abs=near)
            assert parse_seconds(f"{end} {unit}") == pytest.approx(window.end_s, abs=near)
        if case == "1f1b":  # a wider drawing shows more
            assert drawn_windows(execution, 300)[0].end_s > 2 * windows[0].end_s
            assert [each.what for each in drawn_windows(execution, 1300)] == ["all"]
