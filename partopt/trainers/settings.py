"""What the scripts, programs and configurations of trainers set, read without executing them.

Four forms end in one: the words of flags of a shell script, what a Python program assigns and
passes, and the entries of YAML, TOML and JSON are values by path, `training.seq_len`.
"""

from __future__ import annotations

import ast
import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal

import yaml

from partopt.errors import PartoptError
from partopt.trainers.shell import calculate, flag_words, mark, read_script, unknown_names

Form = Literal["script", "program", "document"]

_WHOLE = re.compile(r"[+-]?[0-9]{1,15}")
_WORDS = {"true": True, "false": False, "none": None, "null": None}
_FEW = 3  # flags of a command that trains
_DEPTH = 8  # functions that call each other


class Called(str):
    """The name of what is called, in place of what it returns."""


class Settings:
    """Values by path, of which the last counts; a path is found by how it ends.

    A value that depends on something the text does not have is marked with the name of that. What
    is asked for and missing is noted in `faults`.
    """

    def __init__(self, values: Mapping[str, object], form: Form) -> None:
        self.values, self.form, self.faults = dict(values), form, list[PartoptError]()
        self._found: dict[str, object] = {}
        for path, value in self.values.items():
            parts = path.split(".")
            for i in range(len(parts)):
                self._found[".".join(parts[i:])] = value

    def find(self, *names: str) -> object:
        """The value of the first of the names that has one; None where none has.

        One that is not known is a fault, and None.
        """
        for name in names:
            value = self._found.get(name)
            if value is None:
                continue
            if isinstance(value, str) and (unknown := unknown_names(value)):
                self._refuse_unknown(name, unknown)
                return None
            return value
        return None

    def value(self, name: str) -> object:
        """The value of a name, or the mark of one that is not known; None where it has none."""
        return self._found.get(name)

    def known(self, name: str) -> object:
        """The value of a name; None where it has none, or none that is known."""
        value = self.value(name)
        return None if isinstance(value, str) and unknown_names(value) else value

    def states(self, name: str) -> bool:
        """Whether the text gives the name a value, be it none."""
        return name in self._found

    def has(self, *names: str) -> bool:
        """Whether one of the names has a value that is not false, zero, none or an empty text."""
        value = self.find(*names)
        return bool(value) and value != "none"

    def count(self, *names: str, default: int | None = None) -> int | None:
        """The whole number of one of the names. A fault where it is none, or is missing."""
        before = len(self.faults)
        value = self.find(*names)
        if value is None and len(self.faults) == before and default is None:
            self.refuse_missing(names[0])
        if value is None:
            return default
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return value
        what = f"{self.show(names[0])}: {value!r} is not a whole number"
        self.faults.append(PartoptError(what, "give a number", code="invalid-value", path=names[0]))
        return default

    def refuse_missing(self, name: str) -> None:
        """Note that a value is needed that the text does not have."""
        what = f"{self.show(name)}: the configuration does not say it"
        hint = f"give it: `arguments={name}=N`"
        self.faults.append(PartoptError(what, hint, code="missing-setting", path=name))

    def show(self, name: str) -> str:
        """A name as the text writes it."""
        return f"--{name.replace('_', '-')}" if self.form == "script" else name

    def _refuse_unknown(self, name: str, unknown: Sequence[str]) -> None:
        variables = ", ".join(unknown)
        hint = f"give it: `arguments={name}=VALUE`"
        if re.fullmatch(r"\w+", unknown[0]):
            hint = f"give it: `arguments={unknown[0]}=VALUE`"
        what = f"{self.show(name)}: depends on {variables}, which the text does not say"
        fault = PartoptError(what, hint, code="unknown-variable", path=name)
        if fault.message not in [own.message for own in self.faults]:
            self.faults.append(fault)


def read_settings(
    text: str, given: Mapping[str, str] | None = None, function: str | None = None
) -> Settings:
    """What a text sets: JSON, TOML, a program in Python, YAML or a shell script.

    `given` are values of variables that the text does not have, and of settings, which come before
    its own; `function` is the one of a program that makes the configuration. Raises PartoptError
    where a program has several and none is named.
    """
    given = dict(given or {})
    values, form = _read(text, given, function)
    added = {name.replace("-", "_"): convert(value) for name, value in given.items()}
    return Settings(values | added, form)


def convert(text: str) -> object:
    """The value of a word: a number, true, false, none, or the word itself."""
    word = text.strip()
    if word.lower() in _WORDS:
        return _WORDS[word.lower()]
    if _WHOLE.fullmatch(word):
        return int(word)
    with suppress(ValueError):
        return float(word)
    return text


def _read(
    text: str, given: Mapping[str, str], function: str | None
) -> tuple[dict[str, object], Form]:
    for parse in (json.loads, tomllib.loads):
        with suppress(ValueError, RecursionError):
            parsed = parse(text)
            if isinstance(parsed, dict):
                return dict(_flat(parsed)), "document"
    if not text.startswith("#!") and (tree := parse_program(text)) is not None:
        return _Program(tree, given).read(function), "program"
    if not text.startswith("#!"):
        with suppress(yaml.YAMLError, RecursionError, ValueError):
            parsed = yaml.safe_load(text)
            if isinstance(parsed, dict):
                return dict(_flat(parsed)), "document"
    return _of_script(text, given), "script"


def parse_program(text: str) -> ast.Module | None:
    """The syntax of a program in Python; None where the text is none."""
    with suppress(SyntaxError, ValueError, RecursionError, MemoryError):
        return ast.parse(text)
    return None


def _flat(parsed: Mapping[Any, object], before: str = "") -> Iterator[tuple[str, object]]:
    for key, value in parsed.items():
        path = f"{before}{key}".replace("-", "_")
        if isinstance(value, str):  # one that is worked out elsewhere is not known
            value = mark(value) if "${" in value else convert(value)
        yield path, value
        if isinstance(value, dict):
            yield from _flat(value, f"{path}.")


def _of_script(text: str, given: Mapping[str, str]) -> dict[str, object]:
    """Variables, the entries of texts in JSON, and flags: of the command that has most, at last.

    Where no command has flags they are those in the variables.
    """
    script = read_script(text, given)
    found: dict[str, object] = {name: convert(own) for name, own in script.variables.items()}
    for own in script.texts:
        with suppress(ValueError, RecursionError):
            parsed = json.loads(own)
            found |= dict(_flat(parsed)) if isinstance(parsed, dict) else {}
    commands = sorted(map(flag_words, script.commands), key=len)
    if not commands or len(commands[-1]) < _FEW:
        words = [word for value in script.variables.values() for word in value.split()]
        commands.append(flag_words(words))
    for flags in commands:
        for flag, words in flags.items():
            value: object = list(words) if len(words) > 1 else True
            found[flag.replace("-", "_")] = convert(words[0]) if len(words) == 1 else value
    return found


class _Program:
    """What a program assigns, passes and calls, in the order in which its statements stand."""

    def __init__(self, tree: ast.Module, given: Mapping[str, str]) -> None:
        self.given, self.found = given, dict[str, object]()
        self.names = {name: convert(value) for name, value in given.items()}
        self.functions = {
            node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)
        }
        self.tree, self.depth = tree, 0

    def read(self, function: str | None) -> dict[str, object]:
        """Run through the module, then the function, or the only one that sets anything."""
        self._run([own for own in self.tree.body if not isinstance(own, ast.FunctionDef)])
        if function is not None and function not in self.functions:
            raise PartoptError(
                f"no function {function}",
                f"choose {', '.join(self.functions) or 'none: there are no functions'}",
                code="no-such-function",
                name=function,
            )
        if function is not None:
            self._call(function)
            return self.found
        before = dict(self.found)
        different: dict[str, dict[str, object]] = {}
        for name in self.functions:
            self.found = dict(before)
            self._call(name)
            if self.found != before:
                different[name] = self.found
        called = {
            node.func.id
            for node in ast.walk(self.tree)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        }
        free = {name: own for name, own in different.items() if name not in called}
        if len(free) > 1:
            raise PartoptError(
                f"{len(free)} functions make configurations: {', '.join(list(free)[:12])}",
                "name one behind the file: FILE:FUNCTION",
                code="several-layouts",
            )
        return next(iter((free or different).values()), before)

    def _call(self, name: str) -> None:
        """Run through a function, arguments at their defaults."""
        self.depth += 1
        function = self.functions[name]
        spec = function.args
        pairs = [*zip(spec.args[::-1], spec.defaults[::-1], strict=False)]
        pairs += [(a, d) for a, d in zip(spec.kwonlyargs, spec.kw_defaults, strict=True) if d]
        for argument, default in pairs:
            self._set("", argument.arg, self._value(default))
        if self.depth < _DEPTH:
            self._run(function.body)
        self.depth -= 1

    def _run(self, body: Sequence[ast.stmt]) -> None:
        for node in body:
            match node:
                case ast.Assign(targets=targets, value=value):
                    for target in targets:
                        self._assign(target, value)
                case ast.AnnAssign(target=target, value=ast.expr() as value):
                    self._assign(target, value)
                case ast.ImportFrom(module=str(module), names=names):
                    for own in names:
                        path = f"import.{own.asname or own.name}"
                        self.found[path] = f"{module}.{own.name}"
                case ast.Return(value=ast.expr() as value) | ast.Expr(value=value):
                    self._inside("", value)
                case (
                    ast.ClassDef(body=own)
                    | ast.FunctionDef(body=own)
                    | ast.With(body=own)
                    | ast.Try(body=own)
                ):
                    self._run(own)
                case ast.If(test=test, body=own, orelse=other):
                    self._run(own if self._value(test) is not False else [])
                    self._run(other if self._value(test) is not True else [])

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        path = _path(target)
        if path:
            self._inside(path, value)
            self._set(path.rpartition(".")[0], path.rpartition(".")[2], self._value(value))

    def _set(self, before: str, name: str, value: object) -> None:
        path = f"{before}.{name}" if before else name
        if "." not in path and path not in self.given:
            self.names[path] = value
        self.found.pop(path, None)
        self.found[path] = value

    def _inside(self, path: str, node: ast.expr) -> None:
        """What an expression passes to what it calls, and has in its dictionaries and lists."""
        match node:
            case ast.Call(func=function, args=args, keywords=keywords):
                name = _path(function)
                if isinstance(function, ast.Attribute):
                    self._inside(path, function.value)
                if name in self.functions:
                    self._call(name)
                literal = next((own for own in map(self._value, args) if own is not None), True)
                if name:
                    self._set(path, name.rpartition(".")[2], literal)
                for own in args:
                    self._inside(path, own)
                for keyword in keywords:
                    self._pass(path, keyword.arg, keyword.value)
            case ast.Dict(keys=keys, values=values):
                for key, own in zip(keys, values, strict=True):
                    self._pass(path, self._value(key) if key else None, own)
            case ast.List(elts=elements) | ast.Tuple(elts=elements):
                for own in elements:
                    self._inside(path, own)
            case ast.Attribute(value=own):
                self._inside(path, own)
            case ast.Name(id=name) if path:  # what was set in it
                for own_path, value in list(self.found.items()):
                    if own_path.startswith(f"{name}."):
                        self._set(path, own_path.removeprefix(f"{name}."), value)

    def _pass(self, path: str, name: object, value: ast.expr) -> None:
        if isinstance(name, str):
            self._inside(f"{path}.{name}" if path else name, value)
            self._set(path, name, self._value(value))

    def _value(self, node: ast.expr) -> object:
        """The value of an expression; a mark where it is not known."""
        match node:
            case ast.Call() if path := _path(node):
                return Called(path)
            case ast.Attribute() if path := _path(node):
                return path.removeprefix("torch.")
            case ast.List(elts=elements) | ast.Tuple(elts=elements):
                return [self._value(own) for own in elements]
            case ast.Dict():
                with suppress(ValueError, TypeError):
                    return ast.literal_eval(node)
                return None
        with suppress(ValueError, TypeError):
            return calculate(node, lambda name: self.names.get(name, mark(name)))
        return mark(ast.unparse(node)[:40])


def _path(node: ast.expr) -> str:
    """`a.b.c` of names and attributes, `a["b"]` likewise; of a call, what is called."""
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=name):
            before = _path(value)
            return f"{before}.{name}" if before else name
        case ast.Subscript(value=value, slice=ast.Constant(value=str(name))):
            return f"{_path(value)}.{name}"
        case ast.Call(func=function):
            return _path(function)
    return ""
