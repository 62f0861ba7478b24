"""Scripts that are made to do harm: every one is read or refused in 5 s and 500 MB."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

# its peak is not that of `getrusage`, which has that of the process before it was replaced
READER = """
import resource, sys
resource.setrlimit(resource.RLIMIT_CPU, (5, 5))
resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
from partopt.configurations.shell import read_script
from partopt.errors import PartoptError
try:
    words = read_script(sys.stdin.read(), {}).commands
    said = f"read {words[-1][:3]}" if words else "read"
except PartoptError as refused:
    said = f"refused {refused.message}: {refused.hint}"
[peak] = [line for line in open("/proc/self/status") if line.startswith("VmHWM")]
below = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
print(max(int(peak.split()[1]), below) // 1024, said)
"""


def loops(head: str) -> str:
    """Twenty loops in each other, which make a text longer."""
    return head * 20 + "A=$A$A;" + " done;" * 20 + "train"


REFUSED = "too much to be read|too deep"
SCRIPTS = {
    "braces": ("train " + "{a,b}" * 30, REFUSED),
    "braces in braces": ("train " + "{a," * 40 + "b" + "}" * 40, "read"),
    "ranges": ("train {1..999999}{1..999999}{1..999999}", REFUSED),
    "a far element": ("A[999999999]=1; A[-9]=2; A[2**62]=3; train ${#A[@]}", "read"),
    "many elements": ("for i in {1..999}; do A+=({1..999}); done; train ${A[@]}", REFUSED),
    "a text that doubles": ("A=xx\nfor i in {1..60}; do A=$A$A; done\ntrain $A", REFUSED),
    "an array that doubles": ("A=x; for i in {1..60}; do A=(${A[@]} ${A[@]}); done", REFUSED),
    "arguments that double": ("set -- a; for i in {1..60}; do set -- $@ $@; done", REFUSED),
    "replacements": ("A=xx\nfor i in {1..60}; do A=${A//x/xx}; done\ntrain $A", "read"),
    "a wide form": ("printf -v A '%0999999999d' 1; train $(printf '%999999999s' x)", "read"),
    "powers": ("train $((9**9**9**9)) $((1 << 99999999999)) $((-2**63 / -1))", "read"),
    "names of names": ("".join(f"A{k}=A{k + 1}+A{k + 1}\n" for k in range(60)) + "A60=1\n"
                       "train $((A0))", REFUSED),
    "itself": ("A=A; declare -n B=C C=B; train ${!A} $((A)) $B", "read"),
    "calls": ("f() { f; f; }; f", REFUSED),
    "calls with more": ("f() { f $1$1; }; f x", REFUSED),
    "eval": ("A='eval $A'; eval $A", REFUSED),
    "groups": ("{ " * 3000 + "train" + "; }" * 3000, REFUSED),
    "parentheses": ("train $((" + "(" * 3000 + "1" + ")" * 3000 + "))", REFUSED),
    "substitutions": ("train " + "$(echo " * 900 + "x" + ")" * 900, REFUSED),
    "a chain": ("a && " * 4000 + "b", REFUSED),
    "a sum": ("train $((" + "1+" * 9000 + "1))", REFUSED),
    "negations": ("[[ " + "! " * 9000 + " a ]]", REFUSED),
    "alternatives": ("if a; then b; el" * 2000 + "if a; then b; fi", REFUSED),
    "no end": ("while true; do A=$A$A; done; train", REFUSED),
    "no end of numbers": ("for ((;;)); do :; done; train", "read"),
    "loops": (loops("for i in {1..99}; do "), REFUSED),
    "loops of unknown turns": (loops("while ping; do "), REFUSED),
    "branches": ("if ping; then A=1; else A=$A$A; fi\n" * 2000 + "train $A", REFUSED),
    "falling through": ("case x in " + "x) A=$A$A$A;& " * 300 + "esac", REFUSED),
    "a pattern": (f"X={'a' * 900}; [[ $X == {'*a' * 90}*b ]]; train ${{X##{'*a' * 90}*b}}", "read"),
    "a pattern of choices": (f"X={'a' * 90}; case $X in {'@(a|aa)' * 30}) A=1;; esac", "read"),
    "an expression": (f"X={'a' * 90}; [[ $X =~ (a*)*b || $X =~ {'a*' * 45}b ]]; train", "read"),
    "slices": (f"A={'x' * 99999}; for i in {{1..9999}}; do B=${{A:1}}; done", REFUSED),
    "substitutions in loops": (
        "for i in {1..99}; do for j in {1..99}; do x=$(echo $(echo $j)); done; done", REFUSED),
    "a long number": (f"train $((0x{'f' * 9999} + 1)) $((1{'0' * 9999} % 7)) $((2#{'1' * 9999}))",
                      "read"),
    "products of products": ("A0=3\n" + "".join(f"A{k + 1}='A{k}*A{k}'\n" for k in range(40))
                             + "train $((A40))", REFUSED),
    "assignments": ("train $((" + "A=" * 3000 + "1))", REFUSED),
    "defaults": ("train " + "${A:-" * 3000 + "x" + "}" * 3000, REFUSED),
    "places": ("train " + "${A[" * 1500 + "0" + "]}" * 1500, REFUSED),
    "a long here-document": ("cat <<E\n" + "$A $(echo x) " * 20_000 + "\nE\ntrain", REFUSED),
    "here-documents in a loop": (
        "for i in {1..999}; do cat <<E\n" + "$i\n" * 300 + "E\ndone", REFUSED),
    "here-documents in each other": ("".join(f"cat <<E{k}\n$(" for k in range(100)) + "x"
                                     + "".join(f")\nE{k}\n" for k in range(99, -1, -1)), "read"),
    "here-strings": ("A=x; for i in {1..60}; do A=$(cat <<< $A$A); done; train $A", REFUSED),
    "bars": (f"X='{'|' * 90_000}*!'; train $X $X", "read"),
    "stars": (f"X={'a' * 999}; train ${{X//{'*a' * 200}/b}} ${{X%%{'?*' * 200}b}}", "read"),
    "classes": (f"X={'a' * 900}; case $X in {'[a-z]*' * 100}B) A=1;; esac; train", "read"),
    "patterns in patterns": (
        f"X={'a' * 900}; [[ $X == +({'a|' * 100}b)+(a|aa)b ]]; train ${{X//+(a|aa)b/}}", "read"),
    "counted letters": (f"X={'a' * 900}; [[ $X =~ {'a{1,900}' * 3}b || $X =~ ((a+)+)+b ]]; train",
                        "read"),
}  # fmt: skip


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_hostile_script_is_bounded(name):
    script, expected = SCRIPTS[name]
    command = [sys.executable, "-c", READER]
    done = subprocess.run(command, input=script, capture_output=True, text=True, check=True)
    megabytes, said = done.stdout.split(" ", 1)
    assert int(megabytes) < 500
    if expected == "read":
        assert said.startswith("read")
    else:
        assert said.startswith("refused") and "give the flags alone" in said
        assert any(what in said for what in expected.split("|"))
