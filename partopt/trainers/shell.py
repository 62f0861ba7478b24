"""Shell scripts, read as a shell would run them: variables, arrays, arithmetic and conditions.

No command is executed. What depends on a value that the script does not have carries a mark with
its name, as `unknown_names` finds them.
"""

from __future__ import annotations

import ast
import copy
import fnmatch
import operator
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from partopt.errors import PartoptError

_MARK = "\0"
_BREAK = "\1"  # between the elements of an array, which part words even in quotes
_CONTROL = re.compile("[\0\1]")
_MARKED = re.compile(r"\0([^\0]*)\0")
_OPERATORS = ("&&", "||", ";;", "\n", ";", "|", "&", "(", ")")
_HEREDOC = re.compile(r"<<-?[ \t]*(['\"]?)(\w+)\1(.*)")
_ASSIGNED = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_VARIABLE = re.compile(r"[A-Za-z_]\w*|[0-9@*#?!$]")
_PARAMETER = re.compile(r"([A-Za-z_]\w*|[0-9]+)(\[[@*]\])?(.*)", re.DOTALL)
_BEFORE_ASSIGNMENTS = ("export", "local", "declare", "readonly", "typeset", "env")
_PASSED_OVER = ("{", "}", "do", "then", "time", "exec", "eval", "function", "!")
_COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "-eq": operator.eq, "-ne": operator.ne, "-lt": operator.lt, "-le": operator.le,
    "-gt": operator.gt, "-ge": operator.ge,
}  # fmt: skip
_ARITHMETIC: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Mod: operator.mod,
    ast.FloorDiv: operator.floordiv, ast.Div: operator.truediv,
}  # fmt: skip
_MOST = 10**15  # numbers beyond are not computed with


def mark(name: str) -> str:
    """The mark of a value that is not known, `name` says which."""
    return f"{_MARK}{name}{_MARK}"


def unknown_names(text: str) -> list[str]:
    """The names of what is not known in a value."""
    return list(dict.fromkeys(_MARKED.findall(text)))


def calculate(node: ast.expr, names: Callable[[str], object]) -> object:
    """The value of an expression of numbers and `names`. ValueError where it has anything else."""
    match node:
        case ast.Expression(body=body):
            return calculate(body, names)
        case ast.Constant(value=value):
            return value
        case ast.Name(id=name):
            return names(name)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            number = calculate(operand, names)
            if isinstance(number, int | float):
                return -number
        case ast.BinOp(op=op, left=left, right=right) if type(op) in _ARITHMETIC:
            a, b = calculate(left, names), calculate(right, names)
            numbers = all(isinstance(n, int | float) and abs(n) < _MOST for n in (a, b))
            if numbers and (b or not isinstance(op, ast.FloorDiv | ast.Div | ast.Mod)):
                return _ARITHMETIC[type(op)](a, b)
    raise ValueError(ast.dump(node)[:40])


@dataclass
class _State:
    """Variables, texts between `<<EOF` and `EOF`, and the commands with their words."""

    variables: dict[str, str]
    texts: list[str] = field(default_factory=list)
    commands: list[list[str]] = field(default_factory=list)


@dataclass(frozen=True)
class Script:
    """What a script leaves: its variables, the texts that it writes, and its commands' words."""

    variables: Mapping[str, str]
    texts: Sequence[str]
    commands: Sequence[Sequence[str]]


def read_script(text: str, given: Mapping[str, str]) -> Script:
    """Run through a script; the variables that are `given` keep their values.

    Raises PartoptError for one that nests too deep to be read.
    """
    reader, state = _Reader(_CONTROL.sub("", text), given), _State(dict(given))
    try:
        while reader.at < len(reader.tokens):
            reader.run(state, ())
            reader.at += 1  # a word that ends nothing
    except RecursionError:
        what = "expressions or commands lie too deep in each other"
        hint = "give the flags alone, with their values"
        raise PartoptError(what, hint, code="malformed-script") from None
    variables = {name: value.replace(_BREAK, " ") for name, value in state.variables.items()}
    return Script(variables, state.texts, state.commands)


def _tokens(text: str) -> Iterator[str]:
    """Words, as they are written, and operators."""
    i, word = 0, ""
    while i < len(text):
        if text.startswith("\\\n", i):
            i += 2
            continue
        c = text[i]
        found = next((each for each in _OPERATORS if text.startswith(each, i)), None)
        if found == "(" and _ASSIGNED.fullmatch(word):  # of an array
            found = None
            end = _closing(text, i, "(", ")")
            word, i = word + text[i:end], end
        elif c in "'\"`$" or c == "\\":
            end = _end(text, i)
            word, i = word + text[i:end], end
        elif found or c in " \t\r" or (c == "#" and not word):
            if word:
                yield word
            word = ""
            if found:
                yield found
            i += len(found or c)
            if c == "#":
                i = text.find("\n", i) % (len(text) + 1)
        else:
            word, i = word + c, i + 1
    if word:
        yield word


def _end(text: str, i: int) -> int:
    """Where a quotation, an expansion or an escape ends that begins at i."""
    c = text[i]
    if c == "\\":
        return i + 2
    if c == "$":
        for begin, end in (("(", ")"), ("{", "}")):
            if text.startswith(begin, i + 1):
                return _closing(text, i + 1, begin, end)
        return i + 1
    j = i + 1
    while j < len(text) and text[j] != c:
        j = _end(text, j) if text[j] in '\\$"`' and c == '"' else j + 1
    return j + 1


def _closing(text: str, i: int, begin: str, end: str) -> int:
    """The place behind the `end` that goes with the `begin` at i; the text's where there is none.

    Comments have no quotations.
    """
    depth, j = 0, i
    while j < len(text):
        c = text[j]
        if c in "'\"\\`":
            j = _end(text, j)
            continue
        if c == "#" and text[j - 1] in " \t\n" and begin == "(":
            j = text.find("\n", j) % (len(text) + 1)
            continue
        depth += (c == begin) - (c == end)
        j += 1
        if not depth:
            return j
    return j


class _Reader:
    """Runs through the tokens of a script."""

    def __init__(self, text: str, given: Mapping[str, str]) -> None:
        self.given, self.texts, lines = given, list[str](), list[str]()
        rest = iter(text.splitlines())
        for line in rest:
            found = None if line.lstrip().startswith("#") else _HEREDOC.search(line)
            lines.append(line if found is None else line[: found.start()] + found[3])
            if found is not None:
                body = list[str]()
                for own in rest:
                    if own.strip() == found[2]:
                        break
                    body.append(own)
                lines[-1] += f" {_BREAK}{len(self.texts)}"
                self.texts.append("\n".join(body))
        self.tokens = [*_tokens("\n".join(lines)), "\n", "\n"]  # what an unfinished command lacks
        self.at = 0

    def run(self, state: _State, ends: Sequence[str]) -> None:
        """Run commands up to one of the words that end them."""
        words = list[str]()
        while self.at <= len(self.tokens):
            token = self.tokens[self.at] if self.at < len(self.tokens) else "\n"
            if token in ends and (not words or token in _OPERATORS):
                self._command(words, state)
                return
            self.at += 1
            if not words and token in ("if", "case", "for", "while", "until"):
                {"if": self._if, "case": self._case}.get(token, self._loop)(state)
            elif token in _OPERATORS:
                self._command(words, state)
                words = []
            elif words or token not in _PASSED_OVER:
                words.append(token)

    def _loop(self, state: _State) -> None:
        """The body once; the variable of a loop has no known value."""
        name, words = self.tokens[self.at], list[str]()
        while self.at < len(self.tokens) and self.tokens[self.at] != "do":
            words.append(self.tokens[self.at])
            self.at += 1
        if words[1:2] == ["in"] and name not in self.given:
            state.variables[name] = mark(name)
        self.run(state, ("done",))
        self.at += 1

    def _if(self, state: _State) -> None:
        """The branches that may be taken, and what is common to them."""
        taken, before, open_ = list[_State](), state, True
        while True:
            end = "else" if self.tokens[self.at - 1] == "else" else ""
            true: bool | None = True
            if not end:
                words = list[str]()
                while self.at < len(self.tokens) and self.tokens[self.at] != "then":
                    words.append(self.tokens[self.at])
                    self.at += 1
                true = self._holds(words, before)
            branch = copy.deepcopy(before)
            self.run(branch, ("elif", "else", "fi"))
            self.at += 1
            if open_ and true is not False:
                taken.append(branch)
            open_ = open_ and true is not True
            if end or self.at >= len(self.tokens) or self.tokens[self.at - 1] == "fi":
                break
        if open_:
            taken.append(copy.deepcopy(before))
        _merge(state, taken)

    def _case(self, state: _State) -> None:
        """The branch whose pattern matches; all where the word is not known."""
        word = self._text(self.tokens[self.at], state)
        self.at += 2  # it, and `in`
        taken, open_ = list[_State](), True
        while self.at < len(self.tokens) and self.tokens[self.at] != "esac":
            patterns = list[str]()
            while self.at < len(self.tokens) and self.tokens[self.at] not in (")", "esac"):
                patterns.append(self.tokens[self.at])
                self.at += 1
            if self.at < len(self.tokens) and self.tokens[self.at] == "esac":
                break
            self.at += 1
            branch = copy.deepcopy(state)
            self.run(branch, (";;", "esac"))
            self.at += self.at < len(self.tokens) and self.tokens[self.at] == ";;"
            known = [self._text(each, state) for each in patterns if each not in _OPERATORS]
            matches = any(fnmatch.fnmatchcase(word, each) for each in known)
            if unknown_names(word) or (open_ and matches):
                taken.append(branch)
                open_ = False
        self.at += 1
        _merge(state, taken or [copy.deepcopy(state)])

    def _holds(self, tokens: Sequence[str], state: _State) -> bool | None:
        """Whether a condition holds; None where that is not known."""
        found: bool | None = None
        how, words = "", list[str]()
        for token in [*tokens, ";"]:
            if token not in ("&&", "||", ";", "\n"):
                words.append(token)
                continue
            if words:
                own = self._test(words, state)
                if how in ("&&", "||"):  # either decides it, or else both are needed
                    decides = how == "||"
                    unknown = None if None in (found, own) else not decides
                    found = decides if decides in (found, own) else unknown
                else:
                    found = own
                how, words = token, []
        return found

    def _test(self, tokens: Sequence[str], state: _State) -> bool | None:
        brackets = ("[", "[[", "]", "]]", "test")
        words = [self._text(each, state) for each in tokens if each not in brackets]
        negated = words[:1] == ["!"]
        words = words[negated:]
        holds: bool | None = None
        if not unknown_names(" ".join(words)):
            match words:
                case ["-z", one]:
                    holds = not one
                case ["-n", one]:
                    holds = bool(one)
                case [one, "=" | "==", other]:
                    holds = fnmatch.fnmatchcase(one, other)
                case [one, "!=", other]:
                    holds = not fnmatch.fnmatchcase(one, other)
                case [one, how, other] if how in _COMPARISONS:
                    if one.isdecimal() and other.isdecimal():
                        holds = _COMPARISONS[how](int(one), int(other))
        return holds if holds is None else holds != negated

    def _command(self, tokens: Sequence[str], state: _State) -> None:
        """Assign variables, or note the words of a command."""
        assigns, rest = True, list[str]()
        for token in tokens:
            found = _ASSIGNED.match(token) if assigns else None
            if token.startswith(_BREAK):
                state.texts.append(self._expand(self.texts[int(token[1:])], state))
            elif found is not None:
                self._assign(found[1], found[2], token[found.end() :], state)
            elif not (assigns and (token in _BEFORE_ASSIGNMENTS or re.fullmatch(r"-\w+", token))):
                assigns = False
                rest.append(token)
        words = [word for token in rest for word in self.words(token, state)]
        if words:
            state.commands.append(words)

    def _assign(self, name: str, plus: str, value: str, state: _State) -> None:
        if value.startswith("("):
            inside = [token for token in _tokens(value[1:-1]) if token not in _OPERATORS]
            words = [word for token in inside for word in self.words(token, state)]
            value = _BREAK.join(words)
            glue = _BREAK
        else:
            value, glue = self._text(value, state), ""
        if name not in self.given:
            before = state.variables.get(name, "") if plus else ""
            state.variables[name] = before + glue * bool(before) + value

    def words(self, token: str, state: _State) -> list[str]:
        """The words that a token expands to."""
        found, word, i, begun = list[str](), "", 0, False
        while i < len(token):
            end = _end(token, i) if token[i] in "'\"`$\\" else i + 1
            if token[i] == "$" and end == i + 1 and (name := _VARIABLE.match(token, end)):
                end = name.end()
            piece = token[i:end]
            if piece[0] == "'":
                parts, begun = [piece[1:-1]], True
            elif piece[0] == '"':
                parts, begun = self._expand(piece[1:-1], state).split(_BREAK), True
            elif piece[0] == "\\":
                parts = [piece[1:]]
            elif piece[0] in "$`":
                parts = re.split(rf"[\s{_BREAK}]+", self._expand(piece, state))
            else:
                parts = [piece]
            for k, part in enumerate(parts):
                if k:
                    found += [word] * bool(word)
                    word = ""
                word += part
            i = end
        return [*found, word] if word or (begun and not found) else found

    def _text(self, token: str, state: _State) -> str:
        """The one word that a token expands to."""
        return " ".join(self.words(token, state))

    def _expand(self, text: str, state: _State) -> str:
        """A text with the values of its variables."""
        found, i = "", 0
        while i < len(text):
            c = text[i]
            end = i + 1
            if c == "\\":
                end = i + 2
                found += text[i + 1 : end] if text[i + 1 : end] in '$"\\`' else text[i:end]
            elif c == "`":
                end = _end(text, i)
                found += mark(text[i:end])
            elif text.startswith("$((", i):
                end = _closing(text, i + 1, "(", ")")
                found += self._number(text[i + 3 : end - 2], state)
            elif text.startswith("$(", i):
                end = _closing(text, i + 1, "(", ")")
                found += mark(text[i:end])
            elif text.startswith("${", i):
                end = _closing(text, i + 1, "{", "}")
                found += self._parameter(text[i + 2 : end - 1], state)
            elif c == "$" and (name := _VARIABLE.match(text, end)):
                end = name.end()
                found += state.variables.get(name[0], mark(name[0]))
            else:
                found += c
            i = end
        return found

    def _parameter(self, inside: str, state: _State) -> str:
        """The value of `${...}`."""
        match = _PARAMETER.fullmatch(inside)
        if match is None:
            return mark(inside)
        name, rest = match[1], match[3]
        value = state.variables.get(name)
        if default := re.match(r":?([-=])", rest):
            if not value:
                value = self._text(f'"{rest[default.end() :]}"', state)
                if default[1] == "=":
                    state.variables[name] = value
        elif rest in (",,", "^^") and value is not None:
            value = value.lower() if rest == ",," else value.upper()
        elif rest:
            return mark(name)
        return mark(name) if value is None else value

    def _number(self, text: str, state: _State) -> str:
        """The value of an expression of whole numbers."""
        expanded = self._expand(text, state)
        unknown = unknown_names(expanded)

        def value(name: str) -> object:
            own = state.variables.get(name, mark(name))
            unknown.extend(unknown_names(own))
            return int(own) if own.strip().isdecimal() else None

        with_names = _MARKED.sub("None", expanded).replace("/", "//").strip()
        try:
            return str(calculate(ast.parse(with_names, mode="eval").body, value))
        except (ValueError, SyntaxError, RecursionError):
            return "".join(map(mark, unknown)) or mark(f"$(({text}))")


def _merge(state: _State, taken: Sequence[_State]) -> None:
    """What branches leave: of a variable the value where all agree, or most words of flags."""
    names = dict.fromkeys(name for own in taken for name in own.variables)
    for name in names:
        values = [own.variables.get(name, "") for own in taken]
        flags = [value for value in values if "--" in value]
        if len(set(values)) == 1:
            state.variables[name] = values[0]
        elif flags:
            state.variables[name] = max(flags, key=len)
        else:
            state.variables[name] = mark(name)
    longest = max(taken, key=lambda own: len(own.commands))
    state.commands, state.texts = longest.commands, longest.texts


def flag_words(words: Sequence[str]) -> dict[str, list[str]]:
    """The words of each `--flag`, up to the next; those within quoted words, too."""
    flat = list[str]()
    for word in words:
        inside = [word]
        if re.search(r"(^|\s)--\w", word) and re.search(r"\s", word):
            try:
                inside = shlex.split(word)
            except ValueError:
                inside = word.split()
        flat += inside
    found: dict[str, list[str]] = {}
    flag = None
    for word in flat:
        if re.match(r"--\w", word):
            flag, equals, value = word[2:].partition("=")
            found[flag] = [value] if equals else []
        elif flag is not None and not (word.endswith(".py") and found[flag]):
            found[flag].append(word)
        else:  # the program, behind the flags of what starts it
            flag = None
    return found
