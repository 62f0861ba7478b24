"""Values that are set in the text of a script, a program or a document, whose other words stay."""

from __future__ import annotations

import ast
import itertools
import json
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import yaml

from partopt.configurations.program import Expression
from partopt.configurations.settings import Settings

# comments and quotations of a script
_SCAN = re.compile(
    r"(?P<comment>^#[^\n]*|(?<=\s)#[^\n]*)|\\.|'[^']*'|(?P<quoted>\"(?:\\.|[^\"\\])*\")",
    re.S | re.M,
)
_WORD = r"(?:'[^'\n]*'|\$\(\([^\n]*?\)\)|\$\{[^}\n]*\}|(?!--)[^\s\"'\\;|&()]"
_IN_QUOTES, _BARE = rf"{_WORD})+", rf"{_WORD}|\"[^\"\n]*\")+"
_VARIABLE = re.compile(r"\"?\$(?:(\w+)|\{(\w+)\}|\{(\w+):?[-=](?P<default>[^{}]*)\})\"?")
_DECLARING = r"(?:(?:export|local|readonly|declare|typeset)[ \t]+(?:-\w+[ \t]+)*)?"
_TRIES = 20  # of places
_HEADER = re.compile(r"^[ \t]*\[([^\[\]\n]+)\][^\n]*$", re.M)
_KEY = re.compile(r"^[ \t]*([\w.-]+)[ \t]*=[ \t]*(\[[^\]]*\]|\"[^\"\n]*\"|'[^'\n]*'|[^#\n]*)", re.M)


class Edit(NamedTuple):
    """Letters of a text from `start` up to `stop`, and what comes in their place."""

    start: int
    stop: int
    text: str


class _Entry(NamedTuple):
    """A value in a text: its path, where it stands, and what one more beside it is written as."""

    path: str
    start: int
    stop: int
    line: int  # where one more may stand
    form: str = "\n{}: {}"  # its text, of a name and a value


def apply_edits(text: str, edits: Sequence[Edit]) -> str:
    """The text with edits made, of those that overlap the first."""
    parts, end = list[str](), 0
    for edit in sorted(dict.fromkeys(edits), key=lambda edit: edit.start):
        if edit.start >= end:
            parts += [text[end : edit.start], edit.text]
            end = edit.stop
    return "".join([*parts, text[end:]])


def find_edits(
    settings: Settings, name: str, value: object, beside: Sequence[str]
) -> Iterator[list[Edit]]:
    """Ways to give a setting a value in its text; the first ones change least of it.

    None takes it out. One that the text does not have is put next to the first of the settings
    `beside` that it has. Whether a way does it, reading the text again tells.
    """
    text = settings.text
    if settings.form == "script" and not text.lstrip().startswith(("{", "--- ")):
        yield from _edit_script(settings, name, value, beside)
    elif settings.form == "program":
        imports = [*_import(text, value)]
        ways = _edit_entries(text, name, repr(value), [*_fields(text)], beside)
        for edits in itertools.chain(ways, _add_statement(text, name, repr(value))):
            yield [*imports, *edits]
    else:
        toml = _HEADER.search(text) is not None
        entries = [*_keys(text)] if toml else [*_nodes(text)]
        if toml and value is None:  # which has no word for it
            found = [entry for entry in entries if _matches(entry.path, name)]
            yield [Edit(text.rfind("\n", 0, one.start) + 1, one.line + 1, "") for one in found]
            return
        yield from _edit_entries(text, name, json.dumps(value), entries, beside)
        section, dot, key = name.rpartition(".")
        if dot and not any(section in entry.path for entry in entries):
            form = "\n[{}]\n{} = {}\n" if toml else "{}:\n  {}: {}\n"
            end = "\n" * (not text.endswith("\n"))
            yield [Edit(len(text), len(text), end + form.format(section, key, json.dumps(value)))]


def _matches(path: str, name: str) -> bool:
    """Whether a path ends in a name, or is the end of it."""
    return f".{path}".endswith(f".{name}") or f".{name}".endswith(f".{path}")


# scripts


class _Place(NamedTuple):
    """A flag in a script, from `start` up to `stop`, its value from `value`; in double quotes."""

    start: int
    value: int
    stop: int
    quoted: bool


def _edit_script(
    settings: Settings, name: str, value: object, beside: Sequence[str]
) -> Iterator[list[Edit]]:
    """Through the variable that a flag has its value from, behind it, or as another flag."""
    text, said = settings.text, value not in (None, False)
    quoted = [found.span("quoted") for found in _SCAN.finditer(text) if found["quoted"]]
    plain = _SCAN.sub(lambda found: " " * len(found[0]) if found["comment"] else found[0], text)
    if name.isupper():
        begin = text.find("\n") + 1 if text.startswith("#!") else 0
        yield [*_assign(plain, name, value)] or [Edit(begin, begin, f"export {name}={value}\n")]
        return

    def places(flag: str) -> list[_Place]:
        return [*_places(plain, flag, settings.value(flag), quoted)]

    def write(place: _Place, flag: str = "") -> str:
        words = [str(word) for word in (value if isinstance(value, list) else [value])]
        words = [] if value is True else words if place.quoted else [*map(shlex.quote, words)]
        return " ".join([flag] * bool(flag) + words)

    found = places(name)
    if not said:
        yield [Edit(place.start, place.stop, "") for place in found]
        return
    tokens = [plain[place.value : place.stop] for place in found]
    if found and value is not True:
        variables = [_edit_variable(plain, token, value) for token in tokens]
        if all(variables):
            yield [edit for edits in variables if edits for edit in edits]
        flags = ["" if token else " " for token in tokens]
        pairs = zip(found, flags, strict=True)
        yield [Edit(place.value, place.stop, blank + write(place)) for place, blank in pairs]
    others = [path for other in beside for path in settings.values if _matches(path, other)]
    for place in itertools.chain.from_iterable(map(places, others)):
        written = plain[place.start : place.value].strip()
        spelled = f"--{name.replace('_', '-') if '-' in written.lstrip('-') else name}"
        hydra = f"++{name}={shlex.quote(str(value))}"  # which adds it, or sets what there is
        added = write(place, spelled) if written.startswith("--") else hydra
        yield [Edit(place.stop, place.stop, f" {added}")]


def _places(
    plain: str, name: str, value: object, quoted: Sequence[tuple[int, int]]
) -> Iterator[_Place]:
    """Where a flag stands, or the key of a JSON document that a script writes."""
    flag = re.escape(name).replace("_", "[-_]")
    times = 0 if value is True else len(value) if isinstance(value, list) else 1
    sign = r"(?:--|\+{0,2})" if "." in name else "--"  # or none, of Hydra
    for match in re.finditer(rf"[ \t]*(?<![\w.+-]){sign}{flag}(?![\w.-])", plain):
        inside = any(start < match.start() < stop for start, stop in quoted)
        word = _IN_QUOTES if inside else _BARE
        form = rf"(?:=|(?:[ \t]|\\\n)+){word}" if times else r"(?:(?:=|[ \t]+)(?i:true|false)\b)?"
        behind, begin = re.compile(form).match(plain, match.end()), match.end()
        if behind and times:
            begin += len(behind[0]) - len(behind[0].lstrip("= \t\\\n"))
            more = re.compile(rf"(?:[ \t]+{word}){{{times - 1}}}").match(plain, behind.end())
            yield _Place(match.start(), begin, more.end() if more else behind.end(), inside)
        else:
            yield _Place(match.start(), begin, behind.end() if behind else begin, inside)
    key = name.rpartition(".")[2]
    for match in re.finditer(rf"\"{key}\"[ \t]*:[ \t]*([^\s,}}]+)", plain) if "." in name else ():
        yield _Place(match.start(), match.start(1), match.end(), True)


def _edit_variable(plain: str, token: str, value: object, depth: int = 3) -> list[Edit] | None:
    """Edits of the one assignment of the variable that a word is; None where it is none."""
    found = _VARIABLE.fullmatch(token)
    name = found and (found[1] or found[2] or found[3])
    return [*_assign(plain, name, value, depth - 1)] or None if name and depth else None


def _assign(plain: str, name: str, value: object, depth: int = 0) -> Iterator[Edit]:
    """The edit of the one assignment of a variable; of its default, where it has one."""
    found = [*re.finditer(rf"^[ \t]*{_DECLARING}{name}=({_BARE})?", plain, re.M)]
    if len(found) != 1 or isinstance(value, list | bool):
        return
    start, stop = found[0].span(1) if found[0][1] else (found[0].end(), found[0].end())
    token = _VARIABLE.fullmatch(plain[start:stop])
    if token and token["default"] is not None:
        start, stop = start + token.start("default"), start + token.end("default")
    elif token and (further := _edit_variable(plain, plain[start:stop], value, depth)):
        yield from further
        return
    yield Edit(start, stop, shlex.quote(str(value)))


# documents and programs


def _edit_entries(
    text: str, name: str, written: str, entries: Sequence[_Entry], beside: Sequence[str]
) -> Iterator[list[Edit]]:
    """In one entry of the name, the last first, in all of them, or in one that is added."""
    found = [entry for entry in entries if _matches(entry.path, name)]
    if found:
        yield from ([Edit(entry.start, entry.stop, written)] for entry in found[::-1][:_TRIES])
        yield [Edit(entry.start, entry.stop, written) for entry in found]
        return
    section, _, key = name.rpartition(".")
    inside = [entry for entry in entries if _matches(entry.path.rpartition(".")[0], section)]
    near = [entry for other in beside for entry in entries if _matches(entry.path, other)]
    for entry in (inside if section else near)[:_TRIES]:
        as_there = key.replace("_", "-") if re.match(r"[\w.]*-", entry.path) else key
        yield [Edit(entry.line, entry.line, entry.form.format(as_there, written))]


def _nodes(text: str) -> Iterator[_Entry]:
    """The scalars and lists of a document of YAML or JSON."""

    def walk(node: Any, above: str) -> Iterator[_Entry]:
        for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
            path = f"{above}{key.value}"
            yield from walk(value, f"{path}.")
            start, stop = value.start_mark.index, value.end_mark.index
            if isinstance(value, yaml.MappingNode):
                continue
            if node.flow_style:
                quotes = '"' if key.style else ""
                yield _Entry(path, start, stop, stop, f", {quotes}{{}}{quotes}: {{}}")
            else:
                line = text.find("\n", stop - 1)
                form = (
                    f"\n{' ' * key.start_mark.column}{'--' * key.value.startswith('--')}{{}}: {{}}"
                )
                yield _Entry(path, start, stop, len(text) if line < 0 else line, form)

    with suppress(yaml.YAMLError):
        yield from walk(yaml.compose(text, Loader=yaml.SafeLoader), "")


def _keys(text: str) -> Iterator[_Entry]:
    """The values of a document of TOML."""
    headers = [*_HEADER.finditer(text)]
    for match in _KEY.finditer(text):
        sections = [header[1].strip() for header in headers if header.end() <= match.start()]
        path = ".".join([*sections[-1:], match[1]])
        line = text.find("\n", match.end())
        stop = match.start(2) + len(match[2].rstrip())
        yield _Entry(path, match.start(2), stop, len(text) if line < 0 else line, "\n{} = {}")


def _offsets(text: str) -> Callable[[int, int], int]:
    """What gives the place in a program of a line and a column, which counts bytes."""
    lines = text.splitlines(keepends=True)
    starts = [0, *itertools.accumulate(map(len, lines))]
    return lambda line, column: (
        starts[line - 1] + len(lines[line - 1].encode()[:column].decode(errors="replace"))
    )


def _fields(text: str) -> Iterator[_Entry]:
    """What a program assigns and passes by name, and the defaults of its parameters."""
    place = _offsets(text)

    def entry(path: str, value: ast.expr, form: str = ", {}={}", line: int = 0) -> _Entry:
        stop = place(value.end_lineno or 1, value.end_col_offset or 0)
        return _Entry(path, place(value.lineno, value.col_offset), stop, line or stop, form)

    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Assign(targets=[ast.Attribute() as target], value=value):
                path = ast.unparse(target)
                end = place(node.end_lineno or 1, node.end_col_offset or 0)
                form = f"\n{' ' * node.col_offset}{path.rpartition('.')[0]}.{{}} = {{}}"
                yield entry(path.partition(".")[2], value, form, end)
            case ast.Call(keywords=words):
                for word in words:
                    if isinstance(word.value, ast.Call):
                        for field in word.value.keywords:
                            yield entry(f"{word.arg}.{field.arg}", field.value)
                    yield entry(word.arg or "", word.value)
            case ast.FunctionDef(args=arguments):
                named = arguments.args[len(arguments.args) - len(arguments.defaults) :]
                pairs = [*zip(named, arguments.defaults, strict=True)]
                pairs += [
                    (argument, default)
                    for argument, default in zip(
                        arguments.kwonlyargs, arguments.kw_defaults, strict=True
                    )
                    if default
                ]
                yield from (entry(argument.arg, default) for argument, default in pairs)


def _import(text: str, value: object) -> Iterator[Edit]:
    """The import of an expression's name behind the others, where the program does not have it."""
    tree, name = ast.parse(text), str(value).partition(".")[0]
    imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    known = {alias.asname or alias.name for node in imports for alias in node.names}
    if isinstance(value, Expression) and value.module and name not in {*known, "None"}:
        last = imports[-1] if imports else None
        begin = _offsets(text)(last.end_lineno or 1, last.end_col_offset or 0) if last else 0
        line = f"from {value.module} import {name}"
        yield Edit(begin, begin, f"\n{line}" if last else f"{line}\n")


def _add_statement(text: str, name: str, written: str) -> Iterator[list[Edit]]:
    """Before the return of a name, the last first: a field of it."""
    place = _offsets(text)
    returns = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Return)]
    for node in sorted(returns, key=lambda node: -node.lineno):
        if isinstance(node.value, ast.Name):
            start = place(node.lineno, node.col_offset)
            line = f"{node.value.id}.{name} = {written}\n{' ' * node.col_offset}"
            yield [Edit(start, start, line)]
