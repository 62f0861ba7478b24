"""An SVG in fewer bytes shows what it showed: the same shapes and texts at the same places."""

import re
from xml.etree import ElementTree

import pytest

from partopt.report import figure
from partopt.report.pictures import look
from partopt.simulator.execution import execute
from tests.report.timelines import example

pytest.importorskip("matplotlib", reason="figures are an extra")


def points(path):
    """The coordinates of every corner of a path, of closed ones without the first again."""
    found, begin = [], 0
    for letter, given in re.findall(r"([a-zA-Z])([^a-zA-Z]*)", path):
        numbers = [float(number) for number in re.findall(r"-?[0-9.]+", given)]
        if letter == "M":
            begin = len(found)
        if letter in "Zz" and found[-2:] == found[begin : begin + 2]:
            del found[-2:]
        found += {"H": [*numbers, *found[-1:]], "V": [*found[-2:-1], *numbers]}.get(letter, numbers)
    return found


def shown(svg):
    """The tag, the text and the places of every shape and text."""
    root = ElementTree.fromstring(svg)
    for each in root.iter():
        tag = each.tag.rpartition("}")[2]
        if tag in ("path", "text", "use"):
            numbers = [float(each.get(name, 0)) for name in ("x", "y")]
            yield tag, each.text, each.get("clip-path"), [*numbers, *points(each.get("d", ""))]


def test_shapes_and_texts_stay_where_they_are(monkeypatch):
    execution = execute(example("zbv", P=4, M=8)[0])
    short = figure.render(execution, "svg")
    monkeypatch.setattr(look, "compact", lambda svg: svg)
    whole = figure.render(execution, "svg")
    assert len(short) < 0.7 * len(whole)
    for (tag, text, clip, numbers), other in zip(shown(short), shown(whole), strict=True):
        assert (tag, text, clip) == other[:3]
        assert numbers == pytest.approx(other[3], abs=0.01)
