import re
import subprocess
import sys
from xml.etree import ElementTree

import pytest
from msgspec.structs import replace

from partopt.cost.plan import under
from partopt.errors import PartoptError
from partopt.report import figure
from partopt.report.actions import COLOURS, DARKENED
from partopt.report.pictures import look
from partopt.simulator.document import drawn_timeline, drawn_windows
from partopt.simulator.execution import execute
from partopt.units import format_bytes
from tests.helpers import ROOT, flat
from tests.report import timelines
from tests.report.timelines import plan_of

matplotlib = pytest.importorskip("matplotlib", reason="figures are an extra")


def example(*args, **options):
    return timelines.example(*args, **options)[0]


CASES = {
    "1f1b": lambda: example("1f1b", P=4, M=8),
    "recomputation": lambda: example("gpipe", P=3, M=4, recompute=True),
    "interleaved": lambda: example("interleaved", P=4, M=8, v=3),
    "zbv": lambda: example("zbv", P=4, M=8),
    "dualpipe": lambda: example("dualpipe", P=4, M=8),
    "large": lambda: example("1f1b", P=32, M=128),
    "wide": lambda: example("gpipe", P=64, M=3),
    "pipedream": lambda: plan_of("pipedream", [[0, 1, 2, 3], [4]], None),
}


def executed(case, **changes):
    """A case, executed; `changes` are fields of its plan."""
    return execute(under(replace(CASES[case](), **changes)))


def texts_of(execution, *window):
    svg = figure.render(execution, "svg", *window).decode()
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg)


def sheet_of(case, **changes):
    """The figure of a case, laid out."""
    execution = executed(case, **changes)
    drawn = drawn_timeline(execution.timeline, drawn_windows(execution, 140), 64)
    with look.style():
        sheet = figure._sheet(execution, drawn, look.Heading(("chain", "1f1b"), "")).figure
        sheet.draw_without_rendering()
    return sheet


def lightness(colour):
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return 0.3 * red + 0.59 * green + 0.11 * blue


@pytest.mark.parametrize("form, first", [("svg", b"<?xml"), ("pdf", b"%PDF"), ("png", b"\x89PNG")])
@pytest.mark.parametrize("case", ["1f1b", "interleaved", "dualpipe"])
def test_every_form_is_written_and_is_the_same_each_time(case, form, first):
    content = figure.render(executed(case), form)
    assert content.startswith(first)
    assert content == figure.render(executed(case), form)


def test_the_extension_chooses_the_form():
    assert [look.form_of(f"a.{each}") for each in ("SVG", "pdf", "b.png")] == ["svg", "pdf", "png"]
    with pytest.raises(PartoptError, match=r"a.gif: unsupported format .gif"):
        look.form_of("a.gif")


def test_a_title_and_a_description_are_said_and_the_title_is_seen():
    name = "a $x$ <&> \x1b_1"
    profile = replace(CASES["1f1b"]().profile, name=name)
    svg = figure.render(executed("1f1b", profile=profile), "svg").decode()
    root = ElementTree.fromstring(svg)
    names = [child.tag.rpartition("}")[2] for child in root[:2]]
    assert (names, root.get("role")) == (["title", "desc"], "img")
    assert root[0].text.startswith(r"a $x$ <&> \x1b_1, 1f1b, ")
    assert r"a $x$ <&> \x1b_1" in root[1].text
    seen = [each.text for each in root.iter() if each.tag.endswith("}text")]
    assert root[0].text in " ".join(seen)


def test_a_long_title_takes_more_lines_and_stays_within_the_figure():
    profile = replace(CASES["1f1b"]().profile, name="y" * 100_000)
    lines = [text for text in texts_of(executed("1f1b", profile=profile)) if "yyy" in text]
    assert len(lines) == 1 and ".." in lines[0] and len(lines[0]) < 100


def test_the_settings_of_a_person_change_nothing(tmp_path):
    execution = executed("1f1b")
    plain = figure.render(execution, "svg")
    with matplotlib.rc_context({"axes.facecolor": "red", "font.size": 20, "svg.fonttype": "path"}):
        assert figure.render(execution, "svg") == plain
        assert matplotlib.rcParams["font.size"] == 20


@pytest.mark.parametrize("case", CASES)
def test_numbers_are_text_where_they_fit(case):
    text = texts_of(executed(case))
    assert {"rank", "time (ms)", "forward", "idle"} <= set(text)
    assert (text.count("1") > 1) == (case not in ("large", "wide"))


@pytest.mark.parametrize(
    "case, legend",
    [
        ("1f1b", {"forward", "backward", "optimizer step", "idle"}),
        ("recomputation", {"forward", "backward", "recomputation", "optimizer step", "idle"}),
        (
            "zbv",
            {
                "forward",
                "backward of inputs",
                "backward of weights",
                "optimizer step",
                "idle",
                "stages of a rank from light to dark",
            },
        ),
    ],
)
def test_the_legend_names_what_appears(case, legend):
    text = texts_of(executed(case))
    beside = {"rank", "time (ms)", "busy", "peak"}
    numbers = re.compile(r"[0-9.]+(%| k?B)?|chain, .*|.*idle [0-9.]+%")
    assert {each for each in text if not numbers.fullmatch(each)} - beside == legend


def test_the_legend_says_what_estimated_times_rest_on_in_a_line_of_its_own():
    profile = replace(CASES["zbv"]().profile, estimated="H100-80GB")
    measured, estimated = (
        figure.render(each, "svg").decode()
        for each in (executed("zbv"), executed("zbv", profile=profile))
    )
    assert ">times estimated" not in measured
    assert ">times estimated for H100-80GB: nothing was measured<" in estimated
    heights = [float(re.search(r'height="([0-9.]+)pt"', text)[1]) for text in (measured, estimated)]
    assert heights[1] - heights[0] == pytest.approx(9)  # points: 1/8 inch


def test_all_reduces_beside_compute_are_drawn():
    plan = plan_of("1f1b", [[0, 1], [2, 3]], 4, parameter_bytes=10**6, topology=flat(4, 1e9))
    content = figure.render(execute(under(plan)), "svg").decode()
    assert "all-reduce" in content
    assert COLOURS["A"].lower() in content.lower()


def test_small_figures_take_one_column_and_larger_ones_two():
    widths = {case: sheet_of(case).get_size_inches()[0] for case in CASES}
    assert widths["1f1b"] == widths["dualpipe"] == pytest.approx(look.COLUMN)
    assert widths["interleaved"] == widths["large"] == pytest.approx(look.FULL)


@pytest.mark.parametrize(("case", "count"), [("1f1b", 1), ("large", 3), ("pipedream", 1)])
def test_windows_of_one_scale_stand_side_by_side(case, count):
    execution, axes = executed(case), sheet_of(case).axes
    windows = drawn_windows(execution, 140)
    assert [each.get_xlim() for each in axes] == [(each.begin_s, each.end_s) for each in windows]
    assert len(axes) == count
    assert len({round(each.get_window_extent().width, 3) for each in axes}) == 1
    if count > 1:
        assert {"beginning", "steady", "end"} <= set(texts_of(execution))


def test_a_window_is_what_is_drawn():
    execution = executed("1f1b")
    assert "7" in texts_of(execution) and "7" not in texts_of(execution, (0.0, 0.004))
    with pytest.raises(PartoptError, match="nothing to draw"):
        figure.render(execution, "svg", (5.0, 6.0))


def test_too_much_is_refused(monkeypatch):
    monkeypatch.setattr(figure, "_MOST_DRAWN", 10)
    with pytest.raises(PartoptError, match="more than 10 actions is more than anyone can see"):
        figure.render(executed("1f1b"), "svg")


def test_more_ranks_than_fit_are_sampled():
    execution = execute(under(example("1f1b", P=100, M=4)))
    assert "64 of 100 ranks are shown, at even distances" in texts_of(execution)


@pytest.mark.parametrize("limit", [None, 500, 10**9])
@pytest.mark.parametrize("case", CASES)
def test_no_label_overlaps_another_or_leaves_the_figure(case, limit):
    sheet = sheet_of(case, topology=flat(64, memory_bytes=limit))
    texts = [
        each
        for each in sheet.findobj(matplotlib.text.Text)
        if each.get_text() and each.get_visible()
    ]
    boxes = [each.get_window_extent().padded(-0.6) for each in texts]
    assert len(texts) > 20
    for n, (text, box) in enumerate(zip(texts, boxes, strict=True)):
        assert sheet.bbox.x0 <= box.x0 and box.x1 <= sheet.bbox.x1, text.get_text()
        assert sheet.bbox.y0 <= box.y0 and box.y1 <= sheet.bbox.y1, text.get_text()
        for other, its in zip(texts[:n], boxes[:n], strict=True):
            assert not box.overlaps(its), (text.get_text(), other.get_text())


def test_rows_end_in_the_share_at_work_and_the_most_memory():
    """1F1B: 8 x 3 ms and a step of 0.5 ms of 33.5 ms; a stage holds 1 to 4 microbatches."""
    execution = executed("1f1b", topology=flat(4, 1e15))
    text = texts_of(execution)
    assert text.count("73%") == 4
    assert {format_bytes(int(each)) for each in execution.peak_memory_bytes} <= set(text)


def test_in_grey_forwards_are_lighter_than_backwards():
    for backward in "BIW":
        assert (
            min(lightness(shades["F"]) for shades in (COLOURS, DARKENED))
            > max(lightness(shades[backward]) for shades in (COLOURS, DARKENED)) + 10
        )


def test_a_large_figure_is_less_than_a_megabyte():
    assert len(figure.render(executed("large"), "svg")) < 600_000


def test_without_matplotlib_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(PartoptError) as error:
        figure.render(executed("1f1b"), "svg")
    assert (error.value.message, error.value.hint) == (
        "a figure needs matplotlib",
        "in a clone of partopt: pip install '.[figures]'",
    )


def test_importing_the_reports_does_not_import_matplotlib():
    script = (
        "import sys, partopt.report.figure, partopt.report.trace, partopt.report.gantt; "
        "print('matplotlib' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout == "False\n"
