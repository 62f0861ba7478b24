"""An SVG in fewer bytes shows what it showed: the same shapes and texts at the same places."""

import re
from xml.etree import ElementTree

import pytest

from partopt.report import figure
from partopt.report.pictures import look
from tests.report.test_figure import HEADING
from tests.report.timelines import example

pytest.importorskip("matplotlib", reason="figures are an extra")


def shown(svg):
    """The tag, the text and the numbers of every shape and text."""
    root = ElementTree.fromstring(svg)
    for each in root.iter():
        tag = each.tag.rpartition("}")[2]
        if tag in ("path", "text", "use"):
            numbers = [
                float(number)
                for name in ("d", "x", "y")
                for number in re.findall(r"-?[0-9.]+", each.get(name, ""))
            ]
            yield tag, each.text, each.get("clip-path"), numbers


def test_shapes_and_texts_stay_where_they_are(monkeypatch):
    plan, timeline = example("zbv", P=4, M=8)
    short = figure.render(plan, timeline, HEADING, "svg")
    monkeypatch.setattr(look, "compact", lambda svg: svg)
    whole = figure.render(plan, timeline, HEADING, "svg")
    assert len(short) < 0.6 * len(whole)
    for (tag, text, clip, numbers), other in zip(shown(short), shown(whole), strict=True):
        assert (tag, text, clip) == other[:3]
        assert numbers == pytest.approx(other[3], abs=0.01)
