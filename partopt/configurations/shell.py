"""Shell scripts, read as bash runs them: words, variables, arrays, conditions, loops, functions.

No command is executed. What depends on a value that the script does not have carries a mark with
its name; a variable that is set nowhere is empty in conditions. Where a condition is not known,
every branch counts that does not exit, and what they leave different is not known; likewise what a
loop changes whose turns are not known, and what depends on the files that there are.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from partopt.configurations.marks import (
    UNKNOWN,
    UNSET,
    as_one,
    as_several,
    is_unset,
    mark,
    marks_of,
    may_be_several,
    show_marks,
    strip_marks,
    unknown_names,
    without_unset,
)
from partopt.configurations.shell_numbers import COMPARISONS, Arithmetic, either, negate
from partopt.configurations.shell_patterns import (
    PATTERNED,
    escape,
    match_files,
    matches,
    search,
    substitute,
    trim,
)
from partopt.configurations.shell_printing import print_form, print_words, unescape
from partopt.configurations.shell_syntax import (
    HINT,
    BrokenScriptError,
    Node,
    expand_braces,
    fall_through,
    join_names,
    parse,
    part_tildes,
    spread_name,
    terms_of_test,
)
from partopt.configurations.shell_values import (
    BREAK,
    EMPTY,
    HOLE,
    Value,
    as_text,
    as_word,
    elements_of,
    flag_words,
    merge_values,
    present_words,
    unknown_array,
)
from partopt.errors import PartoptError

_CONTROL = re.compile("[\0-\10\13\14\16-\37\r\ue000-\uf8ff]")  # letters that scripts do not have
_ENVIRONMENT = re.compile(r"^/etc/|activate|conda|bashrc|profile$|modules?\.sh$")  # no arguments
_WRAPPERS = ("exec", "command", "builtin", "nohup", "time", "env", "sudo")
_SUCCEEDING = ("cd", "mkdir", "ulimit", "module", "pushd", "popd", "trap", "set")
_OF_EVERY_SHELL = ("HOME", "USER", "PWD", "PATH", "HOSTNAME", "RANDOM", "SHELL", "SECONDS", "UID")
_PLACED = re.compile(r"\[[^]]*\]\+=")  # an element that is lengthened
_CHANGES = ("Excl", "Names", "Slice", "Repl", "Exp")  # what is done to a value in `${...}`
_TURNS = 100  # of a loop, unless it is over words
_LONGEST = 1_000_000  # letters of a value
_CHEAP = 100  # letters that are copied in a step of work
_PLACES = 1000  # before an element that is assigned
_WORK = 200_000  # commands, words and letters that a script makes, by their weights


@dataclass
class _State:
    """What a shell has: variables, and its arguments `$1`..."""

    variables: dict[str, Value]
    arguments: list[str] = field(default_factory=list)
    # "exit", "return", "break N" or "continue N" of N loops, where a command leaves those
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


def read_script(text: str, given: Mapping[str, str], folder: Path | None = None) -> Script:
    """Run through a script; the variables that are `given` keep their values.

    Files of the `folder` that it sources are run through, too.
    Raises BrokenScriptError, with the line, for what bash would refuse, and PartoptError for what
    nests too deep, or does too much, to be read.
    """
    state = _State({**_of_scheduler(text), **given})
    numbers = [int(name) for name in given if re.fullmatch("[1-9][0-9]{0,2}", name)]
    for number in range(1, max(numbers, default=0) + 1):
        state.arguments.append(given.get(str(number), mark(str(number))))
    reader = _ScriptReader(given, state, folder)
    try:
        for node in parse(_CONTROL.sub("", text)):
            reader.run([node])
            if reader.state.leaves == "exit" and node.get("Cmd", {}).get("Type") == "CallExpr":
                break
            reader.state.leaves = ""
    except RecursionError:
        what = "expressions or commands lie too deep in each other"
        raise PartoptError(what, HINT, code="malformed-script") from None
    found = reader.found
    variables = {name: as_text(value) for name, value in reader.state.variables.items()}
    variables = reader.environment | variables
    found.variables = {name: as_one(text) for name, text in variables.items()}
    found.commands = [[*map(as_one, words)] for words in found.commands]
    return found


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

    def __init__(self, given: Mapping[str, str], state: _State, folder: Path | None) -> None:
        self.given, self.state, self.left, self.found = given, state, _WORK, Script()
        self.folder = folder
        self.scheduled = any(name.startswith("SLURM") for name in state.variables)
        self.environment = dict[str, str]()  # variables of one command alone
        self.functions = dict[str, Node]()
        self.hidden = list[dict[str, Value | None]]()  # what `local` hides, by function
        self.output: str | None = ""  # what commands print; None where that is not known
        self.captured: bool | None = True  # whether what a value was captured from succeeds
        self.pipefail = False  # whether a pipe fails where any part of it does
        self.loops = 0  # in which a command stands
        self.traits = dict[str, str]()  # letters of `declare`, by names of variables
        self.aliases = dict[str, str]()  # what names of `declare -n` stand for
        self.reasons = set[str]()  # what conditions depend on that is not known
        self.named = list[str]()  # variables whose values are computed

    def spend(self, steps: int) -> None:
        """Count steps; a PartoptError where there are too many."""
        self.left -= steps
        if self.left < 0:
            what = "the script does too much to be read: its loops, or the length of its texts"
            raise PartoptError(what, HINT, code="malformed-script")

    # commands

    def run(self, nodes: Sequence[Node]) -> bool | None:
        """Run statements; whether the last succeeds, None where that is not known."""
        status: bool | None = True
        for node in nodes:
            self.spend(10)
            status = self.statement(node)
            if self.state.leaves:
                break
        return status

    def run_text(self, text: str, name: str = "") -> bool | None:
        """Run the commands of a text, of a file of that name."""
        self.spend(5 + len(text) // 5)
        try:
            return self.run(parse(text))
        except BrokenScriptError as fault:
            what = f"{name or f'`{show_marks(text)[:40]}`'}, {fault.message}"
            raise BrokenScriptError(what, HINT, code=fault.code) from None

    def run_apart(self, turn: Callable[[], bool | None]) -> tuple[_State, bool | None]:
        """Run commands on a copy of the variables; gives that, and whether they succeed."""
        self.spend(len(self.state.variables))
        outer, self.state = self.state, self.state.copy()
        status = turn()
        branch, self.state = self.state, outer
        return branch, status

    def statement(self, node: Node) -> bool | None:
        """Run one command, with where its input and output go; whether it succeeds."""
        texts, files = list[str](), list[str]()
        for redirect in node.get("Redirs", ()):
            sign, word = redirect["Op"], redirect.get("Word", {})
            if "Hdoc" in redirect:
                body = redirect["Hdoc"]
                is_literal = re.search(r"['\"\\]", word["Written"])
                literal = "".join(part.get("Value", "") for part in body.get("Parts", ()))
                text = literal if is_literal else self.text(body, quotes="<<")
                texts.append(re.sub(r"^\t+", "", text, flags=re.M) if sign == "<<-" else text)
            elif sign == "<<<":
                texts.append(self.text(word))
            elif ">" in sign and not sign.endswith("&"):
                files.append(self.text(word))
        self.found.written += files
        if node.get("Background"):  # whose variables are its alone
            self.run_apart(partial(self.command, node["Cmd"], texts, bool(files)))
            return True
        status = self.command(node["Cmd"], texts, bool(files)) if "Cmd" in node else True
        return negate(status) if node.get("Negated") else status

    def command(self, node: Node, texts: Sequence[str] = (), writes: bool = False) -> bool | None:
        """Run one command; whether it succeeds."""
        match node:
            case {"Type": "CallExpr"}:
                return self.simple(node, texts, writes)
            case {"Type": "DeclClause", "Variant": {"Value": how}}:
                return self.declare(how, node.get("Args", ()))
            case {"Type": "Block", "Stmts": body}:
                return self.run(body)
            case {"Type": "Subshell", "Stmts": body}:
                return self.run_apart(partial(self.run, body))[1]
            case {"Type": "TimeClause", "Stmt": inside}:
                return self.statement(inside)
            case {"Type": "BinaryCmd", "Op": "&&" | "||" as how, "X": left, "Y": right}:
                status = self.statement(left)
                if status is (how == "||") or self.state.leaves:
                    return status
                found = self.choose([(status is not None or None, [right])])
                return None if status is None else found
            case {"Type": "BinaryCmd", "X": left, "Y": right}:  # a pipe
                ends = [self.run_apart(partial(self.statement, end))[1] for end in (left, right)]
                self.output = None
                return either(ends, False) if self.pipefail else ends[1]
            case {"Type": "TestClause", "X": test}:
                return self.double_brackets(test)
            case {"Type": "ArithmCmd", "X": expression}:
                return self.is_true(expression)
            case {"Type": "LetClause", "Exprs": expressions}:
                return [self.is_true(one) for one in expressions][-1]
            case {"Type": "IfClause"}:
                pairs, rest = list[Any](), node
                while rest:
                    pairs.append((rest.get("Cond", True), rest.get("Then", [])))
                    rest = rest.get("Else", {})
                return self.choose(pairs)
            case {"Type": "CaseClause", "Word": word, "Items": items}:
                return self.choose(self.match_case(without_unset(self.text(word)), items))
            case {"Type": "WhileClause" | "ForClause"}:
                return self.loop_as_written(node)
            case {"Type": "FuncDecl", "Name": {"Value": name}, "Body": body}:
                self.functions[name] = body
        return True

    def loop_as_written(self, node: Node) -> bool | None:
        """Run a loop, over words or while a condition holds; whether its last command succeeds."""
        match node:
            case {"Type": "WhileClause", "Cond": condition, "Do": body}:

                def holds() -> bool | None:
                    status = self.run(condition)
                    return negate(status) if node.get("Until") else status

                return self.loop(holds, body, "a loop")
            case {"Type": "ForClause", "Loop": {"Type": "WordIter"} as loop, "Do": body}:
                raws = loop.get("Items", ()) if "InPos" in loop else ()
                words = [word for raw in raws for word in self.words(raw)]
                words = present_words(words if "InPos" in loop else self.state.arguments)
                name = loop["Name"]["Value"]
                turn = partial(self.advance, name, iter(words))
                return self.loop(turn, body, name, len(words) + 1)
            case {"Type": "ForClause", "Loop": {"Type": "CStyleLoop"} as loop, "Do": body}:
                if "Init" in loop:
                    self.whole(loop["Init"])
                goes_on = partial(self.is_true, loop["Cond"]) if "Cond" in loop else lambda: True
                return self.loop(goes_on, body, "a loop", step=loop.get("Post"))
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
        taken, statuses, begins = list[_State](), list[bool | None](), list[int]()
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
            begins.append(before[1])
            if holds:
                break
        else:
            taken.append(self.state.copy())
        if len(taken) > 1:
            self.join_branches(begins)
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
            if len(set(values)) > 1:
                one = all(isinstance(value, str) and len(value.split()) == 1 for value in values)
                variables[name] = merge_values(values, as_several(marks or mark(name), not one))
            elif values[0] is not None:
                variables[name] = values[0]
        self.state.arguments = taken[0].arguments
        leaves = {branch.leaves for branch in taken}
        self.state.leaves = taken[0].leaves if len(leaves) == 1 else ""
        self.state.unsure |= len(leaves) > 1 or any(branch.unsure for branch in taken)

    def match_case(
        self, word: str, items: Sequence[Node]
    ) -> Iterator[tuple[bool | None, Sequence[Node]]]:
        """The branches of `case` that may be the word's."""
        self.reasons.update(unknown_names(word))
        for number, item in enumerate(items):
            patterns = [self.text(raw, escape) for raw in item["Patterns"]]
            holds: bool | None = any(matches(word, pattern) for pattern in patterns)
            if unknown_names(word) or (not holds and any(map(marks_of, patterns))):
                holds = "*" in patterns or None
            rest = item.get("Stmts", [])
            behind = items[number + 1 :]
            yield holds, [*rest, *fall_through(item["Op"], word, behind)]

    def loop(
        self,
        holds: Callable[[], bool | None],
        body: Sequence[Node],
        name: str,
        turns: int = _TURNS,
        step: Node | None = None,
    ) -> bool | None:
        """Run a body while its condition holds; what it changes is not known where that is not."""
        begins = list[int]()
        status: bool | None = True
        self.state.unsure = False
        self.loops += 1
        for _ in range(turns if body else 1):
            self.spend(10)
            held = holds()
            if held is False:
                break
            begins.append(len(self.found.commands))
            if held:
                status = self.run(body)
            if held is None or self.state.unsure:
                self.forget(body)
                status = None
                break
            how, _, levels = self.state.leaves.partition(" ")
            if levels:
                left = int(levels) - 1
                self.state.leaves = f"{how} {left}" * (left > 0)
            if self.state.leaves or how == "break":
                break
            if step:
                self.whole(step)
        else:
            self.forget(body)
            status = None
        self.loops -= 1
        self.join_runs(begins, name)
        return status

    def forget(self, body: Sequence[Node]) -> None:
        """Mark what a turn of a loop changes, and what depends on that."""
        for _ in "12":
            branch, _status = self.run_apart(partial(self.run, body))
            for name, value in branch.variables.items():
                if value != self.state.variables.get(name):
                    self.state.variables[name] = as_several(mark(name), True)
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

    def join_branches(self, begins: Sequence[int]) -> None:
        """Make one of the commands with most flags that branches run, one of which is run."""
        commands = self.found.commands
        runs = [commands[a:b] for a, b in itertools.pairwise([*begins, len(commands)])]
        longest = [max(run, key=lambda words: len(flag_words(words))) for run in runs if run]
        longest = [words for words in longest if len(flag_words(words)) > 1]
        if len(longest) > 1:
            unknown = "".join(map(mark, sorted(self.reasons))) or mark("a condition")
            merged = merge_values([tuple(words) for words in longest], unknown)
            others = [words for run in runs for words in run if words not in longest]
            commands[begins[0] :] = [*others, list(merged)]

    def simple(self, node: Node, texts: Sequence[str], writes: bool) -> bool | None:
        """Assign variables, or run a command."""
        words = [word for raw in node.get("Args", ()) for word in self.words(raw)]
        before, assigned = dict(self.state.variables), node.get("Assigns", ())
        self.captured = True
        for assignment in assigned:
            self.assign_as_written(assignment)
        if not words:
            return self.captured
        status = self.call(words, texts, writes)
        for name in (assignment["Name"]["Value"] for assignment in assigned):  # of the command
            self.environment[name] = as_text(self.state.variables.pop(name, ""))
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
        if name == "set" and (rest[:1] == ["--"] or (rest and rest[0][:1] not in ("-", "+"))):
            state.arguments = rest[rest[0] == "--" :]
            return True
        written, words = words, [word.replace(EMPTY, "") for word in words]
        rest = words[1:]
        match name:
            case "exit" | "return" | "break" | "continue":
                state.leaves = name
                if name in ("break", "continue"):
                    levels = int(rest[0]) if rest and re.fullmatch("[0-9]{1,3}", rest[0]) else 1
                    state.leaves = f"{name} {min(levels, self.loops)}" * (self.loops > 0)
                    state.unsure |= any(map(marks_of, rest))
                    return True
                return None if any(map(marks_of, rest)) else rest in ([], ["0"])
            case ":" | "true" | "false":
                return name != "false"
            case "[" | "test":
                return self.brackets(rest[: len(rest) - (name == "[")])
            case "eval":
                return self.run_text(" ".join(rest))
            case "source" | ".":
                self.source(rest[0] if rest else "")
                return True
            case "unset":
                for variable in rest:
                    self.unset(variable)
                return True
            case "printf" if rest[:1] == ["-v"] and len(rest) > 2:
                array = rest[1].partition("[")[0]
                text = print_form(rest[2], rest[3:])
                self.assign(array, mark(array) if text is None or array != rest[1] else text)
                return True
            case "shift":
                count = int(rest[0]) if rest and rest[0].isdecimal() else 1
                there = present_words(state.arguments)
                if may_be_several(there[:count]):
                    state.arguments = [as_several(mark("$@"))]
                    return None
                state.arguments = there[count * (count <= len(there)) :]
                return count <= len(there)
            case "set" if "pipefail" in rest:
                self.pipefail = rest[0].startswith("-")
                return True
            case "getopts" if not state.arguments and not rest[2:]:
                return False
            case "read" | "mapfile" | "readarray" | "getopts":
                flags = [word for word in rest if re.fullmatch(r"-\w*a\w*", word)]
                is_array = name in ("mapfile", "readarray") or flags
                for variable in filter(str.isidentifier, [*rest, "OPTARG"]):
                    unknown = unknown_array(variable)
                    self.assign(variable, unknown if is_array else unknown[0])
                return None
        here = texts[-1] if name == "cat" and texts and not rest and not writes else None
        printed = print_words(name, rest) if here is None else here
        if name == "expr" and len(rest) == 3:
            number = self.number_of(" ".join(rest))
            printed = mark("expr") if number is None else str(number)
        if printed is None:
            self.output = self.output if name in _SUCCEEDING else None
            self.found.commands.append(written)
            self.run_inside(words)
        elif writes:
            texts = [*texts, printed]
        elif self.output is not None:
            self.output += printed
        for text in texts:
            self.found.texts.append(text)
            if re.search(r"\s--\w", text):
                self.try_text(text)
        return True if printed is not None or name in _SUCCEEDING else None

    def source(self, file: str) -> None:
        """Run the commands of a file of the folder, `$DIR/models/x.sh`; name any other."""
        path = strip_marks(file).lstrip("/" if marks_of(file) else "")
        beside = (self.folder or Path()) / path
        shown = show_marks(file)
        with suppress(OSError, ValueError):  # no name of a file
            if self.folder and file.endswith(path) and path[:1] != "/" and beside.is_file():
                with beside.open(errors="replace") as opened:
                    self.run_text(opened.read(_LONGEST), shown)
                self.state.leaves = self.state.leaves.replace("return", "")
                return
        if not _ENVIRONMENT.search(shown):
            self.found.unread.append(shown)

    def run_inside(self, words: Sequence[str]) -> None:
        """Run the commands that are words of another: behind `-c`, or with flags in them."""
        for before, word in itertools.pairwise(words):
            behind = re.fullmatch(r"-\w*c", before) and not re.search(r"python\S*$", words[0])
            flags = not word.startswith("-") and re.search(r"\s--\w", word)
            if re.search(r"\s", word) and (behind or flags):
                self.try_text(word)

    def try_text(self, text: str) -> None:
        """Run on a copy of the variables what may be commands; a text that is none is left out."""
        with suppress(BrokenScriptError):
            self.run_apart(partial(self.run_text, text))

    def call_function(self, body: Node, arguments: list[str]) -> bool | None:
        """Run a function with its arguments."""
        before, self.state.arguments = self.state.arguments, arguments
        self.hidden.append({})
        status = self.statement(body)
        self.state.arguments = before
        for name, value in self.hidden.pop().items():
            self.state.variables.pop(name, None)
            self.aliases.pop(name, None)
            if value is not None:
                self.state.variables[name] = value
        self.state.leaves = self.state.leaves.replace("return", "")
        return status

    # assignments

    def declare(self, how: str, assignments: Sequence[Node]) -> bool | None:
        """Run `export`, `local` and the like, and a command that stands behind."""
        flags = [n for n, node in enumerate(assignments) if node["Written"].startswith("--")]
        begin = min(flags, default=len(assignments))
        letters = ""
        for node in assignments[:begin]:
            name = node.get("Name", {}).get("Value", "")
            if not name:
                word = self.text(node.get("Value", {}))
                letters += word[1:] if word.startswith("-") else ""
                name, equals, text = word.partition("=")
                if equals and name.isidentifier():
                    self.assign(name, self.shape(name, text))
                continue
            hides = how not in ("export", "readonly") and self.hidden and name not in self.given
            if hides and "g" not in letters:
                self.hidden[-1].setdefault(name, self.state.variables.get(name))
                self.state.variables[name] = ""
            self.traits[name] = self.traits.get(name, "") + letters
            if "n" in letters:
                self.aliases[name] = self.text(node.get("Value", {}))
            elif not node.get("Naked"):
                self.assign_as_written(node)
        words = [word for node in assignments[begin:] for word in self.words(node.get("Value", {}))]
        return self.call(words, (), False) if words else True

    def assign_as_written(self, node: Node) -> None:
        """Run an assignment."""
        name, word = node["Name"]["Value"], node.get("Value", {})
        name = self.aliases.get(name, name)
        old = self.state.variables.get(name)
        before = old if node.get("Append") else None
        if "Index" in node:
            element = self.element(name, old, node["Index"]) if before else None
            self.assign_element(name, node["Index"], (element or "") + self.value_text(word))
        elif "Array" in node:
            self.assign_array(name, before, node["Array"].get("Elems", ()))
        elif isinstance(old, tuple):  # its name alone is the first element
            first, text = old[0] if before and old else "", self.value_text(word)
            several = may_be_several(old)
            self.assign(name, unknown_array(name) if several else (as_word(first + text), *old[1:]))
        else:
            sign = "+" if before and "i" in self.traits.get(name, "") else ""
            text = as_text(before or "") + sign + self.value_text(word)
            self.assign(name, self.shape(name, text))

    def assign_array(self, name: str, before: Value | None, elements: Sequence[Node]) -> None:
        """Assign the elements of an array, behind those before; some say their places."""
        pairs = [
            (element["Index"], [self.value_text(element.get("Value", {}))])
            if "Index" in element
            else (None, self.words(element.get("Value", {}), named=False))
            for element in elements
        ]
        found = [as_word(before)] if isinstance(before, str) else [*(before or ())]
        if not before:
            self.drop_keys(name)
        place: int | None = len(found) - 1
        for index, words in pairs:
            if index is not None:
                self.assign(name, tuple(found))
                place = self.assign_element(name, index, words[0])
                found = [*self.state.variables.get(name, ())]
            elif place == len(found) - 1 and not any(map(_PLACED.match, words)):
                found += words
                place = len(found) - 1
            else:
                found = [*unknown_array(name)]
        self.assign(name, tuple(found))

    def shape(self, name: str, text: str) -> str:
        """A text as the letters of `declare` make it: a number, in capital or in small letters."""
        letters = self.traits.get(name, "")
        if "i" in letters:
            number = self.number_of(text.strip())
            return str(number) if number is not None else "".join(marks_of(text)) or mark(name)
        if marks_of(text):
            return text
        upper, lower = map(letters.rfind, "ul")  # of which the last counts
        return text if upper == lower else text.upper() if upper > lower else text.lower()

    def assign_element(self, name: str, index: Node, text: str) -> int | None:
        """Assign an element of an array; those of other keys than numbers are variables.

        Gives the place of the element; None where it is not known, or a key.
        """
        before = self.state.variables.get(name, ())
        if "A" in self.traits.get(name, ""):
            self.assign(f"{name}[{self.key(index)}]", text)
            return None
        elements = present_words(before) if isinstance(before, tuple) else [as_word(before)]
        place = self.whole(index)
        place = place + len(elements) if place is not None and place < 0 else place
        of_several = isinstance(before, str) and UNKNOWN in before  # it may be
        of_several |= may_be_several(elements)
        if place is None or of_several or not 0 <= place < _PLACES:
            self.assign(name, unknown_array(name))
            return None
        elements += [HOLE] * (place - len(elements))
        elements[place : place + 1] = [as_word(text)]
        self.assign(name, tuple(elements))
        return place

    def keys(self, name: str) -> list[str]:
        """The variables that are the elements of an array with other keys than numbers."""
        return [other for other in self.state.variables if other.startswith(f"{name}[")]

    def drop_keys(self, name: str) -> None:
        """Take away those elements."""
        for keyed in self.keys(name):
            del self.state.variables[keyed]

    def unset(self, name: str) -> None:
        """Take away a variable, or an element, `A[1]`."""
        array, bracket, key = name.partition("[")
        value = self.state.variables.get(array)
        self.state.variables.pop(name, None)
        if not bracket:
            self.drop_keys(name)
            self.traits.pop(name, None)
            hides = next((names for names in reversed(self.hidden) if name in names), None)
            outer = hides.pop(name) if hides and hides is not self.hidden[-1] else None
            if outer is not None:  # of a function that calls this one
                self.state.variables[name] = outer
        elif isinstance(value, str):  # an array of one
            place = self.number_of(key.removesuffix("]"))
            self.assign(array, unknown_array(array))
            if place == 0:
                del self.state.variables[array]
        elif value is not None:
            place = self.number_of(key.removesuffix("]"))
            if place is None or may_be_several(value):
                self.assign(array, unknown_array(array))
            elif -len(left := present_words(value)) <= place < len(left):
                left[place] = HOLE
                while left and left[-1] == HOLE:
                    left.pop()
                self.assign(array, tuple(left))

    def key(self, index: Node) -> str:
        """What stands between the brackets behind a name."""
        return self.text(index) if "Parts" in index else str(index["Written"])

    def assign(self, name: str, value: Value) -> None:
        """Give a variable a value, unless it is given."""
        length = len(value) + sum(map(len, value))
        self.spend(5 + length // _CHEAP + length // _LONGEST * _WORK)
        name = self.aliases.get(name, name)
        if name not in self.given:
            self.state.variables[name] = value

    # conditions

    def brackets(self, words: Sequence[str]) -> bool | None:
        """Whether the words of `[ ]` hold."""
        match words:
            case ["!", *rest] if len(words) != 3 or words[1] not in ("=", "==", "!="):
                return negate(self.brackets(rest))
            case ["(", *inside_words, ")"]:
                return self.brackets(inside_words)
        for how in ("-o", "-a"):
            if how in words[1:-1]:
                place = words.index(how, 1)
                sides = self.brackets(words[:place]), self.brackets(words[place + 1 :])
                return either(sides, how == "-o")
        return self.test(words)

    def double_brackets(self, node: Node) -> bool | None:
        """Whether what stands in `[[ ]]` holds: one of the sides of `||`, all terms of it."""
        terms = terms_of_test(node)
        sides: list[list[bool | None]] = [[]]
        for how, term in terms if len(terms) > 1 else ():
            if how == "||":
                if either(sides[-1], False):
                    return True
                sides.append([])
            if False not in sides[-1]:
                sides[-1].append(self.double_brackets(term))
        if len(terms) > 1:
            return either([either(side, False) for side in sides], True)
        match node:
            case {"Type": "ParenTest", "X": inside}:
                return self.double_brackets(inside)
            case {"Type": "UnaryTest", "Op": "!", "X": inside}:
                return negate(self.double_brackets(inside))
            case {"Type": "UnaryTest", "Op": sign, "X": word}:
                return self.test([sign, self.text(word)])
            case {"Type": "BinaryTest", "Op": sign, "X": one, "Y": other}:
                if sign in COMPARISONS:
                    a, b = (self.whole(word) for word in (one, other))
                    return None if a is None or b is None else bool(COMPARISONS[sign](a, b))
                quote = escape if sign != "=~" else re.escape
                return self.test([self.text(one), sign, self.text(other, quote)], True)
        return self.test([self.text(node)])

    def test(self, words: Sequence[str], pattern: bool = False) -> bool | None:
        """Whether a test of one to three words holds; None where that is not known."""
        if len(words) == 3 and words[1] in COMPARISONS and any(map(is_unset, words)):
            self.reasons.update(unknown_names("".join(words)))  # no number: bash reports an error
            return None
        words = [without_unset(word) for word in words]
        if len(words) == 2 and words[0] in ("-z", "-n"):
            # an argument that is not given is empty
            word = re.sub(f"{UNKNOWN}[0-9]+{UNKNOWN}", "", words[1])
            if strip_marks(word) or not word:
                return bool(word) == (words[0] == "-n")
        if unknown := [name for word in words for name in unknown_names(word)]:
            self.reasons.update(unknown)
            return None
        match words:
            case [] | [_]:
                return bool(words) and bool(words[0])
            case [left, "=" | "==" | "!=" as sign, right]:
                same = matches(left, right) if pattern else left == right
                return same == (sign != "!=")
            case [left, "=~", right]:
                return search(left, right)
            case [left, sign, right] if sign in COMPARISONS:
                numbers = [re.fullmatch(r"\s*[-+]?[0-9]{1,18}\s*", side) for side in (left, right)]
                return all(numbers) and bool(COMPARISONS[sign](int(left), int(right)))
        return None

    # numbers

    def whole(self, node: Node) -> int | None:
        """The value of an expression in a condition; None where it is not known."""
        value, marks = self.calculate(node, without_unset)
        self.reasons.update(unknown_names(marks) if value is None else ())
        return value

    def is_true(self, node: Node) -> bool | None:
        """Whether the value of an expression is another than zero; None where it is not known."""
        value = self.whole(node)
        return None if value is None else value != 0

    def calculate(
        self, node: Node, known: Callable[[str], str] = lambda text: text
    ) -> tuple[int | None, str]:
        """The value of an expression of whole numbers, and the marks of what is not known in it."""
        arithmetic = Arithmetic(self, known)
        value, marks = arithmetic.number(node), "".join(dict.fromkeys(arithmetic.marks))
        return value, marks or mark(f"$(({node['Written']}))")

    def number_of(self, text: str) -> int | None:
        """The number that a text is, with variables that are set nowhere as zero."""
        return Arithmetic(self, without_unset).number_of(text)

    # words

    def words(self, word: Node, named: bool = True) -> list[str]:
        """The words that one expands to; in `name=~` a folder is `named`."""
        parts = word.get("Parts", ())
        if any("{" in part.get("Value", "") for part in parts if part["Type"] == "Lit"):
            ways = [{"Parts": way} for way in expand_braces(parts)]
            self.spend(len(ways) * (5 + len(parts)))
            if ways:
                return [text for way in map(join_names, ways) for text in self.words(way, False)]
        made: list[list[tuple[str, bool]]] = [[]]
        for part in part_tildes(parts, named=named):
            for text, quoted in self.pieces([part]):
                whole = quoted or part["Type"] == "Lit"
                if not quoted:
                    text = as_several(text.replace(EMPTY, ""))
                elif not spread_name(part):
                    text = as_word(as_one(text))
                elif not isinstance(self.value(spread_name(part)), tuple):
                    text = as_word(text)
                for k, piece in enumerate(text.split(BREAK) if whole else self.split(text)):
                    made += [[]] * bool(k)
                    made[-1] = made[-1] + [(piece, quoted)] * bool(piece or quoted)
        found = [match_files(pieces) for pieces in made if pieces]
        self.spend(5 + len(found) + sum(map(len, found)) // _CHEAP)
        return [word if is_unset(word) else word.replace(EMPTY, "") for word in found]

    def split(self, text: str) -> list[str]:
        """The parts of a value by blanks, or by the letters that `IFS` has."""
        letters = as_text(self.state.variables.get("IFS", " \t\n"))
        blanks = "[" + "".join({BREAK, *letters} & {BREAK, *" \t\n"}) + "]"
        if not (others := letters.strip(" \t\n")):
            return re.split(f"{blanks}+", text)
        parts = re.split(f"{blanks}*[{re.escape(others)}]{blanks}*|{blanks}+", text)
        has_empty = "" in map(without_unset, parts[:-1])  # words, which bash keeps
        return [mark("IFS")] if has_empty or marks_of(letters) else parts

    def text(
        self, word: Node, quote: Callable[[str], str] = lambda text: text, quotes: str = ""
    ) -> str:
        """The one text that a word expands to; `quote` is for what is quoted in it."""
        parts = word.get("Parts", ())
        pieces = self.pieces(parts if quotes else part_tildes(parts), quotes)
        text = "".join(quote(text) if quoted else text for text, quoted in pieces)
        self.spend(len(text) // _CHEAP + len(text) // _LONGEST * _WORK)
        return text.replace(BREAK, " ").replace(EMPTY, "")

    def value_text(self, word: Node) -> str:
        """The text that the value of an assignment expands to."""
        return self.text({"Parts": part_tildes(word.get("Parts", ()), is_value=True)})

    def pieces(self, parts: Sequence[Node], quotes: str = "") -> Iterator[tuple[str, bool]]:
        """The texts that the parts of a word expand to, and whether they are quoted."""
        for part in parts:
            self.spend(1)
            match part:
                case {"Type": "Lit"} if quotes:
                    escaped = r"\\([$`\\\n])" if quotes == "<<" else r"\\([$`\"\\\n])"
                    value = part.get("Value", "")
                    yield re.sub(escaped, lambda found: found[1].strip("\n"), value), True
                case {"Type": "Lit"}:
                    pieces = re.split(r"\\(.)", part.get("Value", ""), flags=re.S)
                    for k, piece in enumerate(pieces):
                        if piece:
                            yield piece, bool(k % 2)
                case {"Type": "Tilde", "Value": name}:
                    yield as_text(self.value("HOME") or "") if name == "~" else mark(name), True
                case {"Type": "SglQuoted"} if quotes:  # `"${A:-'x'}"`
                    expands = re.search(r"[$`\\]", part["Written"])
                    yield mark(part["Written"]) if expands else part["Written"], True
                case {"Type": "SglQuoted"}:
                    text = part.get("Value", "")
                    yield unescape(text) if part.get("Dollar") else text, True
                case {"Type": "DblQuoted"}:
                    name, inside = spread_name(part), part.get("Parts", ())
                    if not name or self.value(name):
                        yield "".join(text for text, _ in self.pieces(inside, '"')), True
                case {"Type": "ParamExp"}:
                    yield self.parameter(part, quotes), bool(quotes)
                case {"Type": "ArithmExp", "X": expression}:
                    value, marks = self.calculate(expression)
                    yield marks if value is None else str(value), bool(quotes)
                case {"Type": "CmdSubst"}:
                    yield self.capture(part.get("Stmts", []), part["Written"]), bool(quotes)
                case _:
                    yield mark(part["Written"]), bool(quotes)

    def capture(self, body: Sequence[Node], written: str) -> str:
        """What commands print, where no other programs are needed for it; else its mark."""
        outer, self.output = self.output, ""
        before = self.found.size()
        self.captured = self.run_apart(partial(self.run, body))[1]
        self.found.cut(before)
        file = re.fullmatch(r"(?:\$\(|`)\s*(?:cat|<)\s*([^\s|;&]+)\s*[)`]", written)
        if file and "/proc" not in written:
            named = parse(f": {file[1]}")[0]["Cmd"]["Args"][1]
            self.found.unread.append(show_marks(self.text(named)))
        text, self.output = self.output, outer
        return mark(written) if text is None or not body else text.rstrip("\n")

    def value(self, name: str) -> Value | None:
        """The value of a variable or an argument; None where it is set nowhere."""
        if name in ("@", "*"):
            return tuple(self.state.arguments)
        if name == "#" or (name.isdecimal() and name != "0"):
            arguments = present_words(self.state.arguments)
            missing = None if self.hidden or arguments else mark(name)
            if may_be_several(arguments if name == "#" else arguments[: int(name)]):
                return mark(f"${name}")
            if name == "#":
                return str(len(arguments))
            return arguments[int(name) - 1] if int(name) <= len(arguments) else missing
        name = self.aliases.get(name, name)
        known = name in _OF_EVERY_SHELL or (self.scheduled and name.startswith("SLURM"))
        missing = mark(name) if known or not name[0].isidentifier() else None
        value = self.state.variables.get(name, missing)
        return elements_of(value) if isinstance(value, tuple) else value

    def parameter(self, node: Node, quotes: str = "") -> str:
        """The value of `$...`; elements of an array with breaks between them."""
        name = self.aliases.get(node["Param"]["Value"], node["Param"]["Value"])
        if node.get("Excl"):  # the value of the variable that it names
            pointed = as_text(self.value(name) or "")
            if node.get("Names") or "Index" in node or not pointed.isidentifier():
                return mark(name)
            return self.parameter(node | {"Excl": False, "Param": {"Value": pointed}}, quotes)
        value, index = self.value(name), node.get("Index")
        key = None if index is None else self.key(index)
        several = key in ("@", "*") or (key is None and name in ("@", "*"))
        if several and "A" in self.traits.get(name, ""):  # in an order that is bash's alone
            keys = self.keys(name)
            return str(len(keys)) if node.get("Length") else mark(name) * bool(keys)
        if not several and (index is not None or isinstance(value, tuple)):
            value = self.element(name, value, index)
        if node.get("Length"):
            value = tuple(present_words(value)) if isinstance(value, tuple) else value
            length = 1 if several and isinstance(value, str) else len(value or "")
            if several and may_be_several([as_text(value or "")]):
                return mark(node["Written"])
            is_text = isinstance(value, str) or not several
            return mark(name) if is_text and unknown_names(as_text(value or "")) else str(length)
        unset = "" if name in self.state.variables else mark(name, UNSET)
        between = as_text(self.state.variables.get("IFS", " "))[:1]
        glue = BREAK if several and "*" not in (key, name) else between
        option = re.fullmatch("(:?)([-+=?])", node["Exp"]["Op"]) if "Exp" in node else None
        if option:
            missing = value is None or (value == mark(name) and name not in self.state.variables)
            text = "" if missing else without_unset(as_text(value or ""))
            absent = missing or (not text and bool(option[1]))
            if option[2] == "+" and text and not strip_marks(text):  # which may be empty
                return text
            if (option[2] == "+") == absent or option[2] == "?":
                if option[2] == "+" or value is None:
                    return "" if option[2] == "+" else unset
                return value if isinstance(value, str) else glue.join(value)
            default = self.text(node["Exp"].get("Word", {}), quotes=quotes)
            if option[2] == "=":
                self.assign(name, default)
            return default
        if value is None:
            return "" if several else unset
        if isinstance(value, str):
            return self.change(value, node)
        if glue not in (" ", BREAK):
            value = tuple(present_words(value))
        if "Slice" in node:
            if may_be_several(value):
                return mark(node["Written"])
            start, stop = self.slice(node["Slice"], len(present_words(value)) + (name == "@"))
            before = name == "@" and start > 0  # `$0`, which is not among them
            whole = self.state.variables.get(name, value)  # with places that are not set
            behind = elements_of((*present_words(whole)[start - before :],))
            return glue.join(behind[: stop - start])
        return glue.join(self.change(element, node) for element in value)

    def element(self, name: str, value: Value | None, index: Node | None) -> str | None:
        """The element of an array, the first without an index; a text is an array of one."""
        key = "0" if index is None else self.key(index)
        if (keyed := self.state.variables.get(f"{name}[{key}]")) is not None:
            return as_text(keyed)
        place = 0 if index is None else self.whole(index)
        there = self.state.variables.get(name, value) or ()
        elements = [there] if isinstance(there, str) else present_words(there)
        if place is None:
            return mark(key)
        if place and isinstance(there, str) and UNKNOWN in there:  # it may be of several
            return there
        if place and may_be_several(elements[: place + 1] if place > 0 else elements[place:]):
            return mark(f"{name}[{key}]")
        found = elements[place] if -len(elements) <= place < len(elements) else HOLE
        return None if found == HOLE else found

    def slice(self, bounds: Node, length: int) -> tuple[int, int]:
        """The bounds that `:2:3` gives in so many letters or elements."""
        start = self.whole(bounds["Offset"]) or 0
        count = self.whole(bounds["Length"]) or 0 if "Length" in bounds else length
        start = max(length + start, 0) if start < 0 else start
        return start, start + count if count >= 0 else length + count

    def change(self, value: str, node: Node) -> str:
        """A value with what stands behind its name in `${...}` done to it."""
        if not any(node.get(change) for change in _CHANGES):
            return value
        if marks := marks_of(value):
            if UNKNOWN in value or is_unset(value):
                return "".join(marks)
            value = without_unset(value)
        match node:
            case {"Slice": bounds}:
                start, stop = self.slice(bounds, len(value))
                return value[start:stop]
            case {"Exp": {"Op": "^^" | ",," as how}}:
                return value.upper() if how == "^^" else value.lower()
            case {"Exp": {"Op": "#" | "##" | "%" | "%%" as how}}:
                pattern = self.text(node["Exp"].get("Word", {}), escape)
                if marks := marks_of(pattern):
                    return "".join(marks)
                return trim(value, how, pattern)
            case {"Repl": {"Orig": dict(old)}} if len(value) <= PATTERNED:
                pattern, text = self.text(old, escape), self.text(node["Repl"].get("With", {}))
                if marks := marks_of(pattern):
                    return "".join(marks)
                return substitute(value, pattern, text, node["Repl"].get("All", False))
        return mark(node["Param"]["Value"])
