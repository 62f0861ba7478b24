import re
import subprocess
import sys
from xml.etree import ElementTree

import pytest
from msgspec.structs import replace

from partopt.errors import PartoptError
from partopt.report import cells, figure, page, phases
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
    plan, timeline = CASES[case]()
    content = figure.render(plan, timeline, HEADING, form)
    assert content.startswith(first)
    assert content == figure.render(plan, timeline, HEADING, form)


def test_the_extension_chooses_the_form():
    assert [look.form_of(f"a.{each}") for each in ("SVG", "pdf", "b.png")] == ["svg", "pdf", "png"]
    with pytest.raises(PartoptError, match=r"a.gif: unsupported format .gif"):
        look.form_of("a.gif")


def test_a_title_and_a_description_are_said_and_the_title_is_seen():
    heading = Heading(("a $x$ <&> \x1b_1", "1f1b", "P = 4"), "Four ranks & <rows>.\n")
    svg = figure.render(*CASES["1f1b"](), heading, "svg").decode()
    root = ElementTree.fromstring(svg)
    names = [child.tag.rpartition("}")[2] for child in root[:2]]
    assert (names, root.get("role")) == (["title", "desc"], "img")
    assert root[0].text == r"a $x$ <&> \x1b_1, 1f1b, P = 4"
    assert root[1].text == r"Four ranks & <rows>.\n"
    assert root[0].text in {each.text for each in root.iter() if each.tag.endswith("}text")}


def test_a_long_title_takes_more_lines_and_stays_within_the_figure():
    heading = Heading((*["x" * 30] * 6, "y" * 100_000), "")
    svg = figure.render(*CASES["1f1b"](), heading, "svg").decode()
    lines = re.findall(r"<text[^>]*>(x[^<]*|y[^<]*)</text>", svg)
    assert len(lines) == 7
    assert lines[-1].startswith("yyyy") and ".." in lines[-1] and len(lines[-1]) < 100


def test_the_settings_of_a_person_change_nothing(tmp_path):
    import matplotlib

    plan, timeline = CASES["1f1b"]()
    plain = figure.render(plan, timeline, HEADING, "svg")
    with matplotlib.rc_context({"axes.facecolor": "red", "font.size": 20, "svg.fonttype": "path"}):
        assert figure.render(plan, timeline, HEADING, "svg") == plain
        assert matplotlib.rcParams["font.size"] == 20


@pytest.mark.parametrize("case", CASES)
def test_numbers_are_text_where_they_fit(case):
    plan, timeline = CASES[case]()
    text = re.findall(
        r"<text[^>]*>([^<]*)</text>", figure.render(plan, timeline, HEADING, "svg").decode()
    )
    assert {"rank", "time (ms)", "forward", "idle"} <= set(text)
    assert (text.count("1") > 1) == (case != "large")


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
    plan, timeline = CASES[case]()
    text = re.findall(
        r"<text[^>]*>([^<]*)</text>", figure.render(plan, timeline, HEADING, "svg").decode()
    )
    beside = {"rank", "time (ms)", "busy", "peak", "B", "memory of", "rank 0", HEADING.title}
    numbers = re.compile(r"[0-9]+(%| B)?|(fill|drain) [0-9]+ ms")
    memory = {"parameters", "gradients", "optimizer", "buffers", "activations"}
    assert {each for each in text if not numbers.fullmatch(each)} - beside == legend | memory


def test_the_legend_says_what_estimated_times_rest_on_in_a_line_of_its_own():
    plan, timeline = CASES["zbv"]()
    other = replace(plan, profile=replace(plan.profile, estimated="H100-80GB"))
    measured, estimated = (
        figure.render(each, timeline, HEADING, "svg").decode() for each in (plan, other)
    )
    assert "estimated" not in measured
    assert ">times estimated for H100-80GB: nothing was measured<" in estimated
    heights = [float(re.search(r'height="([0-9.]+)pt"', text)[1]) for text in (measured, estimated)]
    assert heights[1] - heights[0] == pytest.approx(9)  # points: 1/8 inch


def test_all_reduces_beside_compute_are_drawn():
    plan = plan_of("1f1b", [[0, 1], [2, 3]], 4, parameter_bytes=10**6, topology=flat(4, 1e9))
    content = figure.render(plan, simulated(plan, 4), HEADING, "svg").decode()
    assert "all-reduce" in content
    assert COLOURS["A"].lower() in content.lower()


def test_messages_are_lines_if_they_are_asked_for():
    plan, timeline = CASES["1f1b"]()
    plain = figure.render(plan, timeline, HEADING, "svg")
    assert plain.count(b"LineCollection") == 0
    lines = figure.render(plan, timeline, HEADING, "svg", transfers=True)
    assert lines.count(b"LineCollection") > 0


def test_small_figures_take_one_column_and_larger_ones_two():
    widths = {case: page.pages_of(CASES[case]()[1], None)[0].width for case in CASES}
    beside = page.LEFT + page.RIGHT
    assert widths["1f1b"] == widths["dualpipe"] == pytest.approx(look.COLUMN - beside)
    assert widths["interleaved"] == pytest.approx(look.FULL - beside)


def test_a_long_timeline_is_shown_in_three_parts_of_one_scale():
    _, timeline = CASES["large"]()
    first, middle, last = parts = page.pages_of(timeline, None)
    assert (first.begin, last.end) == (0, timeline.makespan)
    assert first.end < middle.begin < middle.end < last.begin
    assert len({round(part.end - part.begin, 12) for part in parts}) == 1
    assert sum(part.width for part in parts) + 2 * page.BREAK == pytest.approx(
        look.FULL - page.LEFT - page.RIGHT
    )
    fill = phases.phases_of(timeline)
    assert first.end > fill.fill_end == pytest.approx(31e-3, rel=1e-5)
    assert (
        last.begin < fill.drain_begin == pytest.approx(timeline.makespan - 62e-3 - 5e-4, rel=1e-5)
    )
    # a forward is wide enough to be told from the next
    assert all(1e-3 * part.points_per_second > 1.5 for part in parts)


def test_a_window_is_what_is_drawn():
    _, timeline = CASES["large"]()
    [part] = page.pages_of(timeline, (0.1, 0.11))
    assert (part.begin, part.end) == (0.1, 0.11)
    assert 32 < part.cells < 32 * 10
    with pytest.raises(PartoptError, match="nothing to draw"):
        page.pages_of(timeline, (5.0, 6.0))


def test_too_much_is_refused(monkeypatch):
    monkeypatch.setattr(page, "_MOST_DRAWN", 10)
    with pytest.raises(PartoptError, match="a figure of 68 actions is more than anyone can see"):
        page.pages_of(CASES["1f1b"]()[1], None)


def test_many_cells_are_drawn_as_pixels(monkeypatch):
    monkeypatch.setattr(cells, "VECTORS", 10)
    assert b"<image" in figure.render(*CASES["large"](), HEADING, "svg")


def test_more_ranks_than_fit_are_sampled():
    [part] = page.pages_of(example("1f1b", P=100, M=4)[1], None)
    assert len(part.ranks) == 64
    assert part.note == "64 of 100 ranks are shown, at even distances"


def test_in_grey_forwards_are_lighter_than_backwards():
    for backward in "BIW":
        assert (
            min(lightness(shades["F"]) for shades in (COLOURS, DARKENED))
            > max(lightness(shades[backward]) for shades in (COLOURS, DARKENED)) + 10
        )


def test_a_large_figure_is_less_than_a_megabyte():
    assert len(figure.render(*CASES["large"](), HEADING, "svg")) < 400_000


def test_without_matplotlib_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(PartoptError) as error:
        figure.render(*CASES["1f1b"](), HEADING, "svg")
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
