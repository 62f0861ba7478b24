"""docs/schedules.md: its commands print what it shows, its formulas are those of an execution, and
its other parts follow from the registry.
"""

import re
import runpy
import shlex

import pytest

from partopt import SCHEDULES, Uniform, try_schedules
from tests.docs.documents import read, rows, section
from tests.helpers import ROOT

PAGE = read("schedules.md")
SHOWN = re.findall(r"^```\n\$ partopt ([^\n]*)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
CHOICE = rows(section(PAGE, "Which one"))[1:]
P, M = 8, 24
WRITER = runpy.run_path(str(ROOT / "docs/.site/schedules.py"))


def test_what_it_shows_is_what_the_commands_print(partopt):
    for command, output in SHOWN:
        assert partopt(*shlex.split(command)).out == output


def test_its_sections_are_those_of_the_registry():
    assert WRITER["page"]() == PAGE, "run python docs/.site/schedules.py"
    assert re.findall(r"^### (\S+)$", PAGE, re.MULTILINE) == [*SCHEDULES]


@pytest.mark.slow
def test_the_pictures_are_what_the_schedules_are_now(tmp_path):
    WRITER["write"](tmp_path)
    for drawn in tmp_path.iterdir():
        path = ROOT / "docs/pictures" / drawn.name
        assert path.read_bytes() == drawn.read_bytes(), "run python docs/.site/schedules.py"
        assert path.stat().st_size < 80_000


def value(formula, **letters):
    """What a formula of the page comes to: products without a sign between them."""
    product = re.sub(r"(?<=[\w)])(?=[(a-zA-Z])(?<![a-zA-Z/*+-])|(?<=\))(?=\w)", "*", formula)
    product = re.sub(r"(?<=[a-zA-Z])(?=[a-zA-Z(])", "*", product)
    return eval(product, letters)


def test_what_a_device_keeps_is_what_an_execution_keeps():
    for name, keeps, *_ in CHOICE:
        [own] = try_schedules(Uniform(stages=P, microbatches=M), [name]).tried
        kept = [value(keeps, P=P, M=M, v=own.chunks, p=p) for p in range(P)]
        assert kept == pytest.approx(own.activations), name
