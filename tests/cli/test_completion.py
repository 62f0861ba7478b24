"""Completion, driven as shells drive it: by the environment of a process."""

import shutil
import subprocess

import pytest

from partopt import cli
from partopt.cli import SHELLS
from tests.helpers import run_process


def completions(words: str) -> list[list[str]]:
    """What bash is told of the last word: [type, value] each."""
    environment = {
        "_PARTOPT_COMPLETE": "bash_complete",
        "COMP_WORDS": words,
        "COMP_CWORD": str(words.count(" ")),
    }
    done = run_process([], environment=environment)
    assert (done.returncode, done.stderr) == (0, b"")
    return [line.split(",") for line in done.stdout.decode().splitlines() if line]


def test_verbs_are_completed():
    assert completions("partopt pl") == [["plain", "plan"]]
    assert completions("partopt ") == [["plain", verb] for verb in cli.VERBS]
    assert completions("partopt topology sh") == [["plain", "show"]]


def test_options_are_completed():
    assert completions("partopt plan --topo") == [["plain", "--topology"]]
    assert completions("partopt --vers") == [["plain", "--version"]]
    assert completions("partopt plan --no-such") == []


def test_values_are_completed_as_file_names_where_nothing_else_is_known():
    assert completions("partopt plan p.json -o pla") == [["file", "pla"]]
    assert completions("partopt show pla") == [["file", "pla"]]


def test_mistakes_further_left_are_no_errors_yet():
    assert completions("partopt plan --stages two --topo") == [["plain", "--topology"]]
    assert ["plain", "--help"] in completions("partopt plna --")


@pytest.mark.parametrize("shell", SHELLS)
def test_the_script_of_a_shell_asks_partopt(shell):
    done = run_process([], environment={"_PARTOPT_COMPLETE": f"{shell}_source"})
    assert (done.returncode, done.stderr) == (0, b"")
    assert f"_PARTOPT_COMPLETE={shell}_complete" in done.stdout.decode()
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=done.stdout, check=True)


@pytest.mark.parametrize("instruction", ["tcsh_source", "bash", "bash_stop"])
def test_what_no_shell_asks_is_refused(instruction):
    done = run_process([], environment={"_PARTOPT_COMPLETE": instruction})
    assert done.returncode == 2
    assert f"error: _PARTOPT_COMPLETE={instruction}: unknown instruction" in done.stderr.decode()
    assert "bash_source, zsh_source, fish_source" in done.stderr.decode()
