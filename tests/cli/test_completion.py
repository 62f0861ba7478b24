"""Completion, driven as shells drive it: by the environment."""

import re
import shutil
import subprocess

import pytest

from partopt import cli
from partopt.cli import SHELLS
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
def test_names_that_partopt_knows_are_completed(completions, words, names):
    assert sorted(completions(words)) == [["plain", name] for name in names]


DGX = ["dgx-a100", "dgx-b200", "dgx-b300", "dgx-h100", "dgx-h200"]


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ("partopt plan p.json --topology dgx-", DGX),
        ("partopt topology show v100-p", ["v100-pcie"]),
        ("partopt plan gnm", ["gnmt.v100-published.float32"]),
        ("partopt plan llama2-7", ["llama2-70b", "llama2-7b"]),
        ("partopt show vgg16.v", ["vgg16.v100-published.float32"]),
        ("partopt show p.json dgx", DGX),
        ("partopt show --profile vit-g.a", ["vit-g.a100-estimated.bfloat16"]),
        ("partopt profile m.py --estimate h", ["h100", "h100-96gb", "h200"]),
    ],
)
def test_names_are_completed_beside_files(completions, words, names):
    """Files come before names: bash forgets what it was told before it is told of files."""
    typed = words.rpartition(" ")[2]
    assert completions(words) == [["file", typed], *(["plain", name] for name in names)]


@pytest.mark.parametrize("shell", SHELLS)
def test_every_shell_completes_values(answer, shell):
    told = re.split("[\\s,]+", answer("partopt plan p.json --schedule 1f1b-", shell))
    assert "1f1b-eager" in told and "gpipe" not in told
    assert "dgx-h100" in re.split("[\\s,]+", answer("partopt topology show dgx-h", shell))


def test_mistakes_further_left_are_no_errors_yet(completions):
    assert completions("partopt plan --stages two --topo") == [["plain", "--topology"]]
    assert ["plain", "--help"] in completions("partopt plna --")


@pytest.mark.slow
@pytest.mark.parametrize("shell", SHELLS)
def test_the_script_of_a_shell_asks_partopt(shell):
    done = run_process([], environment={"_PARTOPT_COMPLETE": f"{shell}_source"})
    assert (done.returncode, done.stderr) == (0, b"")
    assert f"_PARTOPT_COMPLETE={shell}_complete" in done.stdout.decode()
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=done.stdout, check=True)


@pytest.mark.parametrize("instruction", ["tcsh_source", "bash", "bash_stop"])
def test_what_no_shell_asks_is_refused(partopt, monkeypatch, instruction):
    monkeypatch.setenv("_PARTOPT_COMPLETE", instruction)
    done = partopt()
    assert done.code == 2
    assert done.errors == [f"_PARTOPT_COMPLETE={instruction}: unknown instruction"]
    assert "bash_source, zsh_source, fish_source" in done.hints[0]
