"""docs/schedules.md: its commands print what it shows, its pictures are what they draw now, and its
formulas are those of the code.
"""

import re
import shlex

import pytest

from partopt import SCHEDULES, Uniform, try_schedules
from tests.docs.documents import read, rows, section
from tests.helpers import ROOT

PAGE = read("schedules.md")
SHOWN = re.findall(r"^```\n\$ partopt ([^\n]*)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
GLANCE = rows(section(PAGE, "At a glance"))[1:]
PAPERS = rows(section(PAGE, "Figures and tables of papers"))[1:]
P, M = 8, 24


@pytest.mark.parametrize("command, output", SHOWN)
def test_what_it_shows_is_what_the_command_prints(partopt, command, output):
    assert partopt(*shlex.split(command)).out == output


def test_every_schedule_has_a_section_with_its_picture_and_its_source():
    sections = re.findall(r"^## (\S+)\n\n!\[[^]]+\]\(pictures/schedule-(\S+)\.svg\)", PAGE, re.M)
    assert {name for name, _ in sections} == {*SCHEDULES}
    assert all(name == drawn for name, drawn in sections)
    for name in SCHEDULES:
        text = section(PAGE, name)
        assert [word in text for word in ("**When:**", "**Trips up:**", "**Source:**")] == [
            True
        ] * 3


def test_the_pictures_are_what_the_command_on_the_page_draws(partopt, tmp_path):
    pytest.importorskip("matplotlib", reason="figures are an extra")
    [names, command] = re.search(r"for name in (.*?); do\n +partopt (.*?)\n", PAGE).groups()
    assert {*names.split()} == {*SCHEDULES}
    for name in names.split():
        words = shlex.split(command.replace("$name", name))
        path = ROOT / words[words.index("-o") + 1]
        words[words.index("-o") + 1] = str(tmp_path / path.name)
        assert partopt(*words).code == 0
        assert (tmp_path / path.name).read_bytes() == path.read_bytes(), name
        assert path.stat().st_size < 60_000


def value(formula, **letters):
    """What a formula of the page comes to: products without a sign between them."""
    product = re.sub(r"(?<=[\w)])(?=[(a-zA-Z])(?<![a-zA-Z/*+-])|(?<=\))(?=\w)", "*", formula)
    product = re.sub(r"(?<=[a-zA-Z])(?=[a-zA-Z(])", "*", product)
    return eval(product, letters)


def test_the_table_says_what_the_code_and_an_execution_say():
    tried = {own.schedule: own for own in try_schedules(Uniform(stages=P, microbatches=M)).tried}
    assert [row[0] for row in GLANCE] == [*dict.fromkeys(row[0] for row in GLANCE)]
    assert {row[0] for row in GLANCE} == {*SCHEDULES}
    for name, waits, share, keeps, holds in GLANCE:
        own, bubble = tried[name], SCHEDULES[name].bubble
        assert (waits, holds) == (bubble.text, bubble.condition or "always")
        letters = {"P": P, "M": M, "v": own.chunks}
        assert value(share, **letters) == pytest.approx(own.bubble, abs=1e-9), name
        kept = [value(keeps, **letters, p=p) for p in range(P)]
        assert kept == pytest.approx(own.activations), name


@pytest.mark.parametrize("paper, command, prints, _", PAPERS)
def test_the_command_of_a_paper_prints_its_numbers(partopt, paper, command, prints, _):
    done = partopt(*shlex.split(command)[1:])
    assert done.code == 0, done.err
    for fragment in prints.split("`, `"):
        assert fragment in done.out, (paper, fragment)
