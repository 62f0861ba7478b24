"""Completion, driven as shells drive it: by the environment."""

import shutil
import subprocess

import pytest

from partopt import cli
from tests.helpers import run_process


@pytest.fixture
def answer(partopt, monkeypatch):
    """`answer(WORDS)`: what a shell is told of the last word; fish gives the word itself."""

    def ask(words: str, shell: str = "bash") -> str:
        place = str(words.count(" ")) if shell != "fish" else words.rpartition(" ")[2]
        monkeypatch.setenv("_PARTOPT_COMPLETE", f"{shell}_complete")
        monkeypatch.setenv("COMP_WORDS", words)
        monkeypatch.setenv("COMP_CWORD", place)
        done = partopt()
        assert (done.code, done.err) == (0, "")
        return done.out

    return ask


@pytest.fixture
def completions(answer):
    """`completions(WORDS)`: what bash is told of the last word, [type, value] each."""

    def ask(words: str) -> list[list[str]]:
        return [line.split(",") for line in answer(words).splitlines() if line]

    return ask


def test_verbs_are_completed(completions):
    assert completions("partopt pl") == [["plain", "plan"]]
    assert completions("partopt ") == [["plain", verb] for verb in cli.VERBS]
    assert completions("partopt topology sh") == [["plain", "show"]]


def test_options_are_completed(completions):
    assert completions("partopt plan --topo") == [["plain", "--topology"]]
    assert completions("partopt --vers") == [["plain", "--version"]]
    assert completions("partopt plan --no-such") == []


def test_values_are_completed_as_file_names_where_nothing_else_is_known(completions):
    assert completions("partopt plan p.json -o pla") == [["file", "pla"]]
    assert completions("partopt report pla") == [["file", "pla"]]


def test_mistakes_further_left_are_no_errors_yet(completions):
    assert completions("partopt plan --stages two --topo") == [["plain", "--topology"]]
    assert ["plain", "--help"] in completions("partopt plna --")


@pytest.mark.slow
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_of_a_shell_asks_partopt(shell):
    done = run_process([], environment={"_PARTOPT_COMPLETE": f"{shell}_source"})
    assert (done.returncode, done.stderr) == (0, b"")
    assert f"_PARTOPT_COMPLETE={shell}_complete" in done.stdout.decode()
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=done.stdout, check=True)
