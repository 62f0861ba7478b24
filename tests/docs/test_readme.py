"""The README says what the commands say."""

import re
import shlex

import pytest

from tests.helpers import ROOT

README = (ROOT / "README.md").read_text()
SHOWN = re.findall(r"```\n\$ partopt ([^\n]*)\n(.*?)```", README, re.DOTALL)


def test_it_is_short():
    assert len(README.splitlines()) <= 150


def test_a_plan_is_shown():
    assert SHOWN


@pytest.mark.parametrize(("command", "output"), SHOWN)
def test_what_it_shows_is_what_the_command_prints(partopt, command, output):
    assert partopt(*shlex.split(command)).out == output


def test_its_links_lead_somewhere():
    targets = re.findall(r"\]\(([^)#]+)\)", README)
    assert targets
    assert [target for target in targets if not (ROOT / target).exists()] == []
