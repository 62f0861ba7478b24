import re
import subprocess
import sys
from xml.etree import ElementTree

import pytest

from partopt.errors import PartoptError
from partopt.report import cells, figure, page
from partopt.report.actions import COLOURS, DARKENED
from partopt.report.pictures import look
from partopt.report.pictures.look import Heading
from tests.helpers import ROOT, flat
from tests.report.timelines import example, plan_of, simulated

pytest.importorskip("matplotlib", reason="figures are an extra")

HEADING = Heading(("chain", "1f1b"), "A timeline.")
CASES = {
    "1f1b": lambda: example("1f1b", P=4, M=8),
    "recomputation": lambda: example("gpipe", P=3, M=4, recompute=True),
    "interleaved": lambda: example("interleaved", P=4, M=8, v=3),
    "zbv": lambda: example("zbv", P=4, M=8),
    "dualpipe": lambda: example("dualpipe", P=4, M=8),
    "large": lambda: example("1f1b", P=32, M=128),
}


def lightness(colour):
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return 0.3 * red + 0.59 * green + 0.11 * blue


@pytest.mark.parametrize("form, first", [("svg", b"<?xml"), ("pdf", b"%PDF"), ("png", b"\x89PNG")])
@pytest.mark.parametrize("case", ["1f1b", "interleaved", "dualpipe"])
def test_every_form_is_written_and_is_the_same_each_time(case, form, first):
    _, timeline = CASES[case]()
    content = figure.render(timeline, HEADING, form)
    assert content.startswith(first)
    assert content == figure.render(timeline, HEADING, form)


def test_the_extension_chooses_the_form():
    assert [look.form_of(f"a.{each}") for each in ("SVG", "pdf", "b.png")] == ["svg", "pdf", "png"]
    with pytest.raises(PartoptError, match=r"unsupported format '.gif' of a figure"):
        look.form_of("a.gif")


def test_a_title_and_a_description_are_said_and_the_title_is_seen():
    heading = Heading(("a $x$ <&> \x1b_1", "1f1b", "P = 4"), "Four ranks & <rows>.\n")
    svg = figure.render(CASES["1f1b"]()[1], heading, "svg").decode()
    root = ElementTree.fromstring(svg)
    names = [child.tag.rpartition("}")[2] for child in root[:2]]
    assert (names, root.get("role")) == (["title", "desc"], "img")
    assert root[0].text == r"a $x$ <&> \x1b_1, 1f1b, P = 4"
    assert root[1].text == r"Four ranks & <rows>.\n"
    assert root[0].text in {each.text for each in root.iter() if each.tag.endswith("}text")}


def test_a_long_title_takes_more_lines_and_stays_within_the_figure():
    heading = Heading((*["x" * 30] * 6, "y" * 100_000), "")
    svg = figure.render(CASES["1f1b"]()[1], heading, "svg").decode()
    lines = re.findall(r"<text[^>]*>(x[^<]*|y[^<]*)</text>", svg)
    assert len(lines) == 7
    assert lines[-1].startswith("yyyy") and ".." in lines[-1] and len(lines[-1]) < 100


def test_the_settings_of_a_person_change_nothing(tmp_path):
    import matplotlib

    _, timeline = CASES["1f1b"]()
    plain = figure.render(timeline, HEADING, "svg")
    with matplotlib.rc_context({"axes.facecolor": "red", "font.size": 20, "svg.fonttype": "path"}):
        assert figure.render(timeline, HEADING, "svg") == plain
        assert matplotlib.rcParams["font.size"] == 20


@pytest.mark.parametrize("case", CASES)
def test_numbers_are_text_where_they_fit(case):
    _, timeline = CASES[case]()
    text = re.findall(
        r"<text[^>]*>([^<]*)</text>", figure.render(timeline, HEADING, "svg").decode()
    )
    assert {"rank", "time (ms)", "forward", "idle"} <= set(text)
    assert (len(text) > 50) == (case != "large")


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
                "a rank's stages from light to dark",
            },
        ),
    ],
)
def test_the_legend_names_what_appears(case, legend):
    _, timeline = CASES[case]()
    text = re.findall(
        r"<text[^>]*>([^<]*)</text>", figure.render(timeline, HEADING, "svg").decode()
    )
    assert {each for each in text if not each.isdigit()} - {
        "rank",
        "time (ms)",
        HEADING.title,
    } == legend


def test_the_legend_says_what_estimated_times_rest_on_in_a_line_of_its_own():
    _, timeline = CASES["zbv"]()
    measured, estimated = (
        figure.render(timeline, HEADING, "svg", estimated=device).decode()
        for device in (None, "H100-80GB")
    )
    assert "estimated" not in measured
    assert ">times estimated for H100-80GB: nothing was measured<" in estimated
    heights = [float(re.search(r'height="([0-9.]+)pt"', text)[1]) for text in (measured, estimated)]
    assert heights[1] - heights[0] == pytest.approx(9)  # points: 1/8 inch


def test_all_reduces_beside_compute_are_drawn():
    plan = plan_of("1f1b", [[0, 1], [2, 3]], 4, parameter_bytes=10**6, topology=flat(4, 1e9))
    content = figure.render(simulated(plan, 4), HEADING, "svg").decode()
    assert "all-reduce" in content
    assert COLOURS["A"].lower() in content.lower()


def test_messages_are_lines_if_they_are_asked_for():
    _, timeline = CASES["1f1b"]()
    assert figure.render(timeline, HEADING, "svg").count(b"LineCollection") == 0
    assert figure.render(timeline, HEADING, "svg", transfers=True).count(b"LineCollection") > 0


def test_small_figures_take_one_column_and_large_ones_two():
    widths = {case: page.page_of(CASES[case]()[1], None).width for case in CASES}
    assert (
        widths["1f1b"] == widths["dualpipe"] == pytest.approx(look.COLUMN - page.LEFT - page.RIGHT)
    )
    assert widths["large"] == pytest.approx(look.FULL - page.LEFT - page.RIGHT)


def test_a_window_is_what_is_drawn():
    _, timeline = CASES["large"]()
    part = page.page_of(timeline, (0.1, 0.11))
    assert (part.begin, part.end) == (0.1, 0.11)
    assert 32 < part.cells < 32 * 10
    with pytest.raises(PartoptError, match="nothing to draw"):
        page.page_of(timeline, (5.0, 6.0))


def test_too_much_is_refused(monkeypatch):
    monkeypatch.setattr(page, "_MOST_DRAWN", 10)
    with pytest.raises(PartoptError, match="a figure of 68 actions is more than anyone can see"):
        page.page_of(CASES["1f1b"]()[1], None)


def test_many_cells_are_drawn_as_pixels(monkeypatch):
    monkeypatch.setattr(cells, "VECTORS", 10)
    assert b"<image" in figure.render(CASES["large"]()[1], HEADING, "svg")


def test_more_ranks_than_fit_are_sampled():
    part = page.page_of(example("1f1b", P=100, M=4)[1], None)
    assert len(part.ranks) == 64
    assert part.note == "64 of 100 ranks are shown, at even distances"


def test_in_grey_forwards_are_lighter_than_backwards():
    for backward in "BIW":
        assert (
            min(lightness(shades["F"]) for shades in (COLOURS, DARKENED))
            > max(lightness(shades[backward]) for shades in (COLOURS, DARKENED)) + 10
        )


def test_without_matplotlib_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(PartoptError) as error:
        figure.render(CASES["1f1b"]()[1], HEADING, "svg")
    assert (error.value.message, error.value.hint) == (
        "a figure needs matplotlib",
        'pip install "partopt[figures]"',
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
