"""Pipelines in the programs and scripts of others, read without executing them."""

from __future__ import annotations

import ast
import itertools
import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import suppress

from partopt.errors import PartoptError
from partopt.trainers.parts import BLOCK, Part, count_blocks

_FOLLOWED = 8  # names that lead from one to the next until a value stands there
_NUMBERS = re.compile(r"[\[(]?\s*[0-9]{1,9}(\s*,\s*[0-9]{1,9})*\s*,?\s*[\])]?")


def find_value(text: str, name: str) -> object:
    """The value that `text`, a program in Python or a script, gives to `name`; None where to none.

    Of Python it is a literal, of a script a list of words: one behind `=`, else those up to the
    next flag or the end of the line. In scripts and files of settings a `_` of the name may be a
    `-`. Raises PartoptError where a program computes the value, or there are several.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
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


def find_stated(text: str, name: str) -> object:
    """As `find_value`; None also where the value is computed, or there are several.

    The only word of a script is that word.
    """
    with suppress(PartoptError):
        value = find_value(text, name)
        return value[0] if isinstance(value, list) and len(value) == 1 else value
    return None


def states(text: str, name: str) -> bool:
    """Whether `text` gives `name` a value, computed or not, other than None and an empty text."""
    try:
        return find_value(text, name) not in (None, "")
    except PartoptError:
        return True


def find_count(text: str, name: str) -> int | None:
    """The whole number of at least 1 that `text` gives to `name`, as `find_stated`; None if none.

    It has up to nine digits; variables and other words of a script do not count.
    """
    word = str(find_stated(text, name))
    return int(word) if re.fullmatch(r"[1-9][0-9]{0,8}", word) else None


def has_flag(text: str, name: str) -> bool:
    """Whether a script has the flag `--name` in a line that is no comment."""
    lines = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    return re.search(rf"(?<![\w-])--{name}(?![\w-])", lines) is not None


def read_literal(text: str) -> object:
    """The value of a text that is a literal of Python; None where it is none."""
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return None


def read_numbers(text: str, name: str, example: str) -> list[int]:
    """The numbers of a text that are all of it, or the value of `name` in it.

    Raises PartoptError for a text without numbers.
    """
    own = text.strip()
    value: object = own if _NUMBERS.fullmatch(own) else find_value(text, name)
    if isinstance(value, list) and all(isinstance(word, str) for word in value):
        value = " ".join(value)
    if isinstance(value, str) and _NUMBERS.fullmatch(value.strip()):
        value = [int(found) for found in re.findall(r"[0-9]+", value)]
    if isinstance(value, int):
        value = [value]
    if isinstance(value, list | tuple) and value and all(type(each) is int for each in value):
        return list(value)
    neither = f"neither numbers nor a text with {name}"
    raise malformed(f"{name} is {value!r}" if value is not None else neither, example)


def cuts_of_blocks(counts: Sequence[int], parts: Sequence[Part]) -> list[int]:
    """The cuts of stages with so many blocks each. PartoptError unless these are all blocks."""
    check_stages(counts, "blocks", count_blocks(parts))
    return [parts.index(Part(BLOCK, n)) for n in itertools.accumulate(counts[:-1])]


def check_stages(counts: Sequence[int], what: str, there: int) -> None:
    """Raise PartoptError for a stage without any, or unless they are all that are `there`."""
    for s, count in enumerate(counts):
        if count < 1:
            raise PartoptError(
                f"stage {s} has no {what}, and a stage of a plan has some",
                "leave it out, or give it some",
                code="empty-stage",
                stage=s,
            )
    check_count(sum(counts), what, there)


def check_count(said: int, what: str, there: int) -> None:
    """Raise PartoptError unless a layout has as many blocks or layers as are `there`."""
    if said != there:
        raise PartoptError(
            f"the layout has {said} {what}, the profile {there}",
            "give the profile of the same model",
            code="other-layers",
            layout=said,
            profile=there,
        )


def malformed(what: str, example: str) -> PartoptError:
    """The error of a text that is no layout."""
    return PartoptError(what, f"write {example}", code="malformed-layout")


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
    for match in re.finditer(rf"(?<![\w-])-*{spelled}[\"']?(=|[ \t]*[=:][ \t]*|[ \t]+)", whole):
        rest = whole[match.end() :].partition("\n")[0]
        try:
            words = shlex.split(rest, comments=True)
        except ValueError:  # a quotation that does not end
            continue
        ends = [i for i, word in enumerate(words) if i and word[:1] in "-&;|)"]
        until = 1 if match[1] == "=" else min(ends, default=len(words))
        if words:
            yield words[:until]
