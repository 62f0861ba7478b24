"""What the scripts, programs and configurations of trainers set, read without executing them.

Four forms end in one: the words of flags of a shell script, what a Python program assigns and
passes, and the entries of YAML, TOML and JSON are values by path, `training.seq_len`.
"""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from partopt.configurations.marks import is_unset, mark, unknown_names
from partopt.configurations.program import Program, parse_program
from partopt.configurations.shell import read_script
from partopt.configurations.shell_values import flag_words
from partopt.errors import PartoptError

Form = Literal["script", "program", "document"]

# in every text that gives something a value, or is of bash
_NAMING = re.compile(r"[=:]|--\w|\bimport\b|(?m:^#!|^\s*(if|for|while|until|case)\s)")
_WHOLE = re.compile(r"[+-]?[0-9](_?[0-9]){0,14}")
_WORDS = {"true": True, "false": False, "none": None, "null": None, "": None}
_FEW = 3  # flags of a command that trains
_LONGEST = 200_000  # letters of a text
_MOST = 100_000  # values of a document
_LARGE = 10**12  # of a count
_DEEP = 40  # of its values in each other
# what people write in JSON, beside strings: comments, and commas before what closes
_COMMENTS = re.compile(r"(\"(?:\\.|[^\"\\])*\")|//[^\n]*|/\*.*?\*/", re.S)
_COMMAS = re.compile(r"(\"(?:\\.|[^\"\\])*\")|,(?=\s*[}\]])")
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the same, in C
_REFERENCE = re.compile(r"\$\{([^${}]*)\}")
_COMPUTED: dict[str, Callable[[list[Any]], Any]] = {
    "sum": sum,
    "add": sum,
    "multiply": math.prod,
    "divide": lambda numbers: numbers[0] / numbers[1],
    "int_div": lambda numbers: numbers[0] // numbers[1],
    "subtract": lambda numbers: numbers[0] - numbers[1],
}
# keys under which a document names others that it is made from
_OTHERS = ("extends", "defaults", "include", "includes", "config", "base_config", "model", "_base_")
_FILE = re.compile(r"\S+\.(ya?ml|json|toml|py)")


class Settings:
    """Values by path, of which the last counts; a path is found by how it ends.

    A value that depends on something the text does not have is marked with the name of that. What
    is asked for and missing is noted in `faults`, what is taken otherwise than it says in `notes`,
    names that are asked for in `asked`. `unread` are the files and functions that may set more than
    is read, and `variables` those of a script, which are no flags. `synonyms` are other names of a
    setting, for `find` and what asks it; `written` are names as the text has them, where a trainer
    has its words for settings of another. Its trainer `lacks` settings that newer ones have.
    `replaced` are values that options have in place of the text's, None where these need none.
    """

    def __init__(
        self,
        values: Mapping[str, object],
        form: Form,
        unread: Sequence[str] = (),
        variables: Sequence[str] = (),
        text: str = "",
    ) -> None:
        self.values, self.form, self.text = dict(values), form, text
        self.faults, self.notes, self.asked = list[PartoptError](), list[str](), set[str]()
        self.unread, self.variables = list(dict.fromkeys(unread)), frozenset(variables)
        self.synonyms: Mapping[str, Sequence[str]] = {}
        self.written: Mapping[str, str] = {}
        self.lacks = frozenset[str]()
        self.replaced: Mapping[str, object] = {}
        self._found: dict[str, object] = {}
        for path, value in self.values.items():
            parts = path.split(".")
            for i in range(len(parts)):
                self._found[".".join(parts[i:])] = value

    def translate(self, values: Mapping[str, object], written: Mapping[str, str]) -> Settings:
        """The settings of the text in the words of another trainer; faults and notes are shared."""
        other = Settings(values, self.form, self.unread, [*self.variables], self.text)
        other.faults, other.notes, other.written = self.faults, self.notes, written
        other.replaced = self.replaced
        return other

    def find(self, *names: str) -> object:
        """The value of the first of the names that has one; None where none has.

        One that is not known is a fault, and None.
        """
        name, value = self._first(names)
        if isinstance(value, str) and (unknown := unknown_names(value)):
            self._refuse_unknown(name, unknown)
            return None
        return value

    def value(self, name: str) -> object:
        """The value of a name, or the mark of one that is not known; None where it has none."""
        self.asked.add(name.rpartition(".")[2])
        return self.replaced[name] if name in self.replaced else self._found.get(name)

    def known(self, name: str) -> object:
        """The value of a name; None where it has none, or none that is known."""
        _, value = self._first([name])
        return None if isinstance(value, str) and unknown_names(value) else value

    def _first(self, names: Sequence[str]) -> tuple[str, object]:
        """The first of the names and their synonyms that is replaced or has a value, with that."""
        named = [other for name in names for other in (name, *self.synonyms.get(name, ()))]
        values = [(name, self.value(name)) for name in named]
        said = (one for one in values if one[0] in self.replaced or one[1] is not None)
        return next(said, (names[0], None))

    def states(self, name: str) -> bool:
        """Whether the text gives the name a value, be it none."""
        return name in self._found

    def has(self, *names: str, default: bool = False) -> bool:
        """Whether one of the names has a value that is not false, zero, none or an empty text.

        Where none has a value it is as by `default`. Behind a flag alone a variable that is set
        nowhere is nothing, as in bash.
        """
        if any(is_unset(str(self.value(name) or "")) for name in names):
            return True
        value = self.find(*names)
        return default if value is None else bool(value) and value != "none"

    def count(self, *names: str, default: int | None = None) -> int | None:
        """The whole number of one of the names, zero where that is the default.

        A fault where it is none, or is missing.
        """
        number = self.number(*names, least=int(default != 0))
        if default is None and self._first(names)[1] is None:
            self.refuse_missing(names[0])
        return default if number is None else number

    def number(self, *names: str, least: int = 1) -> int | None:
        """The whole number of one of the names, None where none has one.

        A fault where it is another value, or less.
        """
        value = self.find(*names)
        if value is None:
            return None
        number = value if isinstance(value, int) and not isinstance(value, bool) else -1
        if least <= number < _LARGE:
            return number
        kind = "positive" if number == 0 else "plausible" if number > 0 else "whole"
        what = f"{self.show(names[0])}: {str(value)!r:.60} is not a {kind} number"
        self.refuse(what, "give a number", "invalid-value", path=names[0])
        return None

    def words(self, name: str) -> list[str]:
        """The words of a value: a list's, or those that blanks and commas part in a text."""
        value = self.find(name)
        words = value if isinstance(value, list) else re.split(r"[ ,]+", str(value or ""))
        return [str(word) for word in words if word != ""]

    def refuse(self, what: str, hint: str, code: str, **where: Any) -> None:
        """Note a fault, once."""
        if what not in [fault.message for fault in self.faults]:
            self.faults.append(PartoptError(what, hint, code=code, **where))

    def check(self) -> None:
        """Raise a PartoptError with all faults, if there are any."""
        if self.faults:
            raise PartoptError.together(self.faults)

    def refuse_missing(self, name: str, why: str = "") -> None:
        """Note that a value is needed that the text does not have."""
        what = f"{self.show(name)}: {why or 'the configuration does not say it'}"
        if self.unread and not why:
            what += f"; {', '.join(self.unread[:2])} may, which is not read"
        hint = f"give it: `arguments={self.written.get(name, name)}=N`"
        self.refuse(what, hint, "missing-setting", path=name)

    def note(self, name: str, what: str) -> None:
        """Note how the value of a name is taken."""
        self.notes.append(f"{self.show(name)}: {what}")

    def show(self, name: str) -> str:
        """A name as the text writes it."""
        name = self.written.get(name, name)
        is_flag = self.form == "script" and name not in self.variables
        if not is_flag or ("." in name and f"--{name}" not in self.text):  # of Hydra
            return name
        underscored = re.search(r"--[a-z]+_\w", self.text) and not re.search(
            r"--[a-z]+-\w", self.text
        )
        as_it_is = underscored or f"--{name}" in self.text
        return f"--{name if as_it_is else name.replace('_', '-')}"

    def _refuse_unknown(self, name: str, unknown: Sequence[str]) -> None:
        variables = ", ".join(f"${name}" if name.isdecimal() else name for name in unknown)
        given = unknown[0] if re.fullmatch(r"\w+", unknown[0]) else self.written.get(name, name)
        hint = f"give it: `arguments={given}=VALUE`"
        what = f"{self.show(name)}: depends on {variables}, which the text does not say"
        self.refuse(what, hint, "unknown-variable", path=name)


def read_settings(
    text: str,
    given: Mapping[str, str] | None = None,
    function: str | None = None,
    folder: Path | None = None,
) -> Settings:
    """What a text sets: JSON, TOML, a program in Python, YAML or a shell script.

    `given` are values of variables that the text does not have, and of settings, which come before
    its own; `function` is the one of a program that makes the configuration, `folder` where files
    lie that a script sources. Raises PartoptError where a program has several and none is named.
    """
    given = dict(given or {})
    names = _NAMING.search(text) is not None
    if names and len(text) > _LONGEST:
        what = f"a text of {len(text):,} letters is too long: no configuration has so many"
        raise PartoptError(what, "give the configuration alone", code="malformed-script")
    try:
        read = _read(text, given, function, folder) if names else _Read({}, "script")
    except RecursionError:
        what = "values or expressions lie too deep in each other"
        hint = "give the configuration alone"
        raise PartoptError(what, hint, code="malformed-script") from None
    added = {name.replace("-", "_"): convert(value) for name, value in given.items()}
    values = {name: value for name, value in read.values.items() if name not in added}
    return Settings(values | added, read.form, read.unread, read.variables, text)


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


class _Document:
    """The entries of a document by path, with what they refer to."""

    def __init__(self, parsed: Mapping[Any, object], given: Mapping[str, str]) -> None:
        self.given, self.unread, self.count = given, list[str](), 0
        self.flags = 0  # keys that are flags
        self.values = dict(self.flatten(parsed, ""))
        for path, value in self.values.items():
            if isinstance(value, str) and "${" in value:
                self.resolve(path, 0)

    def flatten(self, parsed: Mapping[Any, object], before: str) -> Iterator[tuple[str, object]]:
        """Entries by path."""
        for key, value in parsed.items():
            self.flags += str(key).startswith("--")
            path = f"{before}{str(key).removeprefix('--')}".replace("-", "_")
            self.count += _size(value) if isinstance(value, list) else 1
            if self.count > _MOST or path.count(".") > _DEEP:
                what = f"{path[:40]}: the document has too many values, or too deep in each other"
                raise PartoptError(what, "write it out", code="malformed-script")
            if key in _OTHERS:
                self.unread += _files(value)
            if isinstance(value, str) and "${" not in value:
                value = mark(path) if value == "???" else convert(value)
            yield path, value
            if isinstance(value, dict):
                yield from self.flatten(value, f"{path}.")

    def resolve(self, path: str, depth: int) -> object:
        """The value at a path, with what its references give in their place."""
        value = self.values[path]
        if not isinstance(value, str):
            return value
        while found := _REFERENCE.search(value):
            self.values[path] = mark(value)  # for one that refers to itself
            inside = self.refer(found[1].strip(), path, depth + 1)
            if found[0] == value:
                self.values[path] = convert(inside) if isinstance(inside, str) else inside
                return self.values[path]
            value = value[: found.start()] + str(inside) + value[found.end() :]
            if len(value) > 1000:
                value = mark(path)
        self.values[path] = convert(value)
        return self.values[path]

    def refer(self, inside: str, path: str, depth: int) -> object:
        """What a reference gives: a value, one computed, or one of the environment."""
        name, colon, rest = inside.partition(":")
        if name in _COMPUTED and colon:
            words = [convert(word) for word in rest.split(",")]
            with suppress(TypeError, ValueError, ArithmeticError, IndexError):
                return _COMPUTED[name](words)
            return "".join(map(mark, unknown_names(rest))) or mark(inside)
        if name == "oc.env":
            name, colon, rest = rest.partition(",")
        if colon or name in self.given:
            return self.given.get(name) or rest.strip()
        dots = len(name) - len(name.lstrip("."))
        parents = path.split(".")[: -dots or None]
        target = ".".join([*parents, name[dots:]]) if dots else name
        if target not in self.values:  # a file that stands for its part of a whole
            target = target.partition(".")[2]
        known = target in self.values and depth < _DEEP
        return self.resolve(target, depth) if known else mark(name[dots:])


def _size(values: list[Any]) -> int:
    """How many values a list has, those in its lists and entries, too; not much more than most."""
    count, rest = 0, [values]
    while rest and count <= _MOST:
        value: Any = rest.pop()
        count += 1
        if isinstance(value, list | dict):
            count += len(value)
            rest += value.values() if isinstance(value, dict) else value
    return count


def _files(value: object) -> Iterator[str]:
    """The names of files in a value, or of the parts that `defaults` lists."""
    if isinstance(value, list):
        for element in value[:20]:
            pairs = element.items() if isinstance(element, dict) else [("", element)]
            names = (f"{key}/{name}".strip("/") for key, name in pairs)
            yield from (name for name in names if name not in ("_self_", "None"))
    elif isinstance(value, str) and _FILE.fullmatch(value):
        yield value


def _parse_yaml(text: str) -> object:
    """What YAML says. PartoptError where it lies too deep in each other, or has too many values."""
    sizes = dict[str | None, int]()  # of what has a name, by it
    open_ = list[tuple[str | None, int]]([(None, 0)])
    for event in yaml.parse(text, Loader=_LOADER):
        size = 0
        if isinstance(event, yaml.CollectionStartEvent):
            open_.append((event.anchor, 1))
        elif isinstance(event, yaml.CollectionEndEvent):
            name, size = open_.pop()
            sizes[name] = size
        elif isinstance(event, yaml.AliasEvent):
            size = sizes.get(event.anchor, 1)
        elif isinstance(event, yaml.ScalarEvent):
            size = 1
        open_[-1] = open_[-1][0], open_[-1][1] + size
        if open_[-1][1] > _MOST or len(open_) > 2 * _DEEP:
            what = "the document has too many values, or too deep in each other"
            raise PartoptError(what, "write it out", code="malformed-script")
    return yaml.load(text, Loader=_LOADER)


def _parse_toml(text: str) -> object:
    """What TOML says. A ValueError where a key has too many parts."""
    if any(line.partition("=")[0].count(".") > _DEEP for line in text.splitlines()):
        raise ValueError("too deep")
    return tomllib.loads(text)


def _parse_json(text: str) -> object:
    """What JSON says, with comments and commas before what closes."""
    plain = _COMMENTS.sub(lambda found: found[1] or "", text)
    return json.loads(_COMMAS.sub(lambda found: found[1] or "", plain))


def _parse(text: str, given: Mapping[str, str], *forms: Callable[[str], object]) -> _Read | None:
    """What a text says in the first of the forms that it has; None where it has none."""
    for form in forms:
        with suppress(ValueError, yaml.YAMLError, RecursionError):
            parsed = form(text)
            if isinstance(parsed, dict):
                found = _Document(parsed, given)
                script = found.flags > len(found.values) // 2
                return _Read(found.values, "script" if script else "document", found.unread)
    return None


@dataclass
class _Read:
    """What is read of a text, in the words of `Settings`."""

    values: dict[str, object]
    form: Form
    unread: list[str] = field(default_factory=list)
    variables: Sequence[str] = ()


def _read(text: str, given: Mapping[str, str], function: str | None, folder: Path | None) -> _Read:
    if text.startswith("#!"):  # though assignments alone are TOML, too
        return _read_script(text, given, folder)
    document = _parse(text, given, json.loads, _parse_toml)
    if document is None:
        if (tree := parse_program(text)) is not None:
            program = Program(tree, {name: convert(value) for name, value in given.items()})
            return _Read(program.read(function), "program", program.unread)
        document = _parse(text, given, _parse_json, _parse_yaml)
    return document or _read_script(text, given, folder)


def _read_script(text: str, given: Mapping[str, str], folder: Path | None) -> _Read:
    """Variables, the entries of texts in JSON, and flags: of the command that has most, at last.

    Where no command has flags they are those in the variables.
    """
    script = read_script(text, given, folder)
    found: dict[str, object] = {name: convert(value) for name, value in script.variables.items()}
    unread = list(script.unread)
    for written in script.texts:
        document = _parse(written, given, _parse_json)
        found |= document.values if document else {}
    commands = sorted(map(flag_words, script.commands), key=len)
    if not commands or len(commands[-1]) < _FEW:
        words = [word for value in script.variables.values() for word in value.split()]
        commands.append(flag_words(words))
    names = dict.fromkeys(flag.replace("-", "_") for flags in commands for flag in flags)
    for flag, words in commands[-1].items():
        if "config" in flag and words and words[0] not in script.written:
            unread += [word for word in words[:1] if _FILE.fullmatch(word)]
    for flags in commands:
        for flag, words in flags.items():
            value: object = list(words) if len(words) > 1 else True
            found[flag.replace("-", "_")] = convert(words[0]) if len(words) == 1 else value
    return _Read(found, "script", unread, [name for name in script.variables if name not in names])
