"""Documents as structs: strict types, versions, faults that name the place, deterministic bytes.

A JSON document is a frozen msgspec struct whose first field is its schema, `partopt.<name>/<major>`
or `partopt.<name>/<major>.<minor>`. Unknown fields of a newer minor version are ignored; those of
the version that this partopt knows are refused, with the nearest known name.
"""

from __future__ import annotations

import functools
import re
import types
import typing
from collections.abc import Iterable, Iterator
from typing import Any, Self, TypeVar

import msgspec

from partopt.documents.files import read_bytes, write_bytes
from partopt.errors import PartoptError, did_you_mean

Struct = TypeVar("Struct", bound=msgspec.Struct)


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of every struct in a file: immutable, and strict about its keys."""


class Note(Part, frozen=True, kw_only=True):
    """Something to know about a result: a `code` for programs, the text, and what it is about."""

    code: str
    text: str
    fields: dict[str, Any] = {}


class Document(Part, frozen=True, kw_only=True):
    """Base of every struct that is a file of its own. Its first field is its schema."""

    @classmethod
    def load(cls, path: str) -> Self:
        """Read the document in the file `path` (`-` is standard input).

        Raises PartoptError with every fault found.
        """
        return cls.parse(read_bytes(path), path)

    @classmethod
    def parse(cls, content: bytes, where: str = "document") -> Self:
        """The document in `content`, its types and its meaning checked; `where` names it in
        errors.
        """
        document = decode(content, cls, where)
        refuse(document.faults(), where)
        return document

    def save(self, path: str, force: bool = False) -> None:
        """Check the document and write it to `path`, whole or not at all; over a file only with
        `force`.
        """
        refuse(self.faults(), path)
        write_bytes(path, encode(self), force)

    def faults(self) -> Iterator[PartoptError]:
        """What types cannot say of the document and is wrong with it."""
        yield from ()


class _Head(msgspec.Struct):
    """What every document begins with."""

    schema: str | None = None


_FORMATS = "docs/formats.md describes the format, partopt schema prints it"
_SCHEMA = re.compile(r"partopt\.(?P<name>[a-z]+)/(?P<major>[0-9]+)(?:\.(?P<minor>[0-9]+))?")


def refuse(faults: Iterable[PartoptError], where: str) -> None:
    """Raise all of `faults` at once, placed at `where`; nothing where there are none."""
    found = [fault.at(where) for fault in faults]
    if found:
        raise PartoptError.together(found)


def encode(document: msgspec.Struct) -> bytes:
    """Indented JSON in the order of the fields, ending in a newline: the same document gives the
    same bytes.
    """
    return msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n"


def decode(content: bytes, expected: type[Struct], where: str) -> Struct:
    """The document in `content`, or a PartoptError that names `where` and the path of every fault
    found.
    """
    name = _schema_name(expected)
    try:
        if msgspec.json.decode(content, type=_Head).schema == name:
            return msgspec.json.decode(content, type=expected)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass
    return _decode_or_explain(content, expected, name, where)


def _decode_or_explain(content: bytes, expected: type[Struct], name: str, where: str) -> Struct:
    """The slow way in, which knows the place of every fault and what a newer minor version may
    add.
    """
    try:
        raw = msgspec.json.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _malformed(content, str(error), name).at(where) from None
    newer = _check_schema(raw, name, where)
    refuse(find_faults(raw, expected, "", ignore_unknown=newer), where)
    return msgspec.convert(_known_part(raw, expected), expected)


def find_faults(
    raw: object, expected: Any, path: str, ignore_unknown: bool = False
) -> Iterator[PartoptError]:
    """Every way in which plain data differs from the type `expected`, each error placed at its
    path.
    """
    bare = _without_constraints(expected)
    item = typing.get_args(bare)[0] if typing.get_origin(bare) is list else None
    if _is_struct(bare) and isinstance(raw, dict):
        inside = list(_struct_faults(raw, bare, path, ignore_unknown))
        yield from inside or _value_faults(_known_part(raw, bare), bare, path)
    elif _is_struct(item) and isinstance(raw, list) and raw:
        for index, element in enumerate(raw):
            yield from find_faults(element, item, f"{path}[{index}]", ignore_unknown)
    else:
        yield from _value_faults(raw, expected, path)


def _value_faults(raw: object, expected: Any, path: str) -> Iterator[PartoptError]:
    """The first way in which `raw` as a whole differs from `expected`: what the types of its parts
    cannot say is said here.
    """
    try:
        msgspec.convert(raw, expected)
    except msgspec.ValidationError as error:
        what, _, inner = str(error).partition(" - at `$")
        yield PartoptError(
            f"{path}{inner.rstrip('`')}: {_plain(what)}".removeprefix(": "), _FORMATS
        )


def _known_part(raw: Any, expected: Any) -> Any:
    """`raw` without the keys that the struct `expected`, or a struct in it, does not have."""
    bare = _without_constraints(expected)
    if _is_struct(bare) and isinstance(raw, dict):
        hints = _hints(bare)
        return {key: _known_part(value, hints[key]) for key, value in raw.items() if key in hints}
    if typing.get_origin(bare) is list:
        return [_known_part(element, typing.get_args(bare)[0]) for element in raw]
    return raw


def _struct_faults(
    raw: dict[Any, Any], expected: type[msgspec.Struct], path: str, ignore_unknown: bool
) -> Iterator[PartoptError]:
    hints = _hints(expected)
    fields = {field.encode_name: field for field in msgspec.structs.fields(expected)}
    prefix = f"{path}." if path else ""
    for key in raw:
        if key not in fields and not ignore_unknown:
            yield PartoptError(f"{prefix}{key}: unknown key", did_you_mean(str(key), fields))
    for key, field in fields.items():
        if key in raw:
            yield from find_faults(raw[key], hints[field.name], prefix + key, ignore_unknown)
        elif field.required:
            yield PartoptError(f"{prefix}{key}: missing", _FORMATS)


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


def _schema_name(expected: type[msgspec.Struct]) -> str:
    """The current schema of a document type: the default of its first field."""
    return str(msgspec.structs.fields(expected)[0].default)


def _check_schema(raw: object, known: str, where: str) -> bool:
    """Whether `raw` is of a newer minor version than `known`; PartoptError where it is not a
    document of that kind at all.
    """
    found = raw.get("schema") if isinstance(raw, dict) else None
    kind = known.split("/")[0].removeprefix("partopt.")
    if not isinstance(found, str):
        raise PartoptError(
            f'{where}: has no "schema": not a partopt {kind}',
            f'a {kind} begins with {{"schema": "{known}"',
        )
    match, own = _SCHEMA.fullmatch(found), _SCHEMA.fullmatch(known)
    assert own is not None
    if match is None or match["name"] != kind:
        raise PartoptError(
            f'{where}: schema: "{found}" is not a partopt {kind}',
            f'a file with "schema": "{known}" is expected here',
        )
    if match["major"] != own["major"]:
        raise PartoptError(
            f"{where}: schema: version {match['major']} of {kind} is not known",
            f'this partopt reads "{known}"',
        )
    return int(match["minor"] or 0) > int(own["minor"] or 0)


def _malformed(content: bytes, reason: str, schema: str) -> PartoptError:
    """Say where JSON stops being JSON, as line and column."""
    kind = schema.split("/")[0].removeprefix("partopt.")
    if "recursion" in reason:
        return PartoptError(
            "not JSON that partopt writes: nested too deeply", f"a partopt {kind} is expected here"
        )
    if not content.strip():
        return PartoptError("the file is empty", f"a partopt {kind} is expected here")
    offset = re.search(r"byte (\d+)", reason)
    if offset is None:
        return PartoptError(
            f"not JSON: {_plain(reason.partition(' - at `$')[0])}",
            "is the file whole? write it anew",
        )
    before = content[: int(offset[1])]
    line, column = before.count(b"\n") + 1, len(before) - before.rfind(b"\n")
    what = reason.split(" (byte")[0].removeprefix("JSON is malformed: ")
    return PartoptError(
        f"line {line}, column {column}: not JSON: {what}",
        "JSON knows no NaN, Infinity, comments or trailing commas",
    )


def _plain(what: str) -> str:
    """A msgspec message in partopt's words: `expected a number, found text`."""
    what = what.replace("Object missing required field", "missing").replace("`", "")
    for word, plain in (
        ("float", "a number"),
        ("int", "a whole number"),
        ("str", "text"),
        ("bool", "true or false"),
        ("array", "a list"),
    ):
        what = re.sub(rf"\b{word}\b", plain, what)
    return what[:1].lower() + what[1:].replace(", got ", ", found ").replace("object", "a mapping")
