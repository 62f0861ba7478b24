"""Values in the programs and scripts of others, read without executing them."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator

from partopt.errors import PartoptError

_FOLLOWED = 8  # names that lead from one to the next until a value stands there


def find_value(text: str, name: str) -> object:
    """The value that `text`, a program in Python or a script, gives to `name`; None where to none.

    Of Python it is a literal, of a script a list of words: one behind `=`, else those up to the
    next flag or the end of the line. In scripts and files of settings a `_` of the name may be a
    `-`. Raises PartoptError where a program computes the value, or there are several.
    """
    tree = _parse(text)
    if tree is None:
        found: list[object] = list(_words(text, name))
    else:
        found = [_literal(node, tree, name) for node in _assigned(tree, name)]
    different = [value for i, value in enumerate(found) if value not in found[:i]]
    if len(different) > 1:
        raise PartoptError(
            f"{name} has {len(different)} different values",
            "give the one that counts, in place of the whole text",
            code="several-layouts",
            name=name,
        )
    return different[0] if different else None


def read_literal(text: str) -> object:
    """The value of a text that is a literal of Python; None where it is none."""
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return None


def _parse(text: str) -> ast.Module | None:
    """The program, None where the text is none."""
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _assigned(tree: ast.Module, name: str) -> Iterator[ast.expr]:
    """The expressions, other than None, that are given to `name`."""
    for node in ast.walk(tree):
        for own, value in _given(node):
            nothing = isinstance(value, ast.Constant) and value.value is None
            if own == name and not nothing:
                yield value


def _given(node: ast.AST) -> Iterator[tuple[object, ast.expr]]:
    """What a piece of a program gives to variables, attributes, arguments and keys, by name."""
    match node:
        case ast.Assign(targets=targets, value=value):
            yield from ((_name(target), value) for target in targets)
        case ast.AnnAssign(target=target, value=ast.expr() as value):
            yield _name(target), value
        case ast.keyword(arg=str(name), value=value):
            yield name, value
        case ast.Dict(keys=keys, values=values):
            for key, value in zip(keys, values, strict=True):
                if isinstance(key, ast.Constant):
                    yield key.value, value


def _name(target: ast.expr) -> object:
    match target:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case ast.Subscript(slice=ast.Constant(value=name)):
            return name
    return None


def _literal(node: ast.expr, tree: ast.Module, name: str) -> object:
    """The value of an expression, which may be the name of one."""
    line = node.lineno
    for _ in range(_FOLLOWED):
        if isinstance(node, ast.Name):
            node = next(_assigned(tree, node.id), node)
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, RecursionError, MemoryError):
        raise PartoptError(
            f"line {line}: {name} is computed, and nothing is executed here",
            "print it, and give what is printed",
            code="computed-layout",
            name=name,
        ) from None


def _words(text: str, name: str) -> Iterator[list[str]]:
    """The words that a script gives to `name`, at each place."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    whole = re.sub(r"\\\n", " ", "\n".join(lines))
    spelled = re.escape(name).replace("_", "[-_]")
    for match in re.finditer(rf"(?<![\w])-*{spelled}[\"']?(=|[ \t]*[=:][ \t]*|[ \t]+)", whole):
        rest = whole[match.end() :].partition("\n")[0]
        try:
            words = shlex.split(rest, comments=True)
        except ValueError:  # a quotation that does not end
            continue
        ends = [i for i, word in enumerate(words) if i and word[:1] in "-&;|)"]
        until = 1 if match[1] == "=" else min(ends, default=len(words))
        if words:
            yield words[:until]
