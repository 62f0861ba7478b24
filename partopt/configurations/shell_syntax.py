"""The syntax of bash: shfmt (mvdan.cc/sh) parses a script into a tree, without running it."""

from __future__ import annotations

import functools
import itertools
import json
import re
import resource
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib import metadata
from typing import Any

from partopt.errors import PartoptError

Node = dict[str, Any]  # of shfmt's syntax tree (mvdan.cc/sh/v3/syntax), as its JSON has it
HINT = "give the flags alone, with their values"

# `<PATH TO FILE>`, to be filled in; comments and quotations are passed over
_PLACEHOLDER = re.compile(
    r"(?:^|(?<=\s))#[^\n]*|\\.|'[^']*'|\"(?:\\.|[^\"\\])*\""
    r"|(?P<word><[A-Z][^<>\n$\"']*[\w.)]>|(?<==)<[a-z][\w ./-]*>(?=[ \t]*(?:[\n#]|\Z)))",
    re.S,
)
# elements of an array that bash takes as words: `[0]*3+[1]*58`, `=x`, `[^a]*`
_TAKEN = re.compile(
    r"`\[x\]` must be followed by `=`|array element values must be words|(?P<inside>.*"
    r"must follow (an expr|a name)|.*must be followed by an expr|not a valid arithm|floating point)"
)
_TRIES = 20  # of a script with such elements
_LONGEST = 200_000  # letters of a script
_MOST = 10_000  # its words and signs, every one of which is a node of a kilobyte or two
_SIGNS = re.compile(r"[\s;&|$`({]+")
_SECONDS = 30  # of shfmt
_BYTES = 300_000_000  # its memory: its JSON is indented, by the square of what lies in each other
_GROUPS = 50  # braces of a word that are looked at
_BRACES = re.compile(r"\\.|[{},]|[^\\{},]+", re.S)
_RANGE = re.compile(  # of numbers or of letters
    r"(-?[0-9]{1,6}(?=\.\.[-0-9])|[a-z](?=\.\.[a-z])|[A-Z](?=\.\.[A-Z]))"
    r"\.\.(-?[0-9]{1,6}|[a-zA-Z])(?:\.\.-?([0-9]{1,6}))?"
)
_NAMED = re.compile(r"[a-zA-Z_]\w*(?:\[\w*\])?\+?=")  # a word that looks like an assignment
_TILDE = re.compile(r"(?:^|(?<=[:=])(?<!\\.))~[\w.+-]*(?=([/:]|$))")  # of a folder of somebody


class BrokenScriptError(PartoptError):
    """A text that bash would refuse, with the line of the fault."""


@functools.cache
def _find_shfmt() -> str:
    """The program beside the interpreter, of the installed package, or on PATH."""
    if beside := shutil.which("shfmt", path=sysconfig.get_path("scripts")):
        return beside
    try:
        files = metadata.files("shfmt-py") or []
    except metadata.PackageNotFoundError:
        files = []
    places = [str(file.locate()) for file in files if file.stem == "shfmt"]
    found = next(filter(None, map(shutil.which, [*places, "shfmt"])), None)
    if found is None:
        what = "shfmt is not installed, which parses shell scripts"
        raise PartoptError(what, "pip install shfmt-py", code="missing-program")
    return found


@functools.lru_cache(64)
def parse(text: str) -> list[Node]:
    """The statements of a script.

    `Written` of a node is how it stands there. Raises BrokenScriptError for what bash would refuse,
    and PartoptError for what is too long or nests too deep.
    """
    if len(text) > _LONGEST or len(_SIGNS.findall(text)) > _MOST:
        raise _refuse(f"a script of {len(text):,} letters does too much to be read")
    quoted = _PLACEHOLDER.sub(lambda found: f"'{found[0]}'" if found["word"] else found[0], text)
    source = quoted.encode(errors="replace")
    for _ in range(_TRIES):
        done = _run_shfmt(source)
        if not done.returncode:
            found: list[Node] = json.loads(done.stdout).get("Stmts", [])
            _add_written(found, source)
            return found
        said = done.stderr.decode(errors="replace").strip()
        fault = re.match(r"(?:<standard input>:)?([0-9]+):([0-9?]+): (.*)", said)
        if fault is None:
            raise _refuse("expressions or commands lie too deep in each other")
        line, column, why = fault.groups()
        lines, k = source.split(b"\n"), int(line) - 1
        taken, place = _TAKEN.match(why), int(column) - 1
        if taken and taken["inside"]:
            begins = [found.start() for found in re.finditer(rb"(?<![^\s(])\[", lines[k][:place])]
            place = begins[-1] if begins else -1
        if not taken or place < 0:
            message = f"line {line}: bash would refuse it: {why}"
            raise BrokenScriptError(message, HINT, code="malformed-script")
        sign = b'""' if lines[k][place : place + 1] == b"[" else b"\\"  # which makes a word of it
        lines[k] = lines[k][:place] + sign + lines[k][place:]
        source = b"\n".join(lines)
    raise _refuse("a script whose arrays have such elements does too much to be read")


def _refuse(what: str) -> PartoptError:
    return PartoptError(what, HINT, code="malformed-script")


def _run_shfmt(source: bytes) -> subprocess.CompletedProcess[bytes]:
    """The tree of a script as JSON, or what is wrong with it."""
    command, pipe = [_find_shfmt(), "-ln", "bash", "-to-json"], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        with suppress(ProcessLookupError):  # it waits for the script
            resource.prlimit(process.pid, resource.RLIMIT_DATA, (_BYTES, _BYTES))
        try:
            out, error = process.communicate(source, timeout=_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            what = f"the script does too much to be read: shfmt has not parsed it in {_SECONDS} s"
            raise _refuse(what) from None
    return subprocess.CompletedProcess(command, process.returncode, out, error)


def _add_written(node: Any, source: bytes) -> None:
    """Put into nodes how they are written."""
    for child in node.values() if isinstance(node, dict) else node:
        if isinstance(child, dict | list):
            _add_written(child, source)
    if isinstance(node, dict) and "Pos" in node and "End" in node:
        written = source[node["Pos"]["Offset"] : node["End"]["Offset"]]
        node["Written"] = written.decode(errors="replace")
        if isinstance(node.get("Op"), int):
            what = f"{_find_shfmt()} is too old: it numbers operators"
            raise PartoptError(what, "pip install 'shfmt-py>=4.2'", code="missing-program")


def expand_braces(parts: Sequence[Node]) -> Iterator[Sequence[Node]]:
    """The parts of a word with the first `{a,b}` or `{1..3}` in them as every of its alternatives.

    Nothing where there is none.
    """
    atoms = list[Node]()
    for part in parts:
        literal = part.get("Value", "") if part["Type"] == "Lit" else None
        texts = [] if literal is None else _BRACES.findall(literal)
        atoms += [{"Type": "Lit", "Value": text} for text in texts] if texts else [part]
    signs = [atom["Value"] if atom["Type"] == "Lit" else "" for atom in atoms]
    opening = (n for n, sign in enumerate(signs) if sign == "{")
    for begin in itertools.islice(opening, _GROUPS):
        depths = itertools.accumulate((sign == "{") - (sign == "}") for sign in signs[begin:])
        end = begin + len([*itertools.takewhile(bool, depths)])
        if end == len(signs):  # nothing closes it
            continue
        ways = _alternatives(atoms[begin + 1 : end], signs[begin + 1 : end])
        if ways:
            yield from ([*atoms[:begin], *way, *atoms[end + 1 :]] for way in ways)
            return


def part_tildes(parts: Sequence[Node], is_value: bool = False, named: bool = False) -> list[Node]:
    """The parts of a word with the `~` and `~user` in it as parts.

    They stand at its begin, in a value behind colons, too; in `name=value`, if `named`.
    """
    joined, found = list[Node](), list[Node]()
    for part in parts:
        if joined and joined[-1]["Type"] == part["Type"] == "Lit":
            part = {"Type": "Lit", "Value": joined.pop()["Value"] + part["Value"]}
        joined.append(part)
    first = joined[0].get("Value", "") if joined and joined[0]["Type"] == "Lit" else ""
    name = _NAMED.match(first) if named else None
    for n, part in enumerate(joined):
        text = part.get("Value", "") if part["Type"] == "Lit" else ""
        behind, begin = (name.end() if name else 0) if n == 0 else -1, 0
        for tilde in _TILDE.finditer(text):
            at, end = tilde.span()
            starts = at == behind or ((is_value or name) and text[at - 1 : at] == ":")
            if starts and (tilde[1] or part is joined[-1]):
                found += [{"Type": "Lit", "Value": text[begin:at]}] * (at > begin)
                found.append({"Type": "Tilde", "Value": tilde[0]})
                begin = end
        if not begin or begin < len(text):
            found.append(part | {"Value": text[begin:]} if begin else part)
    return found


def _alternatives(atoms: Sequence[Node], signs: Sequence[str]) -> list[Sequence[Node]]:
    """What stands between the commas of braces, or the numbers of a range; none for others."""
    if len(signs) == 1 and (bounds := _RANGE.fullmatch(signs[0])):
        ends, letters = bounds.group(1, 2), str.isalpha(signs[0][0])
        first, last = map(ord, ends) if letters else map(int, ends)
        step = max(1, int(bounds[3] or 1)) * (1 if last >= first else -1)
        numbers = range(first, last + (1 if step > 0 else -1), step)
        if len(numbers) > _MOST:
            raise _refuse(f"{{{signs[0]}}} does too much to be read")
        padded = any(re.match("-?0[0-9]", bound) for bound in ends)
        width = max(map(len, ends)) if padded else 0
        texts = map(chr, numbers) if letters else (f"{n:0{width}}" for n in numbers)
        return [[{"Type": "Lit", "Value": text}] for text in texts]
    depth, commas = 0, [-1]
    for n, sign in enumerate(signs):
        depth += (sign == "{") - (sign == "}")
        commas += [n] * (sign == "," and not depth)
    if len(commas) == 1:
        return []
    return [atoms[a + 1 : b] for a, b in itertools.pairwise([*commas, len(signs)])]


def join_names(word: Node) -> Node:
    """A word that braces made, where `$X{1,2}` is `$X1` and `$X2`."""
    parts = list[Node]()
    for part in word["Parts"]:
        named = parts and parts[-1].get("Short") and parts[-1].get("Param", {}).get("Value", "")
        more = re.match(r"\w*", part.get("Value", "") if part["Type"] == "Lit" else "")
        if named and named.isidentifier() and more and more[0]:
            parts[-1] = parts[-1] | {"Param": {"Value": named + more[0]}}
            part = part | {"Value": part["Value"][more.end() :]}
        parts += [part] if part.get("Value", "-") else []
    return {"Parts": parts}


def terms_of_test(node: Node) -> list[tuple[str, Node]]:
    """The terms of a test, with what stands before them: of `&&` and `||` shfmt makes no order.

    What it negates as a whole is the first.
    """
    match node:
        case {"Type": "BinaryTest", "Op": "&&" | "||" as how, "X": one, "Y": other}:
            (_, first), *rest = terms_of_test(other)
            return [*terms_of_test(one), (how, first), *rest]
        case {"Type": "UnaryTest", "Op": "!", "X": inside}:
            (_, first), *rest = terms_of_test(inside)
            return [("", {"Type": "UnaryTest", "Op": "!", "X": first}), *rest]
    return [("", node)]


def spread_name(part: Node) -> str:
    """The array whose elements are the words of a quotation; nothing for other parts of words."""
    match part:
        case {"Parts": [{"Type": "ParamExp", "Param": {"Value": "@"}}]}:
            return "@"
        case {"Parts": [{"Type": "ParamExp", "Param": {"Value": name}, "Index": {"Written": "@"}}]}:
            return "" if part["Parts"][0].keys() & {"Exp", "Length"} else str(name)
    return ""


def fall_through(how: str, word: str, behind: Sequence[Node]) -> Sequence[Node]:
    """What is run behind a branch of `case`, by the sign that ends it."""
    if how == ";;" or not behind:
        return []
    if how == ";&":
        return [*behind[0].get("Stmts", []), *fall_through(behind[0]["Op"], word, behind[1:])]
    again = {"Parts": [{"Type": "SglQuoted", "Value": word}]}
    return [{"Cmd": {"Type": "CaseClause", "Word": again, "Items": behind}}]
