"""Shell scripts, read as bash runs them: words, variables, arrays, conditions, loops, functions.

No command is executed. What depends on a value that the script does not have carries a mark with
its name, as `unknown_names` finds them; a variable that is set nowhere is empty in conditions.
Where a condition is not known, every branch counts that does not exit, and what they leave
different is not known; likewise what a loop changes whose turns are not known.
"""

from __future__ import annotations

import fnmatch
import itertools
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from partopt.configurations.arithmetic import UNKNOWN, calculate_whole
from partopt.configurations.shell_syntax import (
    ASSIGNED,
    CONTROL,
    LITERAL_TEXT,
    TEXT,
    Node,
    closing,
    is_operator,
    parse,
    quoted_end,
    tokens,
)
from partopt.errors import PartoptError

Value = str | tuple[str, ...]  # a text, or the elements of an array

_MARK, _UNSET = UNKNOWN[0], UNKNOWN[1]
_BREAK = "\2"  # between the elements of an array, which part words even in quotes
_BLANK = "\5"  # in place of one in the name of a mark
_MARKED = re.compile(f"[{UNKNOWN}]([^{UNKNOWN}]*)[{UNKNOWN}]")
_VARIABLE = re.compile(r"[A-Za-z_]\w*|[0-9@*#?!$-]")
_PARAMETER = re.compile(r"([!#]?)([A-Za-z_]\w*|[0-9]+|[@*#?$!-])(?:\[([^\]]*)\])?(.*)", re.DOTALL)
_BRACES = re.compile(r"\{([^{}\s'\"`]*(?:,|\.\.)[^{}\s'\"`]*)\}")
_WITHIN = re.compile(rf"(?:[{UNKNOWN}][^{UNKNOWN}]*[{UNKNOWN}]|'[^']*'|\"[^\"]*\"|\\.|\S)+", re.S)
_PLAIN = re.compile(rf"[^'\"`$\\{UNKNOWN}]+")
_UNEXPANDED = re.compile(rf"[^\\`${UNKNOWN}]+")
_ENVIRONMENT = re.compile(r"^/etc/|activate|conda|bashrc|profile$|modules?\.sh$")  # no arguments
_DECLARING = ("export", "local", "declare", "readonly", "typeset")
_WRAPPERS = ("exec", "command", "builtin", "nohup", "time", "env", "sudo")
_SUCCEEDING = (*_DECLARING, "cd", "mkdir", "ulimit", "module", "pushd", "popd", "trap", "set")
_OF_EVERY_SHELL = ("HOME", "USER", "PWD", "PATH", "HOSTNAME", "RANDOM", "SHELL", "SECONDS", "UID")
_COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "-eq": operator.eq, "-ne": operator.ne, "-lt": operator.lt, "-le": operator.le,
    "-gt": operator.gt, "-ge": operator.ge,
}  # fmt: skip
_SHOWN = 80  # letters of the name of a mark
_TURNS = 100  # of a loop, unless it is over words
_LONGEST = 1_000_000  # letters of a script, and of a value
_PATTERNED = 1000  # letters of a pattern, and of what it is compared with
_WORK = 200_000  # commands, words and letters that a script makes, by their weights


def mark(name: str) -> str:
    """The mark of a value that is not known, `name` says which."""
    return f"{_MARK}{_BLANK.join(name[:_SHOWN].split())}{_MARK}"


def strip_marks(text: str) -> str:
    """A value without what is not known of it."""
    return _MARKED.sub("", text)


def unknown_names(text: str) -> list[str]:
    """The names of what is not known in a value."""
    return [name.replace(_BLANK, " ") for name in dict.fromkeys(_MARKED.findall(text))]


def is_unset(text: str) -> bool:
    """Whether a word has nothing but variables that are set nowhere, which bash leaves out."""
    return bool(text) and not _without_unset(text)


def _without_unset(text: str) -> str:
    return re.sub(f"{_UNSET}[^{_UNSET}]*{_UNSET}", "", text) if _UNSET in text else text


def _text(value: Value) -> str:
    return value if isinstance(value, str) else " ".join(value)


@dataclass
class _State:
    """What a shell has: variables, and its arguments `$1`..."""

    variables: dict[str, Value]
    arguments: list[str] = field(default_factory=list)
    # "exit", "return", "break" or "continue", where a command leaves what it stands in
    leaves: str = ""
    unsure: bool = False  # whether it may have left

    def copy(self) -> _State:
        return replace(self, variables=dict(self.variables), arguments=list(self.arguments))


@dataclass
class Script:
    """What a script leaves: its variables, the texts that it writes, and its commands' words.

    `unread` are files that the script takes commands and words from, `written` those that it makes.
    """

    variables: Mapping[str, str] = field(default_factory=dict)
    texts: list[str] = field(default_factory=list)
    commands: list[list[str]] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)
    written: list[str] = field(default_factory=list)

    def size(self) -> tuple[int, int, int]:
        """How many texts, commands and files there are."""
        return len(self.texts), len(self.commands), len(self.unread)

    def cut(self, size: tuple[int, int, int]) -> None:
        """Leave out what came behind this size."""
        del (self.texts[size[0] :], self.commands[size[1] :], self.unread[size[2] :])


def read_script(text: str, given: Mapping[str, str]) -> Script:
    """Run through a script; the variables that are `given` keep their values.

    Raises PartoptError for one that nests too deep, or does too much, to be read.
    """
    state = _State({**_of_scheduler(text), **given})
    numbers = [int(name) for name in given if re.fullmatch("[1-9][0-9]{0,2}", name)]
    for number in range(1, max(numbers, default=0) + 1):
        state.arguments.append(given.get(str(number), mark(str(number))))
    reader = _ScriptReader(given, state)
    try:
        reader.spend(len(text) // _LONGEST * _WORK)
        for node in parse(CONTROL.sub("", text)):
            reader.run([node])
            if reader.state.leaves == "exit" and node[0] == "simple":
                break
            reader.state.leaves = ""
    except RecursionError:
        what = "expressions or commands lie too deep in each other"
        hint = "give the flags alone, with their values"
        raise PartoptError(what, hint, code="malformed-script") from None
    variables = {name: _text(value) for name, value in reader.state.variables.items()}
    reader.found.variables = reader.environment | variables
    return reader.found


def _of_scheduler(text: str) -> dict[str, str]:
    """The variables that Slurm sets for options in `#SBATCH` lines; of SGE's, hosts and queue."""
    asked, long = dict[str, str](), {"N": "nodes", "n": "ntasks", "c": "cpus-per-task", "G": "gpus"}
    option_value = re.compile(r"(?:^|\s)-{1,2}([a-zA-Z][\w-]*)(?:=|\s+)([^\s<>-]\S*)")
    for line in re.findall(r"^#SBATCH[ \t]+([^#\n]*)", text, re.M):
        asked |= {long.get(name, name): value for name, value in option_value.findall(line)}
    found = {"SLURM_NNODES": asked.get("nodes", ""), "SLURM_JOB_NUM_NODES": asked.get("nodes", "")}
    for option in ("ntasks-per-node", "gpus-per-node", "cpus-per-task", "gpus-per-task", "gpus"):
        found[f"SLURM_{option.upper().replace('-', '_')}"] = asked.get(option, "")
    gpus = re.search(r"(?:^|,)gpu(?::[^,:]*[a-z][^,:]*)?:([0-9]+)", asked.get("gres", ""))
    found["SLURM_GPUS_ON_NODE"] = gpus[1] if gpus else asked.get("gpus-per-node", "")
    tasks = asked.get("ntasks", "")
    if not tasks and asked.get("nodes", "").isdecimal():
        tasks = str(int(asked["nodes"]) * int(asked.get("ntasks-per-node", "1") or 1))
    found |= {"SLURM_NTASKS": tasks, "SLURM_NPROCS": tasks}
    if queue := re.search(r"^#\$[ \t]+-l[ \t]+(?:\S+,)?(\w+)=([0-9]+)[ \t]*$", text, re.M):
        found |= {"SGE_RESOURCE_TYPE": queue[1], "NHOSTS": queue[2]}
    return {name: value.rpartition(":")[2] for name, value in found.items() if value}


class _ScriptReader:
    """Runs through the commands of a script, without their effects outside of it."""

    def __init__(self, given: Mapping[str, str], state: _State) -> None:
        self.given, self.state, self.left, self.found = given, state, _WORK, Script()
        self.scheduled = any(name.startswith("SLURM") for name in state.variables)
        self.environment = dict[str, str]()  # variables of one command alone
        self.functions = dict[str, Node]()
        self.hidden = list[dict[str, Value | None]]()  # what `local` hides, by function
        self.output: str | None = ""  # what commands print; None where that is not known
        self.reasons = set[str]()  # what conditions depend on that is not known

    def spend(self, steps: int) -> None:
        """Count steps; a PartoptError where there are too many."""
        self.left -= steps
        if self.left < 0:
            what = "the script does too much to be read: its loops, or the length of its texts"
            hint = "give the flags alone, with their values"
            raise PartoptError(what, hint, code="malformed-script")

    # commands

    def run(self, nodes: Sequence[Node]) -> bool | None:
        """Run commands; whether the last succeeds, None where that is not known."""
        status: bool | None = True
        for node in nodes:
            self.spend(10)
            status = self.command(node)
            if self.state.leaves:
                break
        return status

    def run_text(self, text: str) -> bool | None:
        """Run the commands of a text."""
        self.spend(5 + len(text) // 5)
        return self.run(parse(text))

    def run_apart(self, turn: Callable[[], bool | None]) -> tuple[_State, bool | None]:
        """Run commands on a copy of the variables; gives that, and whether they succeed."""
        self.spend(len(self.state.variables))
        outer, self.state = self.state, self.state.copy()
        status = turn()
        branch, self.state = self.state, outer
        return branch, status

    def command(self, node: Node) -> bool | None:
        """Run one command; whether it succeeds."""
        match node:
            case ("simple", words, texts, files):
                return self.simple(words, texts, files)
            case ("list", body):
                return self.run(body)
            case ("apart", body):
                return self.run_apart(partial(self.run, body))[1]
            case ("!", inside):
                return _negate(self.command(inside))
            case ("|", parts):
                statuses = [self.run_apart(partial(self.command, part))[1] for part in parts]
                self.output = None
                return statuses[-1]
            case ("&&" | "||" as how, left, right):
                status = self.command(left)
                if status is (how == "||") or self.state.leaves:
                    return status
                found = self.choose([(status is not None or None, [right])])
                return None if status is None else found
            case ("[[", words):
                return self.double_brackets(words)
            case ("((", text):
                value = self.whole(text)
                return None if value is None else value != 0
            case ("if", pairs, otherwise):
                return self.choose([*pairs, (True, otherwise)])
            case ("case", word, pairs):
                return self.choose(self.match_case(_without_unset(self.text(word)), pairs))
            case ("while" | "until" as how, condition, body):
                test = ("list", condition) if how == "while" else ("!", ("list", condition))
                self.loop(lambda: self.command(test), body, "a loop")
            case ("for((", first, test, step, body):
                self.whole(first)
                check = ("((", test if test.strip() else "1")
                self.loop(lambda: self.command(check), body, "a loop", step)
            case ("for", name, raws, body):
                words = [word for raw in raws for word in self.words(raw) if not is_unset(word)]
                turns = len(words) + 1
                self.loop(partial(self.advance, name, iter(words)), body, name, turns=turns)
            case ("function", name, body):
                self.functions[name] = body
        return True

    def advance(self, name: str, rest: Iterator[str]) -> bool | None:
        """Give a variable the next word; whether there is one."""
        for word in rest:
            self.assign(name, word)
            return None if unknown_names(word) else True
        return False

    def choose(
        self, branches: Iterable[tuple[bool | Sequence[Node] | None, Sequence[Node]]]
    ) -> bool | None:
        """Run the first branch whose condition holds, or all of which one may hold, and merge.

        A branch that exits is not the one that is meant. Gives whether the branch succeeds.
        """
        taken, statuses = list[_State](), list[bool | None]()
        outer, self.reasons = self.reasons, set()
        for condition, body in branches:
            holds = self.run(condition) if isinstance(condition, Sequence) else condition
            if holds is False:
                continue
            before, reasons = self.found.size(), set(self.reasons)
            branch, status = self.run_apart(partial(self.run, body))
            if branch.leaves == "exit":
                self.found.cut(before)
                self.reasons = reasons
                continue
            taken.append(branch)
            statuses.append(status)
            if holds:
                break
        else:
            taken.append(self.state.copy())
        self.merge(taken)
        self.reasons |= outer
        return statuses[0] if len(taken) == 1 and statuses else None

    def merge(self, taken: Sequence[_State]) -> None:
        """What branches leave: values that all agree in, and flags of those that do."""
        if len(taken) == 1:
            self.state = taken[0]
            return
        marks, variables = "".join(map(mark, sorted(self.reasons))), self.state.variables
        for name in dict.fromkeys(name for branch in taken for name in branch.variables):
            values = [branch.variables.get(name) for branch in taken]
            same = len(set(values)) == 1
            variables[name] = values[0] or "" if same else _merge(values, marks or mark(name))
        self.state.arguments = taken[0].arguments
        leaves = {branch.leaves for branch in taken}
        self.state.leaves = taken[0].leaves if len(leaves) == 1 else ""
        self.state.unsure |= len(leaves) > 1 or any(branch.unsure for branch in taken)

    def match_case(
        self, word: str, pairs: Sequence[tuple[Sequence[str], Sequence[Node]]]
    ) -> Iterator[tuple[bool | None, Sequence[Node]]]:
        """The branches of `case` that may be the word's."""
        self.reasons.update(unknown_names(word))
        for raws, body in pairs:
            patterns = [self.text(raw, _escape) for raw in raws]
            if "*" in patterns or not unknown_names(word):
                yield any(_matches(word, pattern) for pattern in patterns), body
            else:
                yield None, body

    def loop(
        self, holds: Callable[[], bool | None], body: Sequence[Node], name: str, step: str = "",
        turns: int = _TURNS,
    ) -> None:  # fmt: skip
        """Run a body while its condition holds; what it changes is not known where that is not."""
        begins = list[int]()
        self.state.unsure = False
        for _ in range(turns if body else 1):
            held = holds()
            if held is False:
                break
            begins.append(len(self.found.commands))
            if held:
                self.run(body)
            if held is None or self.state.unsure:
                self.forget(body)
                break
            if self.state.leaves not in ("", "continue"):
                self.state.leaves = self.state.leaves.replace("break", "")
                break
            self.state.leaves = ""
            if step:
                self.whole(step)
        else:
            self.forget(body)
        self.join_runs(begins, name)

    def forget(self, body: Sequence[Node]) -> None:
        """Mark what a turn of a loop changes, and what depends on that."""
        for _ in "12":
            branch, _status = self.run_apart(partial(self.run, body))
            for name, value in branch.variables.items():
                if value != self.state.variables.get(name):
                    self.state.variables[name] = mark(name)
        self.state.leaves, self.state.unsure = "", False

    def join_runs(self, begins: Sequence[int], name: str) -> None:
        """Make one of the commands that the turns of a loop run alike, but for some words."""
        commands = self.found.commands
        runs = [commands[a:b] for a, b in itertools.pairwise([*begins, len(commands)])]
        if len(runs) > 1 and len({tuple(map(len, run)) for run in runs}) == 1:
            del commands[begins[0] :]
            for alike in zip(*runs, strict=True):
                places = zip(*alike, strict=True)
                commands.append([w[0] if len(set(w)) == 1 else mark(name) for w in places])

    def simple(
        self, raws: Sequence[str], bodies: Sequence[str], files: Sequence[str]
    ) -> bool | None:
        """Assign variables, or run a command."""
        count = len([*itertools.takewhile(ASSIGNED.match, raws)])
        texts = [self.body(body) for body in bodies]
        self.found.written += [self.text(file) for file in files]
        if count < len(raws) and raws[count] in _DECLARING:
            for raw in raws[count + 1 :]:
                self.declare(raws[count], raw)
            raws = [*itertools.dropwhile(lambda raw: raw[:2] != "--", raws)]  # a command behind it
            count = 0
        words = [word for raw in raws[count:] for word in self.words(raw)]
        before = dict(self.state.variables)
        for raw in raws[:count]:
            self.assign_raw(raw)
        if not words:
            return True
        status = self.call(words, texts, bool(files))
        for raw in raws[:count]:  # of the command alone
            name = re.split(r"[+=\[]", raw)[0]
            self.environment[name] = _text(self.state.variables.pop(name, ""))
            if name in before:
                self.state.variables[name] = before[name]
        return status

    def call(self, words: list[str], texts: Sequence[str], writes: bool) -> bool | None:
        """Run a command of the shell, a function of the script; note the words of another."""
        while len(words) > 1 and words[0] in _WRAPPERS and not words[1].startswith("-"):
            words = words[1:]
        name, rest, state = words[0], words[1:], self.state
        if name in self.functions:
            return self.call_function(self.functions[name], rest)
        match name:
            case "exit" | "return" | "break" | "continue":
                state.leaves = name
                state.unsure |= name in ("break", "continue") and rest not in ([], ["1"])
                return name != "return" or rest in ([], ["0"])
            case ":" | "true" | "false":
                return name != "false"
            case "[" | "test":
                return self.brackets(rest[: len(rest) - (name == "[")])
            case "let":
                value = [self.whole(text) for text in rest][-1:]
                return None if value == [None] else value != [0]
            case "eval":
                return self.run_text(" ".join(rest))
            case "source" | ".":
                named = [_MARKED.sub(r"$\1", file) for file in rest[:1]]
                self.found.unread += [file for file in named if not _ENVIRONMENT.search(file)]
                return True
            case "unset":
                for variable in rest:
                    state.variables.pop(variable, None)
                return True
            case "shift":
                count = int(rest[0]) if rest and rest[0].isdecimal() else 1
                known = count <= len(state.arguments)
                state.arguments = state.arguments[count * known :]
                return known
            case "set" if rest[:1] == ["--"] or (rest and rest[0][:1] not in ("-", "+")):
                state.arguments = rest[rest[0] == "--" :]
                return True
            case "read" | "mapfile" | "readarray":
                for variable in filter(str.isidentifier, rest):
                    self.assign(variable, mark(variable))
                return None
            case "getopts":
                return None if state.arguments else False
        printed = _print(name, rest)
        if printed is None:
            self.output = self.output if name in _SUCCEEDING else None
            self.found.commands.append(words)
            self.run_inside(words)
        elif writes:
            texts = [*texts, printed]
        elif self.output is not None:
            self.output += printed
        for text in texts:
            self.found.texts.append(text)
            if re.search(r"\s--\w", text):
                self.run_apart(partial(self.run_text, text))
        return True if printed is not None or name in _SUCCEEDING else None

    def run_inside(self, words: Sequence[str]) -> None:
        """Run the commands that are words of another: behind `-c`, or with flags in them."""
        for before, word in itertools.pairwise(words):
            behind = re.fullmatch(r"-\w*c", before) and not re.search(r"python\S*$", words[0])
            flags = not word.startswith("-") and re.search(r"\s--\w", word)
            if re.search(r"\s", word) and (behind or flags):
                self.run_apart(partial(self.run_text, word))

    def call_function(self, body: Node, arguments: list[str]) -> bool | None:
        """Run a function with its arguments."""
        before, self.state.arguments = self.state.arguments, arguments
        self.hidden.append({})
        status = self.command(body)
        self.state.arguments = before
        for name, value in self.hidden.pop().items():
            self.state.variables.pop(name, None)
            if value is not None:
                self.state.variables[name] = value
        self.state.leaves = self.state.leaves.replace("return", "")
        return status

    # assignments

    def declare(self, how: str, raw: str) -> None:
        """Run one word of `export`, `local` and the like."""
        found, variables = ASSIGNED.match(raw), self.state.variables
        name = found[1] if found else raw
        if how not in ("export", "readonly") and self.hidden and name not in self.given:
            self.hidden[-1].setdefault(name, variables.get(name))
            variables[name] = ""
        if found:
            self.assign_raw(raw)

    def assign_raw(self, raw: str) -> None:
        """Run an assignment as it is written."""
        found = ASSIGNED.match(raw)
        assert found
        name, index, value = found[1], found[2], raw[found.end() :]
        old = self.state.variables.get(name)
        before = old if found[3] else None
        if index is not None:
            self.assign_element(name, index, self.text(value))
        elif value.startswith("("):
            words = list[str]()
            for token in tokens(value[1:-1]):
                if pair := re.match(r"\[([^\]]+)\]=(.*)", token, re.DOTALL):
                    self.assign_element(name, pair[1], self.text(pair[2]))
                elif not is_operator(token):
                    words += self.words(token)
            self.assign(name, (*((before,) if isinstance(before, str) else before or ()), *words))
        elif isinstance(old, tuple):  # its name alone is the first element
            first = old[0] if before and old else ""
            self.assign(name, (first + self.text(value), *old[1:]))
        else:
            self.assign(name, _text(before or "") + self.text(value))

    def assign_element(self, name: str, index: str, text: str) -> None:
        """Assign an element of an array; those of other keys than numbers are variables."""
        key, before = self.text(index), self.state.variables.get(name, ())
        if not key.isdecimal() and key not in self.state.variables:
            self.assign(f"{name}[{key}]", text)
            return
        elements = list(before) if isinstance(before, tuple) else [before]
        place = min(self.whole(key) or 0, len(elements))
        elements[place : place + 1] = [text]
        self.assign(name, tuple(elements))

    def assign(self, name: str, value: Value) -> None:
        """Give a variable a value, unless it is given."""
        length = len(value) + sum(map(len, value))
        self.spend(5 + length // 20 + length // _LONGEST * _WORK)
        if name not in self.given:
            self.state.variables[name] = value

    # conditions

    def brackets(self, words: Sequence[str]) -> bool | None:
        """Whether the words of `[ ]` hold."""
        match words:
            case ["!", *rest] if len(words) != 3 or words[1] not in ("=", "==", "!="):
                return _negate(self.brackets(rest))
            case ["(", *inside_words, ")"]:
                return self.brackets(inside_words)
        for how in ("-o", "-a"):
            if how in words[1:-1]:
                place = words.index(how, 1)
                sides = self.brackets(words[:place]), self.brackets(words[place + 1 :])
                return _either(sides, how == "-o")
        return self.test(words)

    def double_brackets(self, words: Sequence[str]) -> bool | None:
        """Whether the words of `[[ ]]` hold."""
        words = [word for word in words if word != "\n"]
        for how in ("||", "&&"):
            depth = 0
            for place, word in enumerate(words):
                depth += (word == "(") - (word == ")")
                if word == how and not depth:
                    left = self.double_brackets(words[:place])
                    if left is (how == "||"):
                        return left
                    return _either((left, self.double_brackets(words[place + 1 :])), how == "||")
        match words:
            case ["!", *rest]:
                return _negate(self.double_brackets(rest))
            case ["(", *inside_words, ")"]:
                return self.double_brackets(inside_words)
            case [first, "=" | "==" | "!=" as sign, second]:
                return self.test([self.text(first), sign, self.text(second, _escape)], True)
            case [first, sign, second] if sign in _COMPARISONS:
                a, b = self.whole(self.text(first)), self.whole(self.text(second))
                return None if a is None or b is None else _COMPARISONS[sign](a, b)
        return self.test([self.text(word) for word in words])

    def test(self, words: Sequence[str], pattern: bool = False) -> bool | None:
        """Whether a test of one to three words holds; None where that is not known."""
        words = [_without_unset(word) for word in words]
        if len(words) == 2 and words[0] in ("-z", "-n"):
            word = re.sub(f"{_MARK}[0-9]+{_MARK}", "", words[1])  # an argument that is not given
            if _MARKED.sub("", word) or not word:
                return bool(word) == (words[0] == "-n")
        if unknown := [name for word in words for name in unknown_names(word)]:
            self.reasons.update(unknown)
            return None
        match words:
            case [] | [_]:
                return bool(words) and bool(words[0])
            case [left, "=" | "==" | "!=" as sign, right]:
                same = _matches(left, right) if pattern else left == right
                return same == (sign != "!=")
            case [left, "=~", right]:
                simple = len(left) < 100 and not re.search(r"\)[*+{]", right)
                with suppress(re.error):
                    return re.search(right, left) is not None if simple else None
            case [left, sign, right] if sign in _COMPARISONS:
                numbers = [re.fullmatch(r"\s*[-+]?[0-9]{1,18}\s*", side) for side in (left, right)]
                return all(numbers) and _COMPARISONS[sign](int(left), int(right))
        return None

    def whole(self, text: str) -> int | None:
        """The value of an expression in a condition; None where it is not known."""
        value, marks = self.calculate(text, _without_unset)
        self.reasons.update(unknown_names(marks) if value is None else ())
        return value

    def calculate(
        self, text: str, known: Callable[[str], str] = lambda text: text
    ) -> tuple[int | None, str]:
        """The value of an expression of whole numbers, and the marks of what is not known in it."""
        expanded = known(self.expand(text.replace('"', "")))
        marks = _marks(expanded)
        self.spend(1 + len(expanded) // 10)

        def look_up(name: str) -> str:
            value = known(self.parameter(name))
            marks.extend(_marks(value))
            return value

        value = None
        with suppress(ValueError):
            value = calculate_whole(expanded, look_up, self.assign)
        return value, "".join(dict.fromkeys(marks)) or mark(f"$(({text}))")

    # words

    def words(self, raw: str) -> list[str]:
        """The words that one expands to."""
        for place in _find_unquoted(raw, "{") if "{" in raw else ():
            braces = _BRACES.match(raw, place)
            inside = _expand_braces(braces[1]) if braces and raw[place - 1 : place] != "$" else []
            if braces and inside:
                self.spend(len(inside) * (5 + len(raw) // 20))
                written = [f"{raw[:place]}{text}{raw[braces.end() :]}" for text in inside]
                return [word for text in written for word in self.words(text)]
        found, word = list[str](), None
        for text, quoted in self.pieces(raw):
            parts = text.split(_BREAK) if quoted else re.split(rf"[ \t\n{_BREAK}]+", text)
            for k, part in enumerate(parts):
                if k and word is not None:
                    found.append(word)
                    word = None
                word = (word or "") + part if part or quoted else word
        self.spend(5 + len(found))
        return found if word is None else [*found, word]

    def text(self, raw: str, escape: Callable[[str], str] = lambda text: text) -> str:
        """The one text that a word expands to; `escape` is for what is quoted in it."""
        parts = (escape(text) if quoted else text for text, quoted in self.pieces(raw))
        return "".join(parts).replace(_BREAK, " ")

    def pieces(self, raw: str) -> Iterator[tuple[str, bool]]:
        """The texts that the parts of a word expand to, and whether they are quoted."""
        self.spend(1 + len(raw) // 10)
        i = 0
        while i < len(raw):
            c = raw[i]
            end = quoted_end(raw, i) if c in f"'\"`$\\{UNKNOWN}" else _PLAIN.match(raw, i).end()  # type: ignore[union-attr]
            if c == "$" and end == i + 1 and (name := _VARIABLE.match(raw, end)):
                end = name.end()
            piece = raw[i:end]
            if c in "'\\":
                yield piece[1:-1] if c == "'" else piece[1:], True
            elif c == '"':
                array = re.fullmatch(r'"\$(?:\{?(@)|\{(\w+)\[@\])\}?"', piece)
                if not array or self.value(array[1] or array[2]):
                    yield self.expand(piece[1:-1]), True
            else:
                yield self.expand(piece) if c in "$`" else piece, False
            i = end

    def body(self, text: str) -> str:
        """A text behind `<<`, or the word behind `<<<`."""
        if text[:1] == TEXT:
            return self.expand(text[1:].replace('\\"', '\\\\"'))
        return text[1:] if text[:1] == LITERAL_TEXT else self.text(text)

    def expand(self, text: str) -> str:
        """A text with the values of its variables, as in double quotes."""
        self.spend(1 + len(text) // 10)
        found, i = list[str](), 0
        while i < len(text):
            c, end = text[i], i + 1
            if c not in f"\\`${UNKNOWN}":
                end = _UNEXPANDED.match(text, i).end()  # type: ignore[union-attr]
                found.append(text[i:end])
            elif c == "\\":
                end = i + 2
                kept = text[i + 1 : end] in ("\n", "$", '"', "\\", "`")
                found.append(text[i + kept : end].strip("\n"))
            elif c in UNKNOWN:
                end = quoted_end(text, i)
                found.append(text[i:end])
            elif c == "`":
                end = quoted_end(text, i)
                found.append(self.capture(text[i + 1 : end - 1], text[i:end]))
            elif text.startswith("$((", i):
                end = closing(text, i + 1)
                value, marks = self.calculate(text[i + 3 : end - 2])
                found.append(marks if value is None else str(value))
            elif text.startswith("$(", i):
                end = closing(text, i + 1)
                found.append(self.capture(text[i + 2 : end - 1], text[i:end]))
            elif text.startswith("${", i):
                end = closing(text, i + 1, "{", "}")
                found.append(self.parameter(text[i + 2 : end - 1]))
            elif name := _VARIABLE.match(text, end):
                end = name.end()
                found.append(self.parameter(name[0]))
            else:
                found.append(c)
            i = end
        result = "".join(found)
        self.spend(len(result) // 20 + len(result) // _LONGEST * _WORK)
        return result

    def capture(self, script: str, written: str) -> str:
        """What commands print, where no other programs are needed for it; else its mark."""
        outer, self.output = self.output, ""
        before = self.found.size()
        self.run_apart(partial(self.run_text, script))
        self.found.cut(before)
        if (
            file := re.fullmatch(r"\s*(?:cat|<)\s*([^\s|;&]+)\s*", script)
        ) and "/proc" not in script:
            self.found.unread.append(_MARKED.sub(r"$\1", self.text(file[1])))
        text, self.output = self.output, outer
        return mark(written) if text is None or not script.strip() else text.rstrip("\n")

    def value(self, name: str) -> Value | None:
        """The value of a variable or an argument; None where it is set nowhere."""
        arguments = self.state.arguments
        if name.isdecimal() and name != "0":
            missing = None if self.hidden or arguments else mark(name)
            return arguments[int(name) - 1] if int(name) <= len(arguments) else missing
        if name in ("@", "*", "#"):
            return str(len(arguments)) if name == "#" else tuple(arguments)
        known = name in _OF_EVERY_SHELL or (self.scheduled and name.startswith("SLURM"))
        missing = mark(name) if known or not name[0].isidentifier() else None
        return self.state.variables.get(name, missing)

    def parameter(self, inside: str) -> str:
        """The value of `${...}`; elements of an array with breaks between them."""
        match = _PARAMETER.fullmatch(inside)
        if match is None:
            return mark(inside)
        sign, name, index, rest = match[1], match[2], match[3], match[4]
        value = self.value(name)
        if sign == "!":
            pointed = _text(value or "")
            return self.parameter(f"{pointed}{rest}") if pointed.isidentifier() else mark(inside)
        several = index in ("@", "*") or (index is None and name in ("@", "*"))
        if not several and (index is not None or isinstance(value, tuple)):
            value = self.element(name, value, "0" if index is None else self.text(index))
        if sign == "#":
            length = len(value or "") if not several or isinstance(value, tuple) else 1
            return mark(name) if unknown_names(_text(value or "")) and not several else str(length)
        unset = "" if name in self.state.variables else f"{_UNSET}{name}{_UNSET}"
        glue = _BREAK if several and "*" not in (index, name) else " "
        if option := re.match(r":?([-=+?])", rest):
            text = None if value is None or value == mark(name) else _without_unset(_text(value))
            absent = text is None or (not text and (rest[0] == ":" or is_unset(_text(value or ""))))
            if (option[1] == "+") == absent or option[1] == "?":
                if option[1] == "+" or value is None:
                    return "" if option[1] == "+" else unset
                return value if isinstance(value, str) else glue.join(value)
            default = self.text(rest[option.end() :])
            if option[1] == "=":
                self.assign(name, default)
            return default
        if value is None:
            return "" if several else unset
        if isinstance(value, str):
            return self.change(value, rest)
        if rest[:1] == ":":
            start, stop = self.slice(rest, len(value) + (name == "@"))
            before = name == "@" and start > 0  # `$0`, which is not among them
            return glue.join(value[start - before : stop - before])
        return glue.join(self.change(element, rest) for element in value)

    def element(self, name: str, value: Value | None, key: str) -> str | None:
        """The element of an array; a text is an array of one."""
        if (keyed := self.state.variables.get(f"{name}[{key}]")) is not None:
            return _text(keyed)
        place, elements = self.whole(key), (value,) if isinstance(value, str) else value or ()
        if place is None:
            return mark(key)
        return elements[place] if -len(elements) <= place < len(elements) else None

    def slice(self, written: str, length: int) -> tuple[int, int]:
        """The bounds that `:2:3` gives in so many letters or elements."""
        start, count = [*(self.whole(text) or 0 for text in written[1:].split(":")), length][:2]
        start = max(length + start, 0) if start < 0 else start
        return start, start + count if count >= 0 else length + count

    def change(self, value: str, how: str) -> str:
        """A value with what stands behind its name in `${...}` done to it."""
        if not how:
            return value
        if marks := _marks(value):
            return "".join(marks)
        if how in ("^^", ",,"):
            return value.upper() if how == "^^" else value.lower()
        if max(len(value), len(how)) > _PATTERNED:
            return mark(how)
        if found := re.match(r"##?|%%?", how):
            pattern = re.compile(fnmatch.translate(self.text(how[found.end() :], _escape)))
            cuts = list(range(len(value) + 1))
            if (how[0] == "#") == (len(found[0]) == 2):  # the longest of what is cut off
                cuts.reverse()
            if how[0] == "#":
                return next((value[n:] for n in cuts if pattern.match(value[:n])), value)
            return next((value[:n] for n in cuts if pattern.match(value[n:])), value)
        if how[0] == "/" and len(how) > 1:
            kind = how[1] if how[1] in "/#%" else ""
            old, _, new = how[1 + len(kind) :].partition("/")
            body = fnmatch.translate(self.text(old, _escape))[4:-3]
            text = self.text(new)
            found_text = f"{'^' * (kind == '#')}(?:{body}){'$' * (kind == '%')}"
            return re.sub(found_text, lambda _: text, value, count=kind != "/") if old else value
        if how[0] == ":":
            start, stop = self.slice(how, len(value))
            return value[start:stop]
        return mark(how)


def _marks(text: str) -> list[str]:
    """The marks of a value alone."""
    return [found[0] for found in _MARKED.finditer(text)]


def _negate(holds: bool | None) -> bool | None:
    """Whether a condition does not hold; None where that is not known."""
    return None if holds is None else not holds


def _either(found: Sequence[bool | None], decides: bool) -> bool | None:
    """Whether one of two holds, or both: either decides it where it is `decides`."""
    if decides in found:
        return decides
    return None if None in found else not decides


def _matches(text: str, pattern: str) -> bool:
    """Whether a text matches a pattern; one that is too long is taken as it is."""
    if max(len(text), len(pattern)) > _PATTERNED:
        return text == pattern
    return fnmatch.fnmatchcase(text, pattern)


def _escape(text: str) -> str:
    """A text as a pattern that matches itself."""
    return re.sub(r"([*?\[])", r"[\1]", text)


def _expand_braces(inside: str) -> list[str]:
    """What `{1..3}` or `{a,b}` stands for; none where it is neither."""
    if numbers := re.fullmatch(r"(-?[0-9]{1,6})\.\.(-?[0-9]{1,6})", inside):
        first, last = int(numbers[1]), int(numbers[2])
        way = 1 if last >= first else -1
        return [str(n) for n in range(first, last + way, way)][:1000]
    return inside.split(",") if "," in inside else []


def _find_unquoted(raw: str, letter: str) -> Iterator[int]:
    """The places of a letter outside of quotations and expansions."""
    i = 0
    while i < len(raw):
        if raw[i] == letter:
            yield i
        i = quoted_end(raw, i) if raw[i] in f"'\"`$\\{UNKNOWN}" else i + 1


def _print(name: str, words: Sequence[str]) -> str | None:
    """What a command prints that needs no more than its words; None for all others."""
    if name == "echo":
        flags = len([*itertools.takewhile(lambda word: re.fullmatch("-[neE]+", word), words)])
        return " ".join(words[flags:]) + "\n" * ("-n" not in words[:flags])
    if name == "seq" and words and all(re.fullmatch("[0-9]{1,4}", text) for text in words):
        first, step = (*map(int, words[:-1]), 1, 1)[:2] if len(words) > 1 else (1, 1)
        return "".join(f"{n}\n" for n in range(first, int(words[-1]) + 1, step or 1))
    if name == "expr" and len(words) == 3:
        with suppress(ValueError):
            value = calculate_whole(" ".join(words), lambda name: "x", lambda name, value: None)
            return mark("expr") if value is None else str(value)
    return mark("printf") if name == "printf" else None


def _merge(values: Sequence[Value | None], unknown: str) -> Value:
    """What a variable is that may have several values: unknown, or what their flags agree in."""
    words = [list(value) if isinstance(value, tuple) else (value or "").split() for value in values]
    if not any(word.startswith("--") for one in words for word in one):
        return unknown
    flags = [flag_words(one) for one in words]
    heads = {tuple(itertools.takewhile(lambda word: word[:2] != "--", one)) for one in words}
    found = list(heads.pop()) if len(heads) == 1 else [unknown]
    for flag in dict.fromkeys(flag for one in flags for flag in one):
        said = [one.get(flag) for one in flags]
        agreed = said[0] if all(one == said[0] for one in said) else None
        found += [f"--{flag}", *([unknown] if agreed is None else agreed)]
    return tuple(found) if any(isinstance(value, tuple) for value in values) else " ".join(found)


def flag_words(words: Sequence[str]) -> dict[str, list[str]]:
    """The words of every `--flag`, up to the next; those within quoted words, too.

    Words of variables that are set nowhere are left out behind others, as bash does.
    """
    flat = list[str]()
    for word in words:
        inside = [word]
        if re.search(r"(^|\s)--\w", word) and re.search(r"\s", word):
            inside = [re.sub(r"(['\"])(.*?)\1", r"\2", part[0]) for part in _WITHIN.finditer(word)]
        flat += inside
    found: dict[str, list[str]] = {}
    flag = None
    for word in flat:
        if re.match(r"--\w", word):
            flag, equals, value = word[2:].partition("=")
            found[flag] = [value] if equals else []
        elif flag is not None and not (word.endswith(".py") and found[flag]):
            found[flag] += [word] * (not found[flag] or not is_unset(word))
        else:  # the program, behind the flags of what starts it
            flag = None
    return found
