"""Faults of one line, drawn at random lines of the package: what a hurried hand gets wrong.

A comparison or a sign is another one, a term, factor, condition, keyword argument or statement is
left out, a number or a bound is off by one, a default is its opposite, a rounding goes the other
way, `min` is `max`, `and` is `or`, forward is backward. Nothing is drawn in what only speaks or
types: docstrings, messages (texts, f-strings, errors that are raised), annotations, decorators,
imports, assertions of what cannot be. Nor are numbers that no test could call wrong: a module's
plain constants, which are tuned, and margins for rounding.
"""

from __future__ import annotations

import ast
import random
import tomllib
from collections.abc import Iterator
from copy import copy
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

EQUIVALENT = Path(__file__).with_name("equivalent_faults.toml")

OTHER_OPERATORS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Div,
}
OTHER_FUNCTIONS = {"min": "max", "max": "min", "any": "all", "all": "any", "round": "int"}
OTHER_ATTRIBUTES = {
    one: other
    for pair in [
        ("ceil", "floor"),
        ("minimum", "maximum"),
        ("forward_s", "backward_s"),
        ("start", "stop"),
        ("input_bytes", "gradient_bytes"),
        ("source", "target"),
    ]
    for one, other in [pair, pair[::-1]]
}
_COMPOUND = (ast.BinOp, ast.BoolOp, ast.Compare, ast.IfExp, ast.UnaryOp)
FACTORS = (ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.MatMult)
_WORDS_BESIDE = 4
_MARGIN = 1e-6  # floats below it allow for rounding
SILENT_KEYWORDS = {"strict", "code", "hint", "maxsize"}  # and those of which nothing depends


class Fault(NamedTuple):
    """A fault in a file of the package: what stood in its lines `before`, and `after`."""

    path: str
    line: int
    before: str
    after: str
    content: str  # the whole file with the fault

    @property
    def package(self) -> str:
        """The folder or file of the package that is at fault."""
        return self.path.split("/")[0].removesuffix(".py")

    @property
    def change(self) -> tuple[str, str, str]:
        """What a fault that changes nothing is listed by."""
        return self.path, self.before, self.after

    @property
    def place(self) -> str:
        """Where, and what is changed, with a few words on both sides of it."""
        texts = [self.before.split(), self.after.split()]
        first = max(0, _alike(*texts) - _WORDS_BESIDE)
        last = max(0, _alike(*([*reversed(text[first:])] for text in texts)) - _WORDS_BESIDE)
        before, after = (" ".join(text[first : len(text) - last]) for text in texts)
        return f"{self.path}:{self.line}  {before}  ->  {after}"


def _alike(one: list[str], other: list[str]) -> int:
    """How many words at the beginning are the same."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def packages_of(root: Path) -> list[str]:
    """The folders and files in which faults are drawn."""
    return sorted(
        {path.relative_to(root).parts[0].removesuffix(".py") for path in root.rglob("*.py")}
    )


def draw(root: Path, count: int, seed: int, packages: list[str]) -> list[Fault]:
    """`count` faults at lines of the package that are equally probable, one a line, by place.

    `packages` are the folders and files at fault, by default all.
    """
    lines: dict[tuple[str, int], list[Fault]] = {}
    for path in sorted(root.rglob("*.py")):
        inside = path.relative_to(root)
        if packages and inside.parts[0].removesuffix(".py") not in packages:
            continue
        for fault in faults_in(path.read_text(), inside.as_posix()):
            lines.setdefault((fault.path, fault.line), []).append(fault)
    chance = random.Random(seed)
    chosen = chance.sample(sorted(lines), min(count, len(lines)))
    return sorted(chance.choice(lines[line]) for line in chosen)


def equivalents() -> dict[tuple[str, str, str], str]:
    """Why faults that change nothing do so, by path, before and after."""
    entries = tomllib.loads(EQUIVALENT.read_text())["fault"]
    return {(entry["path"], entry["before"], entry["after"]): entry["why"] for entry in entries}


def faults_in(source: str, path: str) -> Iterator[Fault]:
    """All faults that are drawn in a file."""
    encoded = source.encode()
    starts = [0]
    for line in encoded.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for node in _code(ast.parse(source)):
        for part, other in _variants(node):
            first = starts[part.lineno - 1] + part.col_offset
            last = starts[part.end_lineno - 1] + part.end_col_offset
            text = ast.unparse(ast.fix_missing_locations(other))
            whole = (f"({text})" if isinstance(other, _COMPOUND) else text).encode()
            head = encoded[starts[part.lineno - 1] : first]
            tail = encoded[last : starts[part.end_lineno]]
            before, after = (
                " ".join((head + text + tail).decode().split())
                for text in (encoded[first:last], whole)
            )
            content = (encoded[:first] + whole + encoded[last:]).decode()
            yield Fault(path, part.lineno, before, after, content)


def _code(node: ast.AST) -> Iterator[Any]:
    """The expressions and statements in `node` that decide or compute."""
    for name, value in ast.iter_fields(node):
        if name in {"annotation", "returns", "decorator_list", "keywords"} and not isinstance(
            node, ast.Call
        ):
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or _speaks(child):
                continue
            if isinstance(child, ast.expr | ast.stmt):
                yield child
            yield from _code(child)


def _speaks(node: ast.AST) -> bool:
    """Whether a node only speaks to people, or to the checker of types."""
    match node:
        case ast.Raise() | ast.Assert() | ast.JoinedStr() | ast.Import() | ast.ImportFrom():
            return True
        case ast.Expr(ast.Constant(str())):
            return True
        case ast.Assign([ast.Name(name)], value) if name.strip("_").isupper() and _is_plain(value):
            return True
        case ast.Assign([ast.Name(name)], ast.Subscript() | ast.BinOp()) if _names_types(name):
            return True
        case ast.Assign([ast.Tuple()], ast.Tuple(values)):
            return all(isinstance(value, ast.Constant) for value in values)
        case ast.Call(ast.Name(name)) | ast.Call(ast.Attribute(attr=name)):
            return name in {"PartoptError", "cast", "TypeVar"}
        case ast.If(ast.Name("TYPE_CHECKING")):
            return True
        case ast.keyword(name):
            return name in SILENT_KEYWORDS
    return False


def _is_plain(value: ast.expr) -> bool:
    """Whether a value is a constant, or computed from two, such as 10**9."""
    parts = [value.left, value.right] if isinstance(value, ast.BinOp) else [value]
    return all(isinstance(part, ast.Constant) for part in parts)


def _names_types(name: str) -> bool:
    bare = name.strip("_")
    return bare[:1].isupper() and not bare.isupper()


def _variants(node: ast.AST) -> Iterator[tuple[Any, ast.AST]]:
    """Parts of `node`, or all of it, and what a hurried hand writes instead."""
    match node:
        case ast.Compare(ops=operators):
            for n, operator in enumerate(operators):
                if other := OTHER_OPERATORS.get(type(operator)):
                    yield node, _with(node, ops=[*operators[:n], other(), *operators[n + 1 :]])
        case ast.BoolOp(op, values):
            yield node, _with(node, op=OTHER_OPERATORS[type(op)]())
            for n in range(len(values)):
                rest = values[:n] + values[n + 1 :]
                yield node, rest[0] if len(rest) == 1 else _with(node, values=rest)
        case ast.UnaryOp(ast.Not(), value):
            yield node, value
        case ast.UnaryOp(ast.USub(), ast.BinOp(ast.UnaryOp(ast.USub(), top), ast.FloorDiv(), by)):
            yield node, ast.BinOp(top, ast.FloorDiv(), by)  # rounds up, and then down
        case ast.BinOp(left, op, right) if not _is_text(left) and not _is_text(right):
            if other := OTHER_OPERATORS.get(type(op)):
                yield node, _with(node, op=other())
            yield node, left
            if not isinstance(op, FACTORS) or isinstance(op, ast.Mult):
                yield node, right
        case ast.Constant(bool() as value):
            yield node, ast.Constant(not value)
        case ast.Constant(int() as value):
            yield node, ast.Constant(value + 1)
            if value > 0:
                yield node, ast.Constant(value - 1)
        case ast.Constant(float() as value) if not 0 < value < _MARGIN:
            yield node, ast.Constant(2 * value if value else 1.0)
        case ast.Call(ast.Name("range"), [*first, stop]):
            yield node, _with(node, args=[*first, ast.BinOp(stop, ast.Sub(), ast.Constant(1))])
        case ast.Call(keywords=keywords):
            for n, keyword in enumerate(keywords):
                if keyword.arg and not _speaks(keyword):
                    yield node, _with(node, keywords=keywords[:n] + keywords[n + 1 :])
        case ast.Name(name, ast.Load()) if name in OTHER_FUNCTIONS:
            yield node, ast.Name(OTHER_FUNCTIONS[name])
        case ast.Attribute(attr=name, ctx=ast.Load()) if name in OTHER_ATTRIBUTES:
            yield node, _with(node, attr=OTHER_ATTRIBUTES[name])
        case ast.Subscript(value, ast.Slice(), ast.Load()):
            yield node, value
        case ast.IfExp(_, chosen, otherwise):
            yield node, chosen
            yield node, otherwise
        case ast.If(test, [ast.Raise(), *_]):  # a mistake that is not refused
            yield test, ast.Constant(False)
        case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
            for n, each in enumerate(node.generators):
                if each.ifs:
                    others = [*node.generators[:n], _with(each, ifs=[]), *node.generators[n + 1 :]]
                    yield node, _with(node, generators=others)
        case ast.AugAssign(target, _, value):
            yield node, ast.Assign([target], value)
        case ast.Expr(ast.Call()):
            yield node, ast.Pass()


def _with(node: Any, **fields: Any) -> Any:
    other = copy(node)
    for name, value in fields.items():
        setattr(other, name, value)
    return other


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr | ast.List) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
