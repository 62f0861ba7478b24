"""Which part of a timeline is drawn, and that nothing is drawn which does not happen there."""

import itertools
import re

import click
import pytest
from msgspec.structs import replace

from partopt.cost.plan import under
from partopt.report.gantt import render
from partopt.schedules.order import KINDS
from partopt.simulator.document import drawn_timeline, drawn_windows
from partopt.simulator.execution import execute
from partopt.simulator.timeline import exchanges, slots
from partopt.units import parse_seconds
from tests.helpers import flat
from tests.report.timelines import example, plan_of


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
    page = click.unstyle(render(drawn, width, ascii_only=True))
    ranks = re.findall(r"^ *([0-9]+)(?:\S* x\S+)?  (.*?)(?: +[0-9]+%)?$", page, re.MULTILINE)
    rows = {int(rank): text.split(":") if len(windows) > 1 else [text] for rank, text in ranks}
    return execution, drawn, page, rows


def runs(text):
    """`F12--B1` as its actions: letter, number, from and to which column."""
    for found in re.finditer(r"([A-Za-z])([0-9]*)-*", text):
        yield found[1], found[2], found.start(), found.end()


@pytest.mark.parametrize("width", [60, 80, 150])
@pytest.mark.parametrize("whole", [False, True])
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
                times = [window.begin_s + cell * n for n in range(first, last)]
                kind, odd = KINDS.index(letter.upper()), letter.islower()
                alike = (own.kind == kind) & (own.chunk % 2 == odd)
                if number:
                    alike &= own.microbatch == int(number)
                begins, stops = own.start[alike], own.end[alike]
                if letter == "A":
                    begins, stops = starts, ends
                for time in times:
                    over = (begins < time + cell + near) & (stops > time - near)
                    assert over.any(), (rank, letter + number, time)
                    seen += 1
    assert seen > 20


@pytest.mark.parametrize(
    ("case", "names"),
    [
        ("1f1b", ["beginning", "steady", "end"]),
        ("short", ["all"]),
        ("deep", ["beginning", "middle", "end"]),
        ("gpipe", ["beginning", "middle", "end"]),
        ("interleaved", ["beginning", "steady", "end"]),
        ("zbv", ["beginning", "steady", "end"]),
        ("dualpipe", ["beginning", "steady", "end"]),
        ("replicas", ["beginning", "steady", "end"]),
        ("pipedream", ["beginning", "steady"]),
    ],
)
def test_a_long_timeline_is_its_beginning_a_part_of_its_middle_and_its_end(case, names):
    execution, drawn, page, _ = page_of(case, 80)
    windows = drawn.windows
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


def test_a_heading_says_from_when_to_when():
    _, drawn, page, _ = page_of("1f1b", 80)
    written = re.findall(r"([0-9.]+)-([0-9.]+) (ms|s)", page.splitlines()[1])
    for window, (begin, end, unit) in zip(drawn.windows, written, strict=True):
        near = (window.end_s - window.begin_s) / 20
        assert parse_seconds(f"{begin} {unit}") == pytest.approx(window.begin_s, abs=near)
        assert parse_seconds(f"{end} {unit}") == pytest.approx(window.end_s, abs=near)


def test_a_wider_drawing_shows_more():
    execution = execute(under(CASES["1f1b"]()))
    narrow, wide = (drawn_windows(execution, columns) for columns in (68, 300))
    assert wide[0].end_s > 2 * narrow[0].end_s
    assert [each.what for each in drawn_windows(execution, 1300)] == ["all"]
