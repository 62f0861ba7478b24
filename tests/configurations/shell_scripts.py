"""Shell scripts at random, harmless to run, that end in a command `train`: its words are compared.

Those of a Writer are of what the reader knows; statements are of all that bash has.
"""

from __future__ import annotations

import atexit
import functools
import tempfile
from collections.abc import Sequence
from pathlib import Path
from random import Random

from partopt.configurations.marks import without_unset
from partopt.configurations.shell import read_script
from partopt.configurations.shell_values import present_words
from tests.bash import run_bash

NAMES = ["A", "B", "C", "D"]
ARRAYS = ["X", "Y"]
TEXTS = ["", "1", "2", "8", "07B", "a b", "--x 3", "it's", 'say "hi"', "a/b/c.d.sh", " edge ", "$A"]
TEXTS += ["Full"]
SIGNS = [*"+-*/%<>&|^", "**", "<=", ">=", "==", "!=", "&&", "||", "<<", ">>"]
LITERAL = ["1", "2", "7", "0x10", "010", "12", "3"]


# statements over a few variables, in whose places values are drawn
STATEMENTS = [
    *("A={w}", "A+={w}", "B=$A{w}", "B=({w} {w} {w})", "B+=({w})", "B[{n}]={w}", "B[-1]={w}"),
    *("B[i+1]={w}", "B[{n}]+={w}", "((B[{n}]++))", "unset 'B[{n}]'", "unset B", "i={n}"),
    *("declare -i N={n}*2; N+={n}", "declare -u U={w}", "declare -l U={w}; U+={w}"),
    *("declare -A M; M[{w}]={n}; M[{w}]={w}; A=${{M[{w}]}}${{#M[@]}}", 'export "A={w}"'),
    *("declare -n R=A; R={w}", "f() {{ local -n r=$1; r={w}; }}; f A"),
    *("f() {{ declare -g A={w}; local i={n}; return {n}; }}; f && B={w}",),
    *("f() {{ for i in 1 2; do [ $i = {n} ] && return {n}; done; }}; f || A={w}",),
    *("printf -v A '%02d%s' {n} {w}", "A=$(printf '%s:%d' {w} {n})", "A=$(echo -e '{w}\\t{w}')"),
    *("A=$'{w}\\t\\x4{n}'", "B=({{0{n}..1{n}}})", "B=({{{w},x{{{n},{w}}}}})", "B=({{9..{n}..2}})"),
    *(
        "case {w}{n} in {p}) A=1;; *) A=2;; esac",
        "A=${{A#{p}}}",
        "A=${{A%%{p}}}",
        "A=${{A//{p}/_}}",
    ),
    *("case {w} in {p}) A=1;;& {p}) B=2;& a) i=3;; *) A=4;; esac", "[[ {w}{n} == {p} ]] && A=y"),
    *("[[ {w}{n} =~ ^[[:alpha:]]+{n}$ ]] && A=z", "A=${{B[@]:1}}", "A=${{B[{n}]:-{w}}}"),
    "[[ ! -n $U && {w} == {p} || $i -gt {n} ]] && A=b || A=c",
    "[[ {n} -eq 1 || ! {w} == {p} && ( -z $U || ! $i == {n} ) ]] && A=d",
    *("i1=x; B=($i{{1,{n}}}{w})", "B=(${{i}}{{1,{n}}} $1{{0,1}})"),
    *("for i in 1 2 3; do for j in 1 2; do [ $i$j = {n}1 ] && continue 2; A+=$j; done; done",),
    *("for i in 1 2 3; do for j in 1 2; do [ $i$j = {n}2 ] && break 2; A+=$j; done; done",),
    *("A=$(false) || A={w}", "A=$(echo {w}) && B={n}", "(exit {n}) && A=q", "A={w} & wait"),
    *("false | true && A={w}", "set -o pipefail; false | true || A={w}", "! (exit {n}) || A=r"),
    *("f() {{ [ {n} = 1 ]; return $?; }}; f && A={w}", "f() {{ [ {n} = 2 ]; }}; f && A={w}"),
    *("IFS=,; B=({w},{n} $A,$A); unset IFS", "A='{w},x y,{n}'", 'IFS=,; A="${{B[*]}}"; B=($A)'),
    *("IFS=$'\\n'; B=($A); IFS=' '", "IFS=, read -r i <<< {w}; B=($A)", "IFS=; B=($A); unset IFS"),
    *("while (( i < 5 )); do i=$((i + {n} + 1)); done", "if true | false; then A={w}; fi"),
    *("IFS=, read -ra B <<< {w},{n}", "mapfile -t B <<< {w}", 'unset B; A="${{#B[@]}}"'),
    *(
        "B=({{a..d}}{w} {{C..A..2}} {{a..{n}}})",
        "set -- -{w} {n}; while getopts a:Q o; do A=$OPTARG; done",
    ),
    *("B=(); if ls | grep -q {w}; then A={w}; fi", "for i in {{1..1{n}2}}; do A+=$i; done"),
    "B=([2]={w} {w} [{n}]={w}); B+=([3]+=x)",
    # what files there are, and where people's folders lie
    *("B=({p} {w})", "B=('{p}' {w}* {w}\\* a\"?\"b)", "A={p}; B=($A {p})", "A=$(echo {p})"),
    *("for i in {p} {w}? x; do A+=$i; done", "set -- {p} {w}; A=$2$#", "B=(${{U:-{p}}} {w}$A*)"),
    *("IFS=,; A='{w},{p}'; B=($A); unset IFS", "shopt -s nullglob; B=({p}{w} {w})", "A={w}*"),
    *('f() {{ A=$1; shift {n}; B=("$@" $1); }}; f {p} {w} {w}', "set -f; B=({p} {w}); set +f"),
    *("B=($(ls) {w}); A=${{B[{n}]}}${{#B[@]}}", "B=({w} $(ls)); unset 'B[{n}]'; B[{n}]+=1"),
    *("mapfile -t B < <(ls); A=${{B[{n}]}}${{#B[@]}}", "[ {w}* = {w} ] && A=2; B=({{{w},{p}}}x)"),
    *(
        "if [ -f a ]; then i='1 2'; fi; B=($i {w}); A=${{B[1]}}",
        "B=($(ls)); for i in ${{#B[@]}}; do A=$i; done",
    ),
    *(
        "A=~/{w}",
        "HOME=/h{n}; A=~/{w}:~:{w}~",
        "A=~{w}/x:~; B=(~ '~' ~+ {w}~)",
        "HOME=; B=(~ ~/{w})",
    ),
    *(
        'HOME=/h/{w}; B=(~ ~/{w} \\~ ~"{w}" ~/"$A" a=~ {w}:~ [7]={w}:~)',
        "HOME='/h {n}'; B=(~ ~/$A)",
    ),
    *("HOME=/h{n}; case /h1/{w} in ~/*) A=2;; esac; [[ /h{n} == ~ ]] && A+=r; A=$A:~:${{A#~}}",),
    *("HOME=/{w}; A=/{w}/x; A=${{A#~/}}${{V:-~}}\"${{V:-~}}${{V-'{w}'}}${{A:+'$A'}}\"",),
    *(
        "HOME=/h; B=({{~,{w}}}/x {{a=~,~{w}}})",
        "HOME=/h; f() {{ B=($2 $1); }}; f U=~/{w} {w}:~ ~/{w}",
    ),
    *("HOME=/h; eval A=~/{w}; A+=:~", "HOME=/h; for i in ~ u=x:~; do A+=$i; done; A+=$(cat <<< ~)"),
]
FILLINGS: dict[str, Sequence[str]] = {
    "w": ["a", "ab", "xyz", "Q"],
    "n": "0123",
    "p": ["a*", "*[[:digit:]]", "[^a]*", "?", "[!x-z]*", "@(a|b)", "[[:upper:]]?"],
}


def fill(statement: str, w: str, n: str, p: str) -> str:
    """A statement with a word, a number and a pattern in their places."""
    return statement.format(w=w, n=n, p=p)


def draw(random: Random) -> str:
    """A script of some statements."""
    return show(
        [
            fill(random.choice(STATEMENTS), *map(random.choice, FILLINGS.values()))
            for _ in range(random.randint(1, 5))
        ]
    )


def show(statements: Sequence[str]) -> str:
    """A script that runs the statements and hands on what they leave."""
    shown = 'train "$A" "${B[@]}" x${#B[@]} "${B[1]}" x$N x$U x$i "${A:-1}"'
    return "\n".join(["i=0 A=m", *statements, shown])


@functools.cache
def folder() -> Path:
    """A folder with files whose names are drawn."""
    made = tempfile.TemporaryDirectory()
    atexit.register(made.cleanup)
    for name in ("a", "ab", "xyz", "x1", "7", "a b", "c*"):
        (Path(made.name) / name).touch()
    return Path(made.name)


def words_of_bash(script: str, where: Path | None = None) -> list[str] | None:
    """The words of the last `train` that bash runs there, or in a folder with files.

    None where bash reports an error.
    """
    begin = "train() { [ $# = 0 ] || printf '%s\\0' \"$@\"; }\n"
    done = run_bash(begin + script, cwd=where or folder())
    return None if done.stderr else done.stdout.split("\0")[:-1]


def words_read(script: str) -> list[str]:
    """The words of the last `train` that is read."""
    commands = [words[1:] for words in read_script(script, {}).commands if words[0] == "train"]
    return list(commands[-1])


def words_known(script: str) -> list[str]:
    """The words that are read, of which those that are set nowhere are none, or empty in quotes."""
    return [without_unset(word) for word in present_words(words_read(script))]


class Writer:
    """Writes one script; `depth` bounds what stands in each other."""

    def __init__(self, seed: int) -> None:
        self.random, self.functions = Random(seed), 0

    def pick(self, *among: str) -> str:
        return self.random.choice(among)

    def script(self) -> str:
        """Variables, some statements, and `train` with words."""
        lines = [f"{name}={self.random.choice('1234')}" for name in NAMES]
        lines += ["X=(1 'b c')", "Y=()", "N=3", "I=0"]
        lines += [self.statement(2) for _ in range(self.random.randint(1, 6))]
        words = " ".join(self.word() for _ in range(self.random.randint(1, 5)))
        return "\n".join(lines) + f"\n{self.run(words)}\n"

    def run(self, words: str) -> str:
        continued = words.replace(" ", " \\\n  ", 1)
        return self.pick(
            f"train {words}",
            f"train {continued}",
            f"echo run &>/dev/null; train {words} 2>/dev/null",
            f'set -- {words}\ntrain "$@" $# ${{1:-none}}',
            f'T=({words})\ntrain "${{T[@]}}" ${{#T[@]}}',
            f'T="{self.quoted()} --tail 1"\ntrain $T {words}',
            f'T="\\\n  --a 1 \\\n  --b {self.quoted()} \\\n"\ntrain $T',
        )

    def quoted(self) -> str:
        """What stands in double quotes."""
        return "".join(
            self.pick("a", " ", "\\\n", "\\$A", "\\\\", "'", "#", ";", "|", self.expansion(2))
            for _ in range(self.random.randint(0, 4))
        )

    def word(self) -> str:
        """A word as it is written."""
        parts = [
            self.pick(
                "w",
                "--flag",
                "=",
                "\\ ",
                "'q r'",
                "{1,2}",
                "''",
                f'"{self.quoted()}"',
                self.expansion(2),
            )
            for _ in range(self.random.randint(1, 3))
        ]
        return "".join(parts)

    def number(self, depth: int) -> str:
        """An expression of whole numbers."""
        if not depth:
            return self.pick(*LITERAL, "N", "$N", "${N}", "I")
        one, other = self.number(depth - 1), self.number(depth - 1)
        return self.pick(
            one,
            f"({one})",
            f"- {one}",
            f"!{one}",
            f"({one} ? {other} : {one})",
            f"{one} {self.pick(*SIGNS)} {other}",
            f"{one} + {other} * 2",
        )

    def expansion(self, depth: int) -> str:
        """A value of a variable, or what is made of one."""
        name, array = self.pick(*NAMES), self.pick(*ARRAYS)
        inner = self.pick("d", "x y", "$B", "${C}")
        return self.pick(
            f"${{{name}}}",
            f"${{{array}[@]}}",
            f"${{{array}[*]}}",
            f"${{#{array}[@]}}",
            f"${{{array}[0]}}",
            f"${{{array}[-1]:-none}}" if array == "X" else f"${{{array}:-none}}",
            f"${array}",
            f"${{#{name}}}",
            f"${{{name}:-{inner}}}",
            f"${{{name}-{inner}}}",
            f"${{{name}:+{inner}}}",
            f"${{{name}%.*}}",
            f"${{{name}%%/*}}",
            f"${{{name}#*/}}",
            f"${{{name}##*/}}",
            f"${{{name}/b/Z}}",
            f"${{{name}//[a-c]/-}}",
            f"${{{name}:0:2}}",
            f"${{{name}:1}}",
            f"${{{name}^^}}",
            f"${{{name},,}}",
            f"${{{array}[@]/b/k}}",
            f"${{{array}[@]:1:1}}",
            f"$(({self.number(depth)} ))" if depth else "$N",
            f"$(echo {name.lower()} ${name})",
            "$(seq 1 3)",
            f"`echo ${name}`",
        )

    def condition(self, depth: int) -> str:
        name, value = self.pick(*NAMES), self.pick("1", "2", '"a b"', "Full")
        test = self.pick("-eq", "-ne", "-lt", "-le", "-gt", "-ge")
        simple = self.pick(
            f'[ "${name}" = {value} ]',
            f'[ "${name}" != {value} ]',
            f"[ $N {test} {self.pick('1', '3')} ]",
            f'[ -z "${name}" ]',
            f'[ -n "${name}" -a $N -gt 1 ]',
            f"[[ ${name} == {self.pick('[12]*', 'a*', value)} ]]",
            f'[[ ${name} != "{self.pick("1", "*")}" ]]',
            f"[[ -n ${name} && $N {test} 3 ]]",
            f"[[ ! -z ${name} || ( $N {test} 2 && 1 -eq 1 ) ]]",
            f"[[ ${name} =~ ^[0-9]+(B|b)?$ ]]",
            "[ -z $NOWHERE ]",
            f"(( {self.number(1)} ))",
            f'! test -n "${name}"',
            "true",
            "false",
        )
        if not depth:
            return simple
        return self.pick(simple, f"{simple} {self.pick('&&', '||')} {self.condition(depth - 1)}")

    def block(self, depth: int) -> str:
        return "\n".join(f"  {self.statement(depth - 1)}" for _ in range(self.random.randint(1, 2)))

    def statement(self, depth: int) -> str:
        """An assignment, or, where `depth` allows, what has others in it."""
        name, array, words = (
            self.pick(*NAMES),
            self.pick(*ARRAYS),
            " ".join(self.word() for _ in "12"),
        )
        simple = self.pick(
            f"{name}={self.word()}",
            f'{name}="{self.quoted()}"',
            f"{name}+={self.word()}",
            f'export {name}="{self.quoted()}" N=4',
            f"{name}='{self.pick(*[text for text in TEXTS if chr(39) not in text])}'",
            f"{array}=({words})",
            f"{array}+=({words}\n  # not this: 'x\n  last\n)",
            f'{array}=("${{{array}[@]}}" {self.word()})',
            f"{array}[1]={self.word()}",
            f"{array}={self.word()}",
            f"N=$(({self.number(2)} ))",
            "N=$((N % 5))",
            "((N += 2)); ((I++)) || true",
            f"{name}=$N; N=3",
            f": ${{{name}:={self.pick('d', 'x')}}}",
            f"unset {name}; {name}=3",
            f"eval \"{name}='e f'\"",
            f'eval "{array}=({self.pick("1 2", "$A")})"',
            f"{self.condition(0)} && {name}=and",
            f"{self.condition(0)} || {name}=or",
            f"{{ {name}=group; }}",
            f"( {name}=apart )",
            f"read -r {name} {self.pick('<<<', '<<<')} 'z'; {name}=5",
            f'cat <<EOT >/dev/null\n{{"a": ${name}}}\nEOT',
        )
        if not depth:
            return simple
        body, other = self.block(depth), self.block(depth)
        self.functions += 1
        f = f"f{self.functions}"
        one, other_one, none = self.condition(1), self.condition(0), self.pick("0", "2", "3")
        J, K = f"J{depth}", f"K{depth}"
        options = f'--flag) {name}=$2; shift;;\n    *) {array}+=("$1");;'
        return self.pick(
            simple,
            f"if {one}; then\n{body}\nelif {other_one}; then\n{other}\nelse\n{body}\nfi",
            f"if {one}\nthen\n{body}\nfi",
            f"case ${name} in\n  1|2) {simple} ;;\n  a*)\n{body}\n  ;;\n  *) :;;\nesac",
            f"for {name} in {words}; do\n{body}\ndone",
            f"for (({J} = 0; {J} < {none}; {J}++)); do\n{body}\n((I > 5)) && break\ndone",
            f"{K}=0\nwhile [ ${K} -lt {none} ]; do\n{K}=$(({K} + 1))\n{body}\ndone",
            f"for {name} in 1 2 3; do\n  if [ ${name} = 2 ]; then "
            f"{self.pick('continue', 'break')}; fi\n  N=$((N * 2))\ndone",
            f"{f}() {{\n  local {name}=$1 L=2\n  {array}+=($2 $#)\n{body}\n  "
            f"{self.pick('return', ':')}\n}}\n{f} {words}",
            f"function {f} {{\n{body}\n}}\n{f}",
            f'set -- {words}\nwhile [[ $# -gt 0 ]]; do\n  case "$1" in\n    {options}\n  esac\n'
            "  shift\ndone",
        )
