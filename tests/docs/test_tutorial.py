"""docs/tutorial.md: its second half is the same on every machine, and is run as it is printed."""

import re
import shlex

import pytest

from tests.docs.documents import prints, read

PAGE = read("tutorial.md")
FIRST, SECOND = PAGE.split("\n## A cluster that is not there\n")


def commands(text):
    """The commands of a part and what they print."""
    return re.findall(r"```\n\$ partopt ([^\n]*)\n(.*?)```", text, re.DOTALL)


@pytest.mark.slow
def test_what_the_second_half_shows_is_what_the_commands_print(partopt, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shown = commands(SECOND)
    assert len(shown) >= 6
    for command, output in shown:
        assert prints(output, partopt(*shlex.split(command)).out), command


def test_the_options_of_the_first_half_are_options(partopt):
    shown = commands(FIRST)
    assert {command.split()[0] for command, _ in shown} >= {"plan", "run"}
    for command, _ in shown:
        verb = command.split()[0]
        told = partopt(verb, "--help-all" if verb == "plan" else "--help").out
        assert [flag for flag in re.findall(r"(?<= )--[a-z-]+", command) if flag not in told] == []
