"""What stands around the rows of a figure: labels that do not overlap, shares, peaks, memory."""

import re

import pytest
from msgspec.structs import replace

from partopt.report import figure, memory_panel, page
from partopt.report.pictures import look
from partopt.simulator.memory import memory_over_time
from tests.helpers import flat
from tests.report.test_figure import CASES as FIGURES
from tests.report.test_figure import HEADING
from tests.report.timelines import example

matplotlib = pytest.importorskip("matplotlib", reason="figures are an extra")
CASES = FIGURES | {"wide": lambda: example("gpipe", P=64, M=3)}


def drawn(case, **changes):
    """The figure of a case, laid out; `changes` are fields of its plan."""
    plan, timeline = CASES[case]()
    pages = page.pages_of(timeline, None)
    with look.style():
        sheet = figure._sheet(replace(plan, **changes), timeline, HEADING, pages, False).figure
        sheet.draw_without_rendering()
    return sheet


@pytest.mark.parametrize("limit", [None, 500, 10**9])
@pytest.mark.parametrize("case", CASES)
def test_no_label_overlaps_another_or_leaves_the_figure(case, limit):
    sheet = drawn(case, topology=flat(64, memory_bytes=limit))
    texts = [
        each
        for each in sheet.findobj(matplotlib.text.Text)
        if each.get_text() and each.get_visible()
    ]
    boxes = [each.get_window_extent().padded(-0.6) for each in texts]
    assert len(texts) > 30
    for n, (text, box) in enumerate(zip(texts, boxes, strict=True)):
        assert sheet.bbox.x0 <= box.x0 and box.x1 <= sheet.bbox.x1, text.get_text()
        assert sheet.bbox.y0 <= box.y0 and box.y1 <= sheet.bbox.y1, text.get_text()
        for other, its in zip(texts[:n], boxes[:n], strict=True):
            assert not box.overlaps(its), (text.get_text(), other.get_text())


@pytest.mark.parametrize("case", CASES)
def test_no_panel_is_empty(case):
    sheet = drawn(case)
    assert len(sheet.axes) == (6 if case == "large" else 2)
    assert all(axes.collections for axes in sheet.axes)
    for axes in sheet.axes:
        left, right = axes.get_xlim()
        reach = [each.get_datalim(axes.transData) for each in axes.collections]
        assert any(box.x0 < right and box.x1 > left for box in reach)


def test_rows_end_in_the_share_at_work_and_the_most_memory():
    """1F1B: 8 x 3 ms and a step of 0.5 ms of 33.5 ms; 370 bytes, and 10 for each microbatch."""
    plan, timeline = CASES["1f1b"]()
    text = re.findall(
        r"<text[^>]*>([^<]*)</text>", figure.render(plan, timeline, HEADING, "svg").decode()
    )
    assert text.count("73%") == 4
    assert [f"{370 + 10 * held} B" in text for held in (4, 3, 2, 1)] == [True] * 4
    assert {"fill 3 ms", "drain 6 ms"} <= set(text)


def test_the_memory_of_the_fullest_rank_adds_up():
    plan, timeline = CASES["1f1b"]()
    trace = memory_panel.trace_of(timeline, plan, [0, 1, 2, 3])
    assert (trace.rank, trace.peak) == (0, 410)
    assert [part.name for part in trace.parts] == [
        *("parameters", "gradients", "optimizer", "buffers", "activations"),
    ]
    series = memory_over_time(timeline, plan, 0)
    assert trace.levels[-1].tolist() == series.values.tolist()
    assert trace.levels[:, 0].tolist() == [100, 150, 350, 370, 370]
