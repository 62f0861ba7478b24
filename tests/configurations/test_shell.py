"""Shell scripts: what is read without executing them is what bash makes of them."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partopt.configurations import shell_syntax
from partopt.configurations.marks import is_unset, unknown_names
from partopt.configurations.shell import read_script
from partopt.configurations.shell_syntax import BrokenScriptError
from partopt.configurations.shell_values import flag_words
from partopt.errors import PartoptError
from tests.bash import run_bash
from tests.configurations.shell_scripts import (
    FILLINGS,
    STATEMENTS,
    Writer,
    fill,
    show,
    words_known,
    words_of_bash,
    words_read,
)

pytestmark = pytest.mark.skipif(
    shutil.which("bash") is None, reason="there is no bash to compare with"
)

# every script ends in the command `train`, whose words are compared
SCRIPTS = {
    "arrays": 'A=(\n  --x 1 # of one\n  --y "two words"\n  #--z 3\n)\nB=("${A[@]}" --w)\n'
    "train ${B[@]}",
    "classes of letters": "X='a-b]c_d e'; [[ ']' =~ ^[[:punct:]]$ ]] && A=1; train $A"
    ' "${X//[[:punct:]]/.}" "${X//[^[:punct:]]/.}" "${X//[[:space:]a]/}"',
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
    "one of several, not the first": "A=1; [[ ! -n $A && -n $A || $A == 1 ]] && B=x; train $B",
    "other than empty": "A=; train a${A:+1} b${A+2} c${A:-3} d${A-4}",
    "braces of letters": "train {a..e} {e..a..2} {C..A} {a..3} {3..a} {a..a} x{b..c}y {aa..c}",
    "numbers beyond 64 bits": "X=99999999999999999999; train $((0x1ffffffffffffffff)) $((X + 1)) "
    "$((18446744073709551617)) $((-9223372036854775808)) $((-(-9223372036854775807 - 1)))",
    "here-documents": "N=3; X=$(cat <<E\n{'x': $N, \\$N}\n\ty\nE\n); Y=$(cat <<-'E'\n"
    '\ta $N\n\t\tb\n\tE\n); train "$X" $Y "$(cat <<< "a  b")"',
    "a long range": "for i in {1..2000}; do A=$i; done; train $A",
    "how many there are": 'A=(1); unset A; train "${#A[@]}" "${#B[@]}"',
    "braces behind a name": "X1=a; X=z; train $X{1,.2} ${X}{1,2}",
    "if without else": "A=1\nif [ $A = 2 ]; then A=3; fi\nif [ $A = 4 ]; then A=5; fi\ntrain $A",
    "both and either": 'A=1\nif [ $A -eq 1 ] && [ -n "" ]; then B=x; else B=y; fi\n'
    'if [[ $A == 2 || $A != 3 ]]; then C=x; else C=y; fi\ntrain "$B" "$C"',
    "case": "M=13B\ncase $M in\n 7B) H=4096;;\n 13B|14B)\n  H=5120\n  ;;\n *) H=1;;\nesac\n"
    "train $H",
    "case of anything": "M=8B; case $M in 7B) H=1 ;; *) H=2 ;; esac; train $H",
    "nested": "A=1\nif [ $A = 1 ]; then\n if [ $A = 2 ]; then B=2; else B=3; fi\n C=4\nfi\n"
    "train $B $C",
    "elements that begin with signs": 'A=(--f [0]*3+[1]*58 =x\n  [1]*2 y)\ntrain "${A[@]}"',
    "braces": "A=x; train {1..9..4} {3..1} a{b,c{d,e}}f {a}{$A,2} '{1,2}' \\{1,2} {x,{y {,z} {1..a}"
    " {a,b}{1,2}",
    "loops in numbers": "for ((i = 0, n = 1; i < 3; i++)); do ((n *= 2)); done; let m=n+1 k=m%2\n"
    "train $i $n $m $k $((0x1f + 010 + 2#101)) $((n > 7 ? n-- : 0)) $n $((1 << 3 | 1)) $((-7 / 2))",
    "changes of values": "F=/a/b.tar.gz; train ${F##*/} ${F%.*} ${F%%.*} ${F/a/x} ${F//a} ${F:3:1}"
    " ${F: -2} ${F/#\\/a/_} ${F/%gz/z} ${#F}",
    "people's folders": "HOME=/q; A=~/x:~:b~ B=(~ ~/x '~' \\~ ~\"/x\" a=~ y:~); export C=~\n"
    'case /q/x in ~/*) D=1;; esac; for i in u=~ ~/"$D"; do E+=$i; done; [[ ~ == /q ]] && F=1\n'
    'train "$A" "${B[@]}" $C $D $E$F a=~ --a=~ {~,a}/x "${U:-~}" ${U:-~/x} ${A#~/}',
    "no folder of somebody": 'HOME=; A=(~ ~/x) HOME="/a b"; train "${A[@]}" ~/c "$(cat <<< ~)"',
    "patterns in quotes": """train "*" 'a?' a\\* "[ab]" "$(A=*; echo "$A")\"""",
    "quotations in defaults": """A=1; train "${A:+'q'}" "${B-'a b'}" ${B:-'q'} "${A#'1'}\"""",
    "elements with places": 'i=1; A=([2]=x y [i]=z); A+=(w); train "${A[@]}" ${#A[@]} ${A[2]}',
    "elements by their places": "A=(a b); A[1]=c; A[5]=d; i=1; train ${A[i]} ${A[$i-1]} ${A[-1]}",
    "a function": 'f() {\n  local y=2\n  A="--x $y"\n}\nf\ntrain $A',
    "assigned before": "A=1 B=2 true\nC=3 train --x 4",
    "several on a line": "A=1;B=2\tC=3; train $A$B$C;true",
    "quotations": """train "a'b" 'c"d' e\\ f "g\\"h" ''""",
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_words_are_those_of_bash(name):
    assert words_read(SCRIPTS[name]) == words_of_bash(SCRIPTS[name])


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 200, 20))
def test_the_words_of_random_scripts_are_those_of_bash(first):
    compared = 0
    for seed in range(first, first + 20):
        script = Writer(seed).script()
        expected = words_of_bash(script)
        if expected is not None:  # as of one that divides by zero
            assert words_known(script) == expected, f"seed {seed}:\n{script}"
            compared += 1
    assert compared >= 15


def test_what_a_script_starts_in_bash_ends_with_it(tmp_path):
    script = "f() { f; f; }\nf 2>/dev/null\n(sleep 1; touch late) &\nsleep 60"
    with pytest.raises(subprocess.TimeoutExpired):
        run_bash(script, cwd=tmp_path, timeout=0.5)
    time.sleep(1)
    assert not (tmp_path / "late").exists()


FILLED = st.builds(
    fill, *map(st.sampled_from, (STATEMENTS, FILLINGS["w"], FILLINGS["n"], FILLINGS["p"]))
)


@settings(max_examples=100, deadline=None)
@given(st.lists(FILLED, min_size=1, max_size=5))
def test_statements_leave_what_bash_leaves_or_what_is_not_known(statements):
    """A value that bash has not is never read; what is not modelled has a name."""
    script = show(statements)
    expected = words_of_bash(script)
    if expected is None:
        return
    found = words_known(script)
    if not any(map(unknown_names, found)):
        assert found == expected, script


def test_a_file_in_a_folder_that_a_command_prints_is_named_shortly():
    script = 'D=$(cd "$(dirname "$0")" && pwd)\nsource "$D/models/x.sh"\n. $E/y.sh\n. $1/z.sh'
    assert read_script(script, {}).unread == ["$(..)/models/x.sh", "$E/y.sh", "$1/z.sh"]


def test_a_file_that_lies_in_the_folder_is_read(tmp_path):
    (tmp_path / "models").mkdir()
    (tmp_path / "models/x.sh").write_text("MODEL=(--n 4)\nreturn 0\nMODEL=()\n")
    (tmp_path / "bad.sh").write_text("A=1\nfi\n")
    begin = 'D=$(cd "$(dirname "$0")" && pwd)\n'
    for file in (
        '"$D/models/x.sh"',
        "models/x.sh",
        "./models/../models/x.sh",
        "$WHERE/models/x.sh",
    ):
        read = read_script(f"{begin}source {file}\ntrain ${{MODEL[@]}}", {}, tmp_path)
        assert (read.commands[-1], read.unread) == (["train", "--n", "4"], [])
    outside = f"source {tmp_path}/models/x.sh\n. models/$N.sh\nsource models\nsource\n. y.sh"
    read = read_script(outside, {}, tmp_path)
    assert read.unread == [f"{tmp_path}/models/x.sh", "models/$N.sh", "models", "", "y.sh"]
    with pytest.raises(BrokenScriptError, match=r"^bad\.sh, line 2: bash would refuse it"):
        read_script("source bad.sh", {}, tmp_path)
    (tmp_path / "again.sh").write_text("source again.sh\n")
    with pytest.raises(PartoptError, match=r"too deep|too much"):
        read_script("source again.sh", {}, tmp_path)


def test_many_lines_that_grow_a_text_are_read():
    lines = [f'ARGS="$ARGS --option-{n} /a/long/path/{n:0100}"' for n in range(160)]
    words = words_read("\n".join(["ARGS=", *lines, "train $ARGS"]))
    assert len(words) == 320 and words[-2] == "--option-159"


def test_overrides_of_hydra_are_settings():
    words = [
        "--config-name",
        "c",
        "++model.tensor_model_parallel_size=4",
        "'trainer.nodes=2'",
        "--x",
        "1",
        "a.b",
    ]
    found = flag_words([word.strip("'") for word in words])
    assert found == {
        "config-name": ["c"],
        "model.tensor_model_parallel_size": ["4"],
        "trainer.nodes": ["2"],
        "x": ["1", "a.b"],
    }


def test_a_condition_that_is_not_known_leaves_no_default():
    """Whether a variable was set is not known either."""
    for test in ("nvidia-smi | grep -q H100", "[ -f x ]", "read A"):
        words = words_read(f"if {test}; then TP=8; fi\ntrain ${{TP:-1}} ${{TP:+2}}")
        assert [bool(unknown_names(word)) for word in words] == [True, True]
    assert words_read("train ${1:-2} ${NEVER:-3}") == ["2", "3"]


def test_expressions_that_would_be_tried_in_many_ways_are_not_known():
    many = "a*" * 20 + "b"
    for pattern in (many, "(a|aa)(a|aa)" * 9 + "b", "(a*)*b", "(a+)+b"):
        begin = time.process_time()
        words = words_read(f"X={'a' * 90}\nif [[ $X =~ {pattern} ]]; then A=1; fi\ntrain $A")
        assert unknown_names(words[0]) and time.process_time() - begin < 1
    assert words_read("[[ 12.3.4 =~ ^[0-9]+.[0-9]+.[0-9]+$ ]] && A=1\ntrain $A") == ["1"]


WORDS = st.text(st.sampled_from("ab1 -=\"'$#\\;&|()"), max_size=6)


@settings(max_examples=60, deadline=None)
@given(st.lists(WORDS, max_size=5))
def test_quoted_words_are_themselves(words):
    script = f'A=({shlex.join(words)})\ntrain x "${{A[@]}}" {shlex.join(words)}'
    assert words_read(script) == words_of_bash(script)


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
        ("if [ $NODES -le 4 ]; then A=1; else A=2; fi\ntrain --x $A", ["NODES"]),
        ("if [ -f x ]; then A=1; else A=2; fi\ntrain --x $A", ["A"]),
        ("case $M in a) A=1;; b) A=2;; esac\ntrain --x $A", ["A"]),
        ("for A in 1 2; do train --x $A; done", ["A"]),
        ("train --x ${A##*/}", ["A"]),
    ],
)
def test_what_the_script_does_not_say_is_named(script, names):
    assert unknown_names(" ".join(words_read(script))) == names


@pytest.mark.parametrize(
    ("script", "names"),
    [
        ("for f in *.nope; do A+=x; done; train $A", ["A"]),
        ("A=$(echo a*); train $A", ["a*"]),
        ("set -- * b; train $# $2", ["$#", "$2"]),
        ("A=(x a? b); train ${A[0]} ${#A[@]} ${A[2]} ${A[@]:1}", ["${#A[@]}", "A[2]", "${A[@]:1}"]),
        ("A=($(ls) b); train ${A[1]}", ["A[1]"]),
        ('f() { shift; train "$1"; }; f [^a]* b', ["$1"]),
        ("B=([^a]* [ab] [a.b]*)\ntrain ${B[@]}", ["[^a]*", "[ab]", "[a.b]*"]),
        ("D=data; A='*'; train --path=$D/$A.bin", ["--path=data/*.bin"]),
        ("if [ -f a ]; then i='1 2'; fi; A=($i b); train ${A[1]}", ["A[1]"]),
        ("A=~/x; train $A ~a/y ~+", ["HOME", "~a", "~+"]),
        ("shopt -s nullglob; train *.nope", ["*.nope"]),
    ],
)
def test_what_files_and_folders_there_are_is_not_known(script, names):
    """What is known beside those is what bash has, in a folder of some files."""
    words = words_read(script)
    assert unknown_names(" ".join(words)) == names
    expected = words_of_bash(script)
    assert expected is not None
    assert {word for word in words if not unknown_names(word)} <= {*expected}


def test_a_list_of_blocks_is_no_pattern():
    lists = ["[0]*3+[1]*58", "([0]*2+[1]*3)*2", "--x=[1,2]", "Et*3|(tt|)*29m|L", "M-M-M*-M-"]
    assert words_read(f"A='{' '.join(lists)}'; train $A") == lists
    assert words_read("A=([0]*3+[1]*58); train ${A[@]} --x=[1,2]") == [lists[0], lists[2]]


def test_values_that_are_given_stay():
    script = "TP=8\nA=${TP}\nif [ $TP = 2 ]; then B=1; else B=3; fi\ntrain $A $B"
    assert read_script(script, {"TP": "2"}).commands[-1] == ["train", "2", "1"]


def test_branches_that_may_be_taken_agree_or_leave_a_flag_that_is_not_known():
    script = "A=(--x 1)\nif [ -f x ]; then A+=(--y 2); B=1; else B=1; fi\ntrain ${A[@]} $B"
    x, one, y, two, b = words_read(script)
    assert (x, one, y, b) == ("--x", "1", "--y", "1") and unknown_names(two) == ["A"]


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
        *["torchrun", "--nnodes", "4", "pretrain.py", "--a", "1", "2", "--b=3"],
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
def test_any_text_is_read_or_refused_with_its_line(text):
    try:
        found = read_script(text, {})
    except PartoptError as refused:
        assert re.match(r"(`.*`, )?line [0-9]+: bash would refuse it: ", refused.message, re.S)
    else:
        assert "\0" not in "".join(unknown_names(found.variables.get("A", "")))


BROKEN = ["for", "for \n", "case", "if", "while ", "case x in", "(" * 500, "$((" * 500]


@pytest.mark.parametrize("text", BROKEN, ids=lambda text: text[:9])
@pytest.mark.parametrize("before", ["", "A=1\n"])
def test_a_command_that_does_not_end_is_refused_with_its_line(text, before):
    line = before.count("\n") + 1
    with pytest.raises(BrokenScriptError, match=f"^line {line}: bash would refuse it: ") as refused:
        read_script(before + text, {})
    assert refused.value.hint == "give the flags alone, with their values"


def test_a_script_that_nests_too_deep_is_refused():
    with pytest.raises(PartoptError, match=r"too deep|too much"):
        read_script("echo " + "$((" * 500 + "1" + "))" * 500, {})


@pytest.mark.parametrize(
    ("script", "what"),
    [
        ("eval 'train --x 1 ('", "`train --x 1 (`, line 1: bash would refuse it: "),
        ('logger "it\'s --x 1"\ntrain --y 2', None),
        ("cat <<EOF\nit's --x 1\nEOF\ntrain --y 2", None),
    ],
)
def test_words_that_may_be_commands_are_refused_where_they_are_run(script, what):
    if what:
        with pytest.raises(BrokenScriptError) as refused:
            read_script(script, {})
        assert refused.value.message.startswith(what)
    else:
        assert read_script(script, {}).commands[-1] == ["train", "--y", "2"]


def test_shfmt_is_found_or_what_is_missing_is_said(monkeypatch, tmp_path):
    """Beside the interpreter, among the files of the package, then on PATH."""
    (tmp_path / "shfmt").write_text("#!/bin/sh\n")
    (tmp_path / "shfmt").chmod(0o755)
    find = shell_syntax._find_shfmt.__wrapped__
    beside = find()
    monkeypatch.setattr(shell_syntax.sysconfig, "get_path", lambda name: str(tmp_path / "none"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert Path(find()).resolve() == Path(beside).resolve()
    monkeypatch.setattr(shell_syntax.metadata, "files", lambda name: None)
    assert find() == str(tmp_path / "shfmt")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(PartoptError, match="shfmt is not installed") as missing:
        find()
    assert missing.value.hint == "pip install shfmt-py"


def test_a_program_that_numbers_operators_or_takes_too_long_is_refused(monkeypatch, tmp_path):
    numbers = '{"Stmts": [{"Op": 11, "Pos": {"Offset": 0}, "End": {"Offset": 1}}]}'
    for body, what in ((f"echo '{numbers}'", "is too old"), ("exec sleep 60", "too much")):
        other = tmp_path / "shfmt"
        other.write_text(f"#!/bin/sh\n{body}\n")
        other.chmod(0o755)
        monkeypatch.setattr(shell_syntax, "_find_shfmt", lambda other=other: str(other))
        monkeypatch.setattr(shell_syntax, "_SECONDS", 0.5 if "sleep" in body else 20)
        with pytest.raises(PartoptError, match=what):
            shell_syntax.parse.__wrapped__("train")


def test_a_script_is_parsed_once():
    script = "A=once\nB=$((A + 1)); C=$((2 * B))\ntrain --x ${C} $((C > 1 ? C : B)) $A"
    before = shell_syntax.parse.cache_info()
    for _ in range(3):
        read_script(script, {})
    after = shell_syntax.parse.cache_info()
    assert (after.misses - before.misses, after.hits - before.hits) == (1, 2)


def test_where_a_branch_may_not_be_taken_what_it_sets_is_not_known():
    given = '[ "$(hostname)" = 2 ]'
    for test in (given, f"{given} && [ 1 = 1 ]", f"[ 1 = 2 ] || {given}"):
        words = words_read(f"A=1\nif {test}; then A=3; fi\ntrain $A")
        assert unknown_names(" ".join(words)) == ["$(hostname)"]


@pytest.mark.parametrize(
    ("script", "flags"),
    [
        ("bash -c 'train --a 1 \\\n --b $B'", {"a": ["1"], "b": ["2"]}),
        ('srun -l sh -c "X=\\$X train --a $B --b \\"c d\\""', {"a": ["2"], "b": ["c d"]}),
        ("run -p 8 -c 'python t.py \\\n--a 1 \\\n--b 2\n'", {"a": ["1"], "b": ["2"]}),
        (
            'L="run --n 1"\nC="t.py --a $B --b 3"\nsrun bash -c \'$L --r 0 $C\'',
            {"a": ["2"], "b": ["3"]},
        ),
        (
            "C=\"train --a \\\n $B --b 'x y'\"\necho $C\neval $C | tee log",
            {"a": ["2"], "b": ["x y"]},
        ),
        ("cat > t.sh <<EOF\ntrain --a $B \\\n --b 1\nEOF\nsbatch t.sh", {"a": ["2"], "b": ["1"]}),
        (
            'O="--a <PATH TO FILE> \\\n--b 1"\nsh -c "train $O"',
            {"a": ["<PATH TO FILE>"], "b": ["1"]},
        ),
        ("X=<ip_address>\nY=<rank> # here\ntrain --a $X$Y", {"a": ["<ip_address><rank>"]}),
        ("train --a <PATH TO FILE> --b '<AS IS>'", {"a": ["<PATH TO FILE>"], "b": ["<AS IS>"]}),
        ("mpirun -np 8 -x E=$E train --a $B --b 1 2>&1 | tee x", {"a": ["2"], "b": ["1"]}),
        ("cd x || exit 1\nmkdir -p y && train --a 1 --b 2 &", {"a": ["1"], "b": ["2"]}),
    ],
)
def test_commands_in_words_are_run(script, flags):
    found = sorted(map(flag_words, read_script(f"B=2\n{script}\n", {}).commands), key=len)[-1]
    assert found.items() >= flags.items()


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ('if [ -z "$V" ]; then A=1; else A=2; fi\ntrain $A', ["1"]),
        ("if [ -z ${V} ]; then A=1; else A=2; fi\ntrain $A", ["1"]),
        ("O=--x\nif [ $V = yes ]; then O=--y; fi\ntrain $O", ["--x"]),
        ('if [ -n "$SLURM_JOB_ID" ]; then A=1; else A=2; fi\ntrain $A', ["2"]),
        (
            "A=1\nwhile [[ $# -gt 0 ]]; do case $1 in --a) A=$2; shift 2;; esac; done\ntrain $A $@",
            ["1"],
        ),
        ("if [ $# -lt 2 ]; then echo usage; exit 1; fi\ntrain ${1:-d}", ["d"]),
        ('[ -z "$DATA" ] && exit 1\nA=1\ntrain $A', ["1"]),
        ("A=1\nif [ -f x ]; then A=2; exit; fi\ntrain $A", ["1"]),
        ("B=()\nif [ -f x ]; then A=2; fi\ntrain ${#B[@]}", ["0"]),
        ("case $M in 7B) A=1;; *) A=3; exit 1;; esac\nA=2\ntrain $A", ["2"]),
        ("getopts ab o && A=1\nA=${A:-0}\ntrain $A", ["0"]),
    ],
)
def test_what_is_set_nowhere_is_empty_in_conditions(script, words):
    assert words_read(script) == words


@pytest.mark.parametrize(
    ("script", "names"),
    [
        ("while read -r a; do B=$a; done <x\ntrain $B", ["B"]),
        (
            "IFS=, read -ra A <<< 0,1; mapfile B < x\ntrain ${#A[@]} ${A[1]} ${B[1]}",
            ["${#A[@]}", "A[1]", "B[1]"],
        ),
        ("while getopts n: o -n 4; do N=$OPTARG; done; train $N", ["N"]),
        ("A=1\nwhile ping; do A=$((A*2)); done\ntrain $A", ["A"]),
        ("A=1\nfor i in 1 2; do if [ -f x ]; then break; fi; A=$((A*2)); done\ntrain $A", ["A"]),
        ("A=1\nwhile true; do A=2; A=$((A+1)); B=$A; done\ntrain $B", []),
        ("for i in $(ls); do A=$i; done\ntrain $A", ["A"]),
        ("if [ $2 = 7B ]; then L=32; else L=40; fi\ntrain $L", ["2"]),
        ("A=$(python x.py)\ntrain $((A + 1))", ["$(python x.py)"]),
        ("train $((0 ? N : 2)) $((N ? 3 : 3)) $((N && 0)) ${M%x}", ["M"]),
    ],
)
def test_what_depends_on_the_unknown_is_not_known(script, names):
    assert unknown_names(" ".join(words_read(script))) == names


def test_a_loop_computes():
    assert words_read("TP=1\nfor i in 1 2; do TP=$((TP*2)); done\ntrain $TP") == ["4"]
    [train] = read_script("for A in 1 2; do train --x $A --y 3; done", {}).commands
    assert train[3:] == ["--y", "3"] and unknown_names(train[2]) == ["A"]


def test_a_scheduler_gives_nodes_and_gpus():
    head = "#!/bin/bash\n#SBATCH --nodes=4 # four\n#SBATCH -J x --ntasks-per-node 2\n"
    words = (
        "train $SLURM_NNODES $SLURM_JOB_NUM_NODES $SLURM_NTASKS ${SLURM_GPUS_ON_NODE} $SLURM_PROCID"
    )
    found = words_read(f"{head}#SBATCH --gres=gpu:h100:8\n{words}")
    assert found[:4] == ["4", "4", "8", "8"] and unknown_names(found[4]) == ["SLURM_PROCID"]
    found = words_read(
        f"{head}#SBATCH --gpus-per-node=a100:4\ntrain $SLURM_GPUS_PER_NODE $WORLD_SIZE"
    )
    assert found[0] == "4" and is_unset(found[1])
    sge = '#$ -l rt_AF=16\nif [ "$SGE_RESOURCE_TYPE" = rt_AF ]; then G=8; fi\ntrain $NHOSTS $G'
    assert words_read(sge) == ["16", "8"]


def test_files_that_words_come_from_are_named():
    script = "source ./env.sh\n. $D/args.sh 1\nA=$(cat a.txt)\nsource venv/bin/activate\n"
    assert read_script(script, {"D": "conf"}).unread == ["./env.sh", "conf/args.sh", "a.txt"]


def test_arguments_are_given_by_their_numbers():
    script = "A=$1\nB=${10}\nif [ $2 = x ]; then C=y; fi\ntrain $A $B $C $#"
    given = {str(n): str(n) for n in range(1, 11)} | {"2": "x"}
    assert read_script(script, given).commands[-1] == ["train", "1", "10", "y", "10"]


HOSTILE = {
    "doubled": "A=xxxx\n" + "A=$A$A\n" * 40,
    "doubled elements": "A=(x y)\n" + 'A=("${A[@]}" "${A[@]}")\n' * 40,
    "calls": "".join(f"f{i}() {{ f{i + 1}; f{i + 1}; }}\n" for i in range(30)) + "f0",
    "calls of each other": "f() { g; g; }\ng() { f; f; }\nf",
    "loops": "for ((;;)); do for ((;;)); do A+=x; done; done",
    "loops of files": "while read x; do\n" * 25 + "A=1\n" + "done\n" * 25,
    "evaluations": 'A=\'eval "$A$A"\'\neval "$A"',
    "alternatives": "train " + "{1,2}" * 60,
    "parentheses": "( " * 20_000 + "a" + " )" * 20_000,
    "expansions": "echo " + "$((" * 15_000 + "1" + "))" * 15_000,
    "commands": "A=" + "$(echo " * 2000 + ")" * 2000,
    "long": "A=1\n" * 300_000,
    "statements": "A=1\n" * 9_900 + "for ((;;)); do for ((;;)); do A+=x; done; done",
    "words": "train " + "x " * 49_000,
    "elements that are words": "A=(" + "=x " * 1000 + ")",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", HOSTILE)
def test_what_does_too_much_is_refused_soon(name):
    began = sum(os.times()[:4])  # of the processor, that of shfmt, too
    with pytest.raises(PartoptError, match=r"too much|too deep"):
        read_script(HOSTILE[name], {})
    assert sum(os.times()[:4]) - began < 5


@pytest.mark.slow
@pytest.mark.parametrize(
    "word", ["{" * 90_000, "[" * 90_000, "{," * 4_000, "{a}" * 4_000, "x" * 90_000]
)
def test_a_long_word_is_read_soon(word):
    began = sum(os.times()[:4])
    assert words_read(f"train {word}") == [word]
    assert sum(os.times()[:4]) - began < 5


def test_a_comparison_of_nothing_fails():
    script = read_script('A=\nif [ "$A" -gt 1 ]; then B=1; else B=2; fi\ntrain $B', {})
    assert script.commands[-1] == ["train", "2"]


def test_a_variable_that_is_set_to_nothing_has_no_default():
    script = 'A=$NOWHERE; train "${A-3}" x${A:-3} ${A+4} ${A:+5}'
    assert words_known(script) == words_of_bash(script)


def test_what_a_called_function_takes_away_is_of_the_caller():
    for inside in ("unset A; A=3", "unset A", "local A=4; unset A; A=5", "let A=0 || B=2"):
        script = f"A=x\nf() {{ local A=$1; g; C=$A; }}\ng() {{ {inside}; }}\nf y\ntrain $A $B $C"
        assert words_known(script) == words_of_bash(script)
