import re
from xml.etree import ElementTree

import matplotlib
import pytest
from msgspec.structs import replace

from partopt.cost.pricing import under
from partopt.errors import PartoptError
from partopt.report.looks import COLOURS
from partopt.report.pictures import draw_timeline
from partopt.simulator.execution import execute
from partopt.units import format_bytes
from partopt.what_if import document
from partopt.what_if.document import document_of, figure_timeline
from tests.helpers import flat
from tests.report import timelines
from tests.report.pictures.drawn import Drawn
from tests.report.timelines import plan_of


def example(*args, **options):
    return timelines.example(*args, **options)[0]


CASES = {
    "1f1b": lambda: example("1f1b", P=4, M=8),
    "recomputation": lambda: example("gpipe", P=3, M=4, recompute=True),
    "interleaved": lambda: example("interleaved", P=4, M=8, v=3),
    "zbv": lambda: example("zbv", P=4, M=8),
    "dualpipe": lambda: example("dualpipe", P=4, M=8),
    "large": lambda: example("1f1b", P=16, M=64),
    "wide": lambda: example("gpipe", P=64, M=3),
    "pipedream": lambda: plan_of("pipedream", [[0, 1, 2, 3], [4]], None),
}


def executed(case, **changes):
    """A case, executed; `changes` are fields of its plan."""
    return execute(under(replace(CASES[case](), **changes)))


def render(execution, form, window=None):
    found, shown = document_of(execution, execution.plan, []), figure_timeline(execution, window)
    return draw_timeline(execution.plan, found, shown, form)


def picture_of(execution, window=None):
    from partopt.report.pictures.timeline_sheet import picture

    found = document_of(execution, execution.plan, [])
    return picture(execution.plan, found, figure_timeline(execution, window))


def texts_of(execution, *window):
    svg = render(execution, "svg", *window).decode()
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg)


def drawn(case, monkeypatch, **changes):
    """The figure of a case, laid out."""
    return Drawn(picture_of(executed(case, **changes)), monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("form, first", [("svg", b"<?xml"), ("pdf", b"%PDF"), ("png", b"\x89PNG")])
def test_every_form_is_written_and_is_the_same_each_time(form, first):
    content = render(executed("interleaved"), form)
    assert content.startswith(first)
    assert content == render(executed("interleaved"), form)


@pytest.mark.slow
def test_numbers_are_left_out_where_rows_are_too_low_for_them():
    """Boxes of both are as wide, and 40 ranks share the height of 16."""
    for ranks, numbers in ((16, 16), (40, 0)):
        execution = execute(under(example("1f1b", P=ranks, M=3)))
        assert texts_of(execution, (0.0, 30e-3)).count("1") >= numbers
        assert numbers or "1" not in texts_of(execution, (0.0, 30e-3))


@pytest.mark.slow
def test_a_title_and_a_description_are_said_and_the_title_is_seen():
    name = "a $x$ <&> \x1b_1"
    profile = replace(CASES["1f1b"]().profile, name=name)
    root = ElementTree.fromstring(render(executed("1f1b", profile=profile), "svg"))
    names = [child.tag.rpartition("}")[2] for child in root[:2]]
    assert (names, root.get("role")) == (["title", "desc"], "img")
    assert root[0].text.startswith(r"a $x$ <&> \x1b_1, 1f1b, ")
    assert r"a $x$ <&> \x1b_1" in root[1].text
    seen = [each.text for each in root.iter() if each.tag.endswith("}text")]
    assert root[0].text in " ".join(seen)
    profile = replace(profile, name="y" * 100_000)
    [line] = [text for text in texts_of(executed("1f1b", profile=profile)) if "yyy" in text]
    assert ".." in line and len(line) < 100


@pytest.mark.slow
def test_the_settings_of_a_person_change_nothing(tmp_path):
    execution = executed("1f1b")
    plain = render(execution, "svg")
    with matplotlib.rc_context({"axes.facecolor": "red", "font.size": 20, "svg.fonttype": "path"}):
        assert render(execution, "svg") == plain
        assert matplotlib.rcParams["font.size"] == 20


WIDTHS = {"1f1b": 3.5, "dualpipe": 3.5, "interleaved": 7.2, "large": 7.2}  # inches: columns


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_numbers_are_text_where_they_fit_in_one_column_or_two(case, monkeypatch):
    svg = render(executed(case), "svg")
    assert len(svg) < 1_000_000
    text = re.findall(r"<text[^>]*>([^<]*)</text>", svg.decode())
    assert {"rank", "time", "forward", "idle"} <= set(text)
    assert (text.count("1") > 1) == (case not in ("large", "wide"))
    for limit in (500, 10**9) if case not in ("large", "wide") else (10**9,):
        sheet = drawn(case, monkeypatch, topology=flat(64, memory_bytes=limit))
        assert len(sheet.boxes) > 20
        assert (sheet.overlaps, sheet.outside, sheet.empty) == ([], [], 0)
    if case in WIDTHS:
        assert sheet.figure.get_size_inches()[0] == pytest.approx(WIDTHS[case])


LEGENDS = {
    "1f1b": {"forward", "backward"},
    "recomputation": {"forward", "backward", "recomputation"},
    "zbv": {
        "forward",
        "backward of inputs",
        "backward of weights",
        "every second stage of a rank is darker",
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("case, legend", LEGENDS.items())
def test_the_legend_names_what_appears(case, legend):
    beside = {"rank", "time", "busy", "peak", "optimizer step", "idle"}
    numbers = re.compile(r"[0-9.]+(%| k?B| m?s)?|chain, .*|.*idle [0-9.]+%")
    text = texts_of(executed(case))
    assert {each for each in text if not numbers.fullmatch(each)} == legend | beside


@pytest.mark.slow
def test_the_legend_says_what_estimated_times_rest_on_in_a_line_of_its_own():
    profile = replace(CASES["zbv"]().profile, estimated="H100-80GB")
    measured, estimated = (
        render(each, "svg").decode() for each in (executed("zbv"), executed("zbv", profile=profile))
    )
    assert ">times estimated" not in measured
    assert ">times estimated for H100-80GB: nothing was measured<" in estimated
    heights = [float(re.search(r'height="([0-9.]+)pt"', text)[1]) for text in (measured, estimated)]
    assert heights[1] - heights[0] == pytest.approx(9)  # points: 1/8 inch


def test_all_reduces_beside_compute_are_drawn():
    plan = plan_of("1f1b", [[0, 1], [2, 3]], 4, parameter_bytes=10**6, topology=flat(4, 1e9))
    content = render(execute(under(plan)), "svg").decode()
    assert "all-reduce" in content
    assert COLOURS["A"][0].lower() in content.lower()


@pytest.mark.slow
def test_a_window_is_what_is_drawn():
    execution = executed("1f1b")
    assert "7" in texts_of(execution) and "7" not in texts_of(execution, (0.0, 0.004))
    with pytest.raises(PartoptError, match="nothing to draw"):
        render(execution, "svg", (5.0, 6.0))


@pytest.mark.slow
def test_of_very_many_actions_the_beginning_is_drawn_and_too_much_is_refused(monkeypatch):
    execution = executed("large")
    monkeypatch.setattr(document, "_FIGURE_ACTIONS", 1_000)
    assert any(re.fullmatch(r"the first [0-9.]+ ms of .*", text) for text in texts_of(execution))
    monkeypatch.setattr(document, "_FIGURE_ACTIONS", 10)
    with pytest.raises(PartoptError, match="more than 10 actions is more than anyone can see"):
        render(execution, "svg")


@pytest.mark.slow
def test_more_ranks_than_fit_are_sampled():
    execution = execute(under(example("1f1b", P=100, M=4)))
    assert "64 of 100 ranks are shown, at even distances" in texts_of(execution)


@pytest.mark.slow
def test_rows_end_in_the_share_at_work_and_the_most_memory():
    """1F1B: 8 x 3 ms and a step of 0.5 ms of 33.5 ms; a stage holds 1 to 4 microbatches."""
    execution = executed("1f1b", topology=flat(4, 1e15))
    text = texts_of(execution)
    assert text.count("73%") == 4
    assert {format_bytes(int(each)) for each in execution.peak_memory_bytes} <= set(text)


@pytest.mark.slow
def test_a_rank_that_is_idle_in_the_window_has_its_band(monkeypatch):
    sheet = Drawn(picture_of(executed("1f1b"), (0.0, 5e-4)), monkeypatch)
    [axes] = sheet.figure.axes
    bands = axes.patches[0].get_path().get_extents()
    assert (bands.y0, bands.y1) == pytest.approx((0.08, 3.92))
