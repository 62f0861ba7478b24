"""Documents as structs: strict types, versions, deterministic bytes.

A JSON document is a frozen msgspec struct whose first field is its schema, `partopt.<name>/<major>`
or `partopt.<name>/<major>.<minor>`. Unknown fields of a newer minor version are ignored; those of
the version that this partopt knows are refused, with the nearest known name.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator
from typing import Any, Self, TypeVar

import msgspec

from partopt.documents.faults import (
    content_faults,
    find_faults,
    known_part,
    plain,
    struct_faults,
)
from partopt.documents.files import PathLike, read_bytes, write_bytes
from partopt.errors import PartoptError

Struct = TypeVar("Struct", bound=msgspec.Struct)


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of every struct in a file: immutable, and strict about its keys."""

    def faults(self) -> Iterator[PartoptError]:
        """Everything that is wrong with it: types and constraints, then inconsistencies.

        Inconsistencies are looked for only where types and constraints hold. What is read from a
        file is checked when it is read; what is made in code is checked here.
        """
        found = list(struct_faults(self))
        yield from found or self.inconsistencies()

    def inconsistencies(self) -> Iterator[PartoptError]:
        """What is wrong with it although every value has the right type."""
        yield from ()


class Note(Part, frozen=True, kw_only=True):
    """Something to know about a result: a `code` for programs, the text, and what it is about.

    `fields["known"]` is true where somebody looked into it: it is no question any more.
    """

    code: str
    text: str
    fields: dict[str, Any] = {}

    @property
    def known(self) -> bool:
        """Whether somebody looked into it."""
        return self.fields.get("known") is True


class Document(Part, frozen=True, kw_only=True):
    """Base of every struct that is a file of its own. Its first field is its schema."""

    @classmethod
    def load(cls, path: PathLike) -> Self:
        """Read the document in the file `path` (`-` is standard input).

        Raises PartoptError with every fault found.
        """
        return cls.parse(read_bytes(path), os.fspath(path))

    @classmethod
    def parse(cls, content: bytes, where: str = "document") -> Self:
        """The document in `content`, its types and its meaning checked.

        `where` names it in errors.
        """
        document = decode(content, cls, where)
        refuse(document.inconsistencies(), where)
        return document

    def save(self, path: PathLike, force: bool = False) -> None:
        """Check the document and write it to `path`, whole or not at all.

        An existing file is replaced only with `force`.
        """
        refuse(self.faults(), os.fspath(path))
        write_bytes(path, encode(self), force)


class _Head(msgspec.Struct):
    """What every document begins with."""

    schema: str | None = None


_NOT_ASCII = re.compile("[^\x00-\x7e]")
_SCHEMA = re.compile(r"partopt\.(?P<name>[a-z]+)/(?P<major>[0-9]+)(?:\.(?P<minor>[0-9]+))?")


def refuse(faults: Iterable[PartoptError], where: str) -> None:
    """Raise all of `faults` of a file at once, placed at `where`; return where there are none."""
    found = [fault.at(where) for fault in faults]
    if found:
        raise PartoptError.together(found, file=where)


def encode(document: msgspec.Struct | dict[str, Any]) -> bytes:
    """Indented JSON in the order of the fields, ending in a newline.

    The same document gives the same bytes. What a terminal obeys or hides is escaped.
    """
    content = msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n"
    if content.isascii() and b"\x7f" not in content:
        return content
    return _NOT_ASCII.sub(_escape_hidden, content.decode()).encode()


def _escape_hidden(match: re.Match[str]) -> str:
    char = match[0]
    return char if char.isprintable() else json.dumps(char)[1:-1]


def decode(content: bytes, expected: type[Struct], where: str) -> Struct:
    """The document in `content`.

    Raises PartoptError that names `where` and the path of every fault found.
    """
    name = _schema_name(expected)
    document = _decode_known(content, expected, name)
    raw = None if document else _decode_json(content, name, where)
    refuse(content_faults(content, document), where)
    return document or _decode_or_explain(raw, expected, name, where)


def _decode_known(content: bytes, expected: type[Struct], name: str) -> Struct | None:
    """The fast path: the document if it is valid and of this version, else None."""
    try:
        if msgspec.json.decode(content, type=_Head).schema == name:
            return msgspec.json.decode(content, type=expected)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass
    return None


def _decode_json(content: bytes, name: str, where: str) -> object:
    try:
        return msgspec.json.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _malformed(content, str(error), name).at(where) from None


def _decode_or_explain(raw: object, expected: type[Struct], name: str, where: str) -> Struct:
    """The slow path: locate every fault, and drop what a newer minor version may add."""
    newer = _check_schema(raw, name, where)
    refuse(find_faults(raw, expected, "", ignore_unknown=newer), where)
    return msgspec.convert(known_part(raw, expected), expected)


def _kind(schema: str) -> str:
    """`profile` of `partopt.profile/1`."""
    return schema.split("/")[0].removeprefix("partopt.")


def _schema_name(expected: type[msgspec.Struct]) -> str:
    """The current schema of a document type: the default of its first field."""
    field = msgspec.structs.fields(expected)[0]
    default = field.default_factory
    return str(field.default if default is msgspec.NODEFAULT else default())


def _check_schema(raw: object, known: str, where: str) -> bool:
    """Whether `raw` is of a newer minor version than `known`.

    Raises PartoptError where it is not a document of that kind, or is of another major version.
    """
    found = raw.get("schema") if isinstance(raw, dict) else None
    kind = _kind(known)
    if not isinstance(found, str):
        raise PartoptError(
            f'{where}: has no "schema": not a partopt {kind}',
            f'a {kind} begins with {{"schema": "{known}"',
            code="unknown-schema",
            expected=known,
        )
    match, own = _SCHEMA.fullmatch(found), _SCHEMA.fullmatch(known)
    assert own is not None
    if match is None or match["name"] != kind:
        raise PartoptError(
            f'schema: "{found}" is not a partopt {kind}',
            f'a file with "schema": "{known}" is expected here',
            code="unknown-schema",
            found=found,
            expected=known,
        ).at(where)
    if match["major"] != own["major"]:
        raise PartoptError(
            f"{where}: schema: version {match['major']} of {kind} is not known",
            f'this partopt reads "{known}"',
            code="unknown-schema",
            found=found,
            expected=known,
        )
    return int(match["minor"] or 0) > int(own["minor"] or 0)


def _malformed(content: bytes, reason: str, schema: str) -> PartoptError:
    """The error of malformed JSON, with its line and column."""
    kind = _kind(schema)
    expected = f"a partopt {kind} is expected here"
    if "recursion" in reason:
        message = "not JSON that partopt writes: nested too deeply"
        return PartoptError(message, expected, code="malformed-document")
    if not content.strip():
        return PartoptError("the file is empty", expected, code="empty-file")
    if not content.lstrip().startswith(b"{"):
        message = f"not a partopt {kind}: not JSON"
        return PartoptError(message, expected, code="malformed-document")
    offset = re.search(r"byte (\d+)", reason)
    if offset is None:
        return PartoptError(
            f"not JSON: {plain(reason.partition(' - at `$')[0])}",
            "the file may be cut short; write it again",
            code="malformed-document",
        )
    before = content[: int(offset[1])]
    line, column = before.count(b"\n") + 1, len(before) - before.rfind(b"\n")
    what = reason.split(" (byte")[0].removeprefix("JSON is malformed: ")
    return PartoptError(
        f"line {line}, column {column}: not JSON: {what}",
        "JSON has no NaN, Infinity, comments or trailing commas",
        code="malformed-document",
        line=line,
        column=column,
    )
