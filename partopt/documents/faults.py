"""What is wrong with plain data: types and constraints, repeated keys, control characters.

Every fault is a PartoptError placed at its path, such as `levels[1].bandwidth`.
"""

from __future__ import annotations

import functools
import json
import math
import re
import types
import typing
from collections.abc import Iterator
from typing import Any

import msgspec

from partopt.errors import PartoptError, did_you_mean
from partopt.printable import printable

FORMATS = "docs/formats.md describes the format"

# What a terminal obeys or hides: control characters, changes of direction, halves of a character.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
# The same in JSON, written as bytes or as an escape; it may also match what is harmless.
_CONTROL_IN_JSON = re.compile(
    rb"\\[bfnrt]|\\u00[0189]|\\u007[fF]|\\u20[26]|\\u[dD]|\x7f|\xc2[\x80-\x9f]"
    rb"|\xe2\x80[\xaa-\xae]|\xe2\x81[\xa6-\xa9]"
)


def check_option(option: str, value: object, expected: Any, hint: str) -> None:
    """Raise PartoptError where `value` is not of the type `expected`, constraints included."""
    for fault in _value_faults(value, expected, ""):
        raise PartoptError(
            f"`{option}={value}`: {fault.message}",
            hint,
            code="invalid-option",
            option=option,
            value=value,
        )


def find_faults(
    raw: object, expected: Any, path: str, ignore_unknown: bool = False
) -> Iterator[PartoptError]:
    """Every way in which plain data differs from the type `expected`, each error at its path."""
    bare = _without_constraints(expected)
    item = typing.get_args(bare)[0] if typing.get_origin(bare) is list else None
    if _is_struct(bare) and isinstance(raw, dict):
        inside = list(_struct_faults(raw, bare, path, ignore_unknown))
        yield from inside or _value_faults(known_part(raw, bare), bare, path)
    elif _is_struct(item) and isinstance(raw, list) and raw:
        for index, element in enumerate(raw):
            yield from find_faults(element, item, f"{path}[{index}]", ignore_unknown)
    else:
        yield from _value_faults(raw, expected, path)


def struct_faults(document: msgspec.Struct) -> Iterator[PartoptError]:
    """Violated types, constraints and text rules of a struct, however it was made.

    msgspec checks what it reads and not what a constructor is given.
    """
    try:
        content = msgspec.json.encode(document)  # NaN and infinity become null
        again = msgspec.json.decode(content, type=type(document))
        if again == document and not _CONTROL_IN_JSON.search(content):
            return
    except (msgspec.MsgspecError, TypeError, ValueError, RecursionError):
        pass
    raw = msgspec.to_builtins(document, str_keys=True, enc_hook=repr)
    yield from find_faults(raw, type(document), "")
    yield from leaf_faults(raw)


def content_faults(content: bytes, document: object = None) -> Iterator[PartoptError]:
    """Repeated keys and control characters in valid JSON, which was decoded to `document` if it is.

    That is quick where the document, written again, is the content.
    """
    try:
        yield from _repeated_keys(content, document)
        if _CONTROL_IN_JSON.search(content):
            yield from leaf_faults(msgspec.json.decode(content))
    except RecursionError:
        yield PartoptError("nested too deeply", FORMATS, code="malformed-document")


def leaf_faults(raw: object, path: str = "") -> Iterator[PartoptError]:
    """Control characters in any text, and numbers that are not finite.

    A `text` is a sentence and may have several lines; a name may not.
    """
    if isinstance(raw, dict):
        for key, value in raw.items():
            inner = printable(_join(path, str(key)))
            yield from _text_faults(str(key), inner)
            yield from leaf_faults(value, inner)
    elif isinstance(raw, list | tuple):
        for index, value in enumerate(raw):
            yield from leaf_faults(value, f"{path}[{index}]")
    elif isinstance(raw, str):
        yield from _text_faults(raw.replace("\n", "") if path.endswith(".text") else raw, path)
    elif isinstance(raw, float) and not math.isfinite(raw):
        message = f"{path}: {raw} is not a finite number"
        yield PartoptError(message, "JSON has no NaN or infinity", code="not-finite", path=path)


def known_part(raw: Any, expected: Any) -> Any:
    """`raw` without the keys that the struct `expected`, or a struct in it, does not have."""
    bare = _without_constraints(expected)
    if _is_struct(bare) and isinstance(raw, dict):
        hints = _hints(bare)
        return {key: known_part(value, hints[key]) for key, value in raw.items() if key in hints}
    if typing.get_origin(bare) is list:
        return [known_part(element, typing.get_args(bare)[0]) for element in raw]
    return raw


def plain(what: str) -> str:
    """A msgspec message in partopt's words: `expected a number, found text`."""
    what = what.replace("Object missing required field", "missing").replace("`", "")
    for word, words in (
        ("float", "a number"),
        ("int", "a whole number"),
        ("str", "text"),
        ("bool", "true or false"),
        ("array", "a list"),
    ):
        what = re.sub(rf"\b{word}\b", words, what)
    return what[:1].lower() + what[1:].replace(", got ", ", found ").replace("object", "a mapping")


class _Repeating(dict[str, Any]):
    """A JSON object in which keys are repeated."""

    repeated: tuple[str, ...] = ()


def _repeated_keys(content: bytes, document: object) -> Iterator[PartoptError]:
    if _is_written_back(content, document):
        return
    found: list[_Repeating] = []

    def build(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(built := dict(pairs)) == len(pairs):
            return built
        keys = [key for key, _ in pairs]
        repeating = _Repeating(built)
        repeating.repeated = tuple(key for key in built if keys.count(key) > 1)
        found.append(repeating)
        return repeating

    # numbers do not matter here: a huge whole number is slow to read, a float is not
    root = json.loads(content, object_pairs_hook=build, parse_int=float)
    if found:
        yield from _name_repeated(root, "")


def _is_written_back(content: bytes, document: object) -> bool:
    """Whether the values of the JSON, written again, are the same text: so no key is repeated."""
    try:
        compact = msgspec.json.format(content, indent=-1)
        if msgspec.json.encode(document) == compact:
            return True
        return msgspec.json.encode(msgspec.json.decode(content)) == compact
    except (msgspec.MsgspecError, RecursionError):
        return False


def _name_repeated(raw: object, path: str) -> Iterator[PartoptError]:
    if isinstance(raw, _Repeating):
        for key in raw.repeated:
            place = printable(_join(path, key))
            yield PartoptError(
                f"{place}: given twice", "keep one of the two", code="repeated-key", path=place
            )
    inside = raw.items() if isinstance(raw, dict) else ()
    for key, value in inside:
        yield from _name_repeated(value, _join(path, key))
    for index, value in enumerate(raw if isinstance(raw, list) else ()):
        yield from _name_repeated(value, f"{path}[{index}]")


def _text_faults(text: str, path: str) -> Iterator[PartoptError]:
    if found := _CONTROL.search(text):
        yield PartoptError(
            f"{path}: has the control character {found[0]!r}",
            "use printable characters alone",
            code="control-character",
            path=path,
        )


def _value_faults(raw: object, expected: Any, path: str) -> Iterator[PartoptError]:
    """The first fault of `raw` as a whole that checking its parts does not find."""
    try:
        msgspec.convert(raw, expected)
    except msgspec.ValidationError as error:
        what, _, inner = str(error).partition(" - at `$")
        place = f"{path}{inner.rstrip('`')}"
        message = f"{place}: {plain(what)}".removeprefix(": ")
        yield PartoptError(message, FORMATS, code="invalid-value", path=place)


def _struct_faults(
    raw: dict[Any, Any], expected: type[msgspec.Struct], path: str, ignore_unknown: bool
) -> Iterator[PartoptError]:
    hints = _hints(expected)
    fields = {field.encode_name: field for field in msgspec.structs.fields(expected)}
    for key in raw:
        if key not in fields and not ignore_unknown:
            place, hint = _join(path, str(key)), did_you_mean(str(key), fields)
            yield PartoptError(f"{place}: unknown key", hint, code="unknown-key", path=place)
    for key, field in fields.items():
        place = _join(path, key)
        if key in raw:
            yield from find_faults(raw[key], hints[field.name], place, ignore_unknown)
        elif field.required:
            yield PartoptError(f"{place}: missing", FORMATS, code="missing-key", path=place)


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


@functools.cache
def _hints(struct: type[msgspec.Struct]) -> dict[str, Any]:
    """The types of the fields of a struct, with their constraints."""
    return typing.get_type_hints(struct, include_extras=True)


def _is_struct(expected: Any) -> bool:
    return isinstance(expected, type) and issubclass(expected, msgspec.Struct)


def _without_constraints(expected: Any) -> Any:
    """The type inside `Annotated[type, ...]`, and the struct inside `Struct | None`."""
    if typing.get_origin(expected) is typing.Annotated:
        expected = typing.get_args(expected)[0]
    structs = [option for option in typing.get_args(expected) if _is_struct(option)]
    return (
        structs[0]
        if typing.get_origin(expected) in (typing.Union, types.UnionType) and structs
        else expected
    )
