"""Shell scripts: what is read without executing them is what bash makes of them."""

from __future__ import annotations

import shlex
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partopt.errors import PartoptError
from partopt.trainers.shell import flag_words, read_script, unknown_names

# every script ends in the command `train`, whose words are compared
SCRIPTS = {
    "arrays": 'A=(\n  --x 1 # of one\n  --y "two words"\n  #--z 3\n)\nB=("${A[@]}" --w)\n'
    "train ${B[@]}",
    "an array that grows": 'A=(--x 1)\nA+=(--y 2)\nB=(--z)\nA+=("${B[@]}")\ntrain "${A[@]}"',
    "quoted flags": 'A=("--x 1" "--y 2")\ntrain ${A[@]}',
    "variables": 'TP=8\nexport PP=$TP\nNAME="a $TP b"\ntrain --x $PP --name "$NAME" \'$TP\'',
    "numbers": "A=4; B=$((A * 2 + 1)); C=$(( $B / 2 )); train --x $((A*B-C)) --y $((2 * (A + 1)))",
    "defaults": 'A=${A:-3}\nB=${A:-4}\n: ${C:=5}\ntrain $A $B $C ${D:-"$A-d"} "${E:-}"',
    "case of letters": "A=Full; train ${A,,} ${A^^}",
    "a text that grows": 'O=""\nO="--x 1 $O"\nO="$O --y"\nO+=" --z 2"\ntrain $O',
    "continued lines": "train --x 1 \\\n  --y 2 \\\n  # not these: --z 3\n",
    "if": 'A=fp8\nif [[ "$A" == "fp8" ]]; then\n B=(--fp8)\nelif [ $A = x ]; then B=(--x)\n'
    "else\n B=(--bf16)\nfi\ntrain ${B[@]}",
    "else": 'if [ 3 -gt 4 ]; then A=1; else A=2; fi\nif ! [ -z "$A" ]; then B=3; fi\ntrain $A $B',
    "if without else": "A=1\nif [ $A = 2 ]; then A=3; fi\nif [ $A = 4 ]; then A=5; fi\ntrain $A",
    "both and either": 'A=1\nif [ $A -eq 1 ] && [ -n "" ]; then B=x; else B=y; fi\n'
    'if [[ $A == 2 || $A != 3 ]]; then C=x; else C=y; fi\ntrain "$B" "$C"',
    "case": "M=13B\ncase $M in\n 7B) H=4096;;\n 13B|14B)\n  H=5120\n  ;;\n *) H=1;;\nesac\n"
    "train $H",
    "case of anything": "M=8B; case $M in 7B) H=1 ;; *) H=2 ;; esac; train $H",
    "nested": "A=1\nif [ $A = 1 ]; then\n if [ $A = 2 ]; then B=2; else B=3; fi\n C=4\nfi\n"
    "train $B $C",
    "a function": 'f() {\n  local y=2\n  A="--x $y"\n}\nf\ntrain $A',
    "assigned before": "A=1 B=2 true\nC=3 train --x 4",
    "several on a line": "A=1;B=2\tC=3; train $A$B$C;true",
    "quotations": """train "a'b" 'c"d' e\\ f "g\\"h" ''""",
}


def words_of_bash(script: str) -> list[str]:
    """The words of the last `train` that bash runs."""
    stub = "train() { printf '%s\\0' \"$@\"; }\n"
    done = subprocess.run(
        ["bash", "--norc", "-c", stub + script], capture_output=True, text=True, check=True, env={}
    )
    return done.stdout.split("\0")[:-1]


def words_read(script: str) -> list[str]:
    return list(read_script(script, {}).commands[-1][1:])


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_words_are_those_of_bash(name):
    script = SCRIPTS[name]
    commands = read_script(script, {}).commands
    [words] = [own[1:] for own in commands if own[0] == "train"]
    assert [word for word in words if word] == [word for word in words_of_bash(script) if word]


WORDS = st.text(st.sampled_from("ab1 -=\"'$#\\;&|()"), max_size=6)


@settings(max_examples=60, deadline=None)
@given(st.lists(WORDS, max_size=5))
def test_quoted_words_are_themselves(words):
    script = f'A=({shlex.join(words)})\ntrain x "${{A[@]}}" {shlex.join(words)}'
    assert [word for word in words_read(script) if word] == [
        word for word in words_of_bash(script) if word
    ]


NUMBERS = st.integers(1, 99).map(str) | st.sampled_from(["A", "$A", "${B}", "B"])


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("+-*"), NUMBERS), min_size=1, max_size=5))
def test_numbers_are_those_of_bash(terms):
    expression = "7" + "".join(f" {sign} {number}" for sign, number in terms)
    script = f"A=3\nB=5\ntrain $(({expression}))"
    assert words_read(script) == words_of_bash(script)


@pytest.mark.parametrize(
    ("script", "names"),
    [
        ("train --x $TP", ["TP"]),
        ("A=$1\ntrain --x ${A}", ["1"]),
        ("train --x $((8 * N))", ["N"]),
        ("train --x $(nproc)", ["$(nproc)"]),
        ("train --x a`hostname -s`b", ["`hostname -s`"]),
        ('train --x "a `hostname` $(date +%s) b"', ["`hostname`", "$(date +%s)"]),
        ("if [ -f x ]; then A=1; else A=2; fi\ntrain --x $A", ["A"]),
        ("case $M in a) A=1;; b) A=2;; esac\ntrain --x $A", ["A"]),
        ("for A in 1 2; do train --x $A; done", ["A"]),
        ("train --x ${A##*/}", ["A"]),
    ],
)
def test_what_the_script_does_not_say_is_named(script, names):
    assert unknown_names(" ".join(words_read(script))) == names


def test_values_that_are_given_stay():
    script = "TP=8\nA=${TP}\nif [ $TP = 2 ]; then B=1; else B=3; fi\ntrain $A $B"
    assert read_script(script, {"TP": "2"}).commands[-1] == ["train", "2", "1"]


def test_branches_that_may_be_taken_agree_or_have_the_most_flags():
    script = "A=(--x 1)\nif [ -f x ]; then A+=(--y 2); fi\ntrain ${A[@]}"
    assert words_read(script) == ["--x", "1", "--y", "2"]


def test_a_text_within_a_script_has_its_variables():
    script = 'N=4\ncat <<EOF > ds.json\n{"a": $N, "b": {"c": "$(date)"}}\nEOF\ntrain --x 1'
    read = read_script(script, {})
    assert read.texts[0].startswith('{"a": 4, ') and read.commands[-1] == ["train", "--x", "1"]


def test_nothing_is_executed(tmp_path):
    witness = tmp_path / "executed"
    read_script(f"touch {witness}\nA=$(touch {witness})\n`touch {witness}`\ntrain $A", {})
    assert not witness.exists()


def test_words_of_flags():
    words = [
        "torchrun",
        "--nnodes",
        "4",
        "pretrain.py",
        "--a",
        "1",
        "2",
        "--b=3",
        "--c 4 --d",
        "-e",
    ]
    assert flag_words(words) == {
        "nnodes": ["4"], "a": ["1", "2"], "b": ["3"], "c": ["4"], "d": ["-e"]
    }  # fmt: skip


PIECES = [
    *("'", '"', "`", "$", "(", ")", "{", "}", "[", "]", "\\", "\n", ";", ";;", "|", "&&", " ", "#"),
    *("<<EOF\n", "EOF\n", "if ", "then ", "elif ", "else ", "fi", "case ", "in ", "esac", "for "),
    *("while ", "do ", "done", "--a", "A=", "A+=(", "$A", "${A", "${A[@]}", "$((", "))", ":-", "1"),
    *("+", "\0", "\1"),
]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=40).map("".join))
def test_any_text_is_read(text):
    assert "\0" not in "".join(unknown_names(read_script(text, {}).variables.get("A", "")))


@pytest.mark.parametrize("text", ["for", "for \n", "case", "if", "while ", "case x in"])
def test_a_command_that_does_not_end_is_read(text):
    assert read_script(text, {}).commands == []


def test_a_script_that_nests_too_deep_is_refused():
    with pytest.raises(PartoptError, match="too deep"):
        read_script("$((" * 2000, {})


def test_where_a_branch_may_not_be_taken_what_it_sets_is_not_known():
    given = '[ "$GIVEN" = 2 ]'
    for test in (given, f"{given} && [ 1 = 1 ]", f"[ 1 = 2 ] || {given}"):
        words = words_read(f"A=1\nif {test}; then A=3; fi\ntrain $A")
        assert unknown_names(" ".join(words)) == ["A"]


def test_a_comparison_of_nothing_is_not_known():
    script = read_script('A=\nif [ "$A" -gt 1 ]; then B=1; fi\ntrain $B', {})
    assert unknown_names(script.commands[-1][1]) == ["B"]
