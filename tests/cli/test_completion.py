"""Completion, driven as shells drive it: by the environment of a process."""

import re
import shutil
import subprocess

import pytest

from partopt import cli
from partopt.cli import SHELLS
from tests.helpers import run_process


def answer(words: str, shell: str = "bash") -> str:
    """What a shell is told of the last word; fish gives the word itself."""
    place = str(words.count(" ")) if shell != "fish" else words.rpartition(" ")[2]
    environment = {
        "_PARTOPT_COMPLETE": f"{shell}_complete",
        "COMP_WORDS": words,
        "COMP_CWORD": place,
    }
    done = run_process([], environment=environment)
    assert (done.returncode, done.stderr) == (0, b"")
    return done.stdout.decode()


def completions(words: str) -> list[list[str]]:
    """What bash is told of the last word: [type, value] each."""
    return [line.split(",") for line in answer(words).splitlines() if line]


@pytest.mark.slow
def test_verbs_are_completed():
    assert completions("partopt pl") == [["plain", "plan"]]
    assert completions("partopt ") == [["plain", verb] for verb in cli.VERBS]
    assert completions("partopt topology sh") == [["plain", "show"]]


@pytest.mark.slow
def test_options_are_completed():
    assert completions("partopt plan --topo") == [["plain", "--topology"]]
    assert completions("partopt --vers") == [["plain", "--version"]]
    assert completions("partopt plan --no-such") == []


@pytest.mark.slow
def test_values_are_completed_as_file_names_where_nothing_else_is_known():
    assert completions("partopt plan p.json -o pla") == [["file", "pla"]]
    assert completions("partopt show pla") == [["file", "pla"]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "names"),
    [
        ("partopt plan p.json --schedule interleaved", ["interleaved", "interleaved-zb"]),
        ("partopt plan p.json --schedule au", ["auto"]),
        ("partopt plan p.json --for me", ["megatron", "megatron-bridge"]),
        ("partopt compare p.json --for tor", ["torch", "torch-csv", "torchgpipe", "torchtitan"]),
        ("partopt plan p.json --planner op", ["optimal"]),
        ("partopt export plan.json --to fl", ["flows"]),
        ("partopt simulate plan.json --schedule zbv", ["zbv"]),
        ("partopt schedule dualpipe", ["dualpipe", "dualpipev"]),
        ("partopt schema pl", ["plan"]),
        ("partopt trainer show vl", ["vllm"]),
    ],
)
def test_names_that_partopt_knows_are_completed(words, names):
    assert sorted(completions(words)) == [["plain", name] for name in names]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "names"),
    [
        ("partopt plan p.json --topology dgx-", ["dgx-a100", "dgx-h100"]),
        ("partopt topology show v100-p", ["v100-pcie"]),
        ("partopt plan gnm", ["gnmt.v100-published.float32"]),
        ("partopt profile m.py --estimate h", ["h100", "h100-96gb", "h200"]),
    ],
)
def test_names_are_completed_beside_files(words, names):
    """Files come before names: bash forgets what it was told before it is told of files."""
    typed = words.rpartition(" ")[2]
    assert completions(words) == [["file", typed], *(["plain", name] for name in names)]


@pytest.mark.slow
@pytest.mark.parametrize("shell", SHELLS)
def test_every_shell_completes_values(shell):
    told = re.split("[\\s,]+", answer("partopt plan p.json --schedule 1f1b-", shell))
    assert "1f1b-eager" in told and "gpipe" not in told
    assert "dgx-h100" in re.split("[\\s,]+", answer("partopt topology show dgx-h", shell))


@pytest.mark.slow
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
