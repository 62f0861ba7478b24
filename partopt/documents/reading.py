"""How documents are read, checked and written: strict types, versions, deterministic bytes.

A JSON document is a frozen msgspec struct whose first field is its schema, `partopt.<name>/<major>`
or `partopt.<name>/<major>.<minor>`. Unknown fields of a newer minor version are ignored; those of
the version that this partopt knows are refused, with the nearest known name. Every fault is a
PartoptError placed at its path, such as `levels[1].bandwidth`.
"""

from __future__ import annotations

import functools
import json
import math
import os
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Self, TypeVar, cast

import msgspec

from partopt.documents.files import PathLike, read_bytes, write_bytes
from partopt.errors import PartoptError, invalid, unknown
from partopt.printable import cut, printable

Struct = TypeVar("Struct", bound=msgspec.Struct)

READ = "read"  # of the `extra` of a quantity's type: reads its text, raises PartoptError
FORMATS = "docs/formats.md describes the format"
_SCHEMA = re.compile(r"partopt\.(?P<name>[a-z]+)/(?P<major>[0-9]+)(?:\.(?P<minor>[0-9]+))?")
_NOT_ASCII = re.compile("[^\x00-\x7e]")
# What a terminal obeys or hides: control characters, changes of direction, halves of a character.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
# The same in JSON, written as bytes or as an escape; it may also match what is harmless.
_CONTROL_IN_JSON = re.compile(
    rb"\\[bfnrt]|\\u00[0189]|\\u007[fF]|\\u20[26]|\\u[dD]|\x7f|\xc2[\x80-\x9f]"
    rb"|\xe2\x80[\xaa-\xae]|\xe2\x81[\xa6-\xa9]"
)
_WORDS = {  # of msgspec, and ours
    "float": "a number",
    "int": "a whole number",
    "str": "text",
    "bool": "true or false",
    "array": "a list",
}


class StrictStruct(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of every struct in a file: immutable, and strict about its keys."""

    def faults(self) -> Iterator[PartoptError]:
        """Everything that is wrong with it: types and constraints, then inconsistencies.

        Inconsistencies are looked for only where types and constraints hold. msgspec checks what
        it reads and not what a constructor is given: that is checked here.
        """
        found: list[PartoptError] = []
        if not self._reads_back():
            raw = msgspec.to_builtins(self, str_keys=True, enc_hook=repr)
            found = [*find_faults(raw, type(self)), *leaf_faults(raw)]
        yield from found or self.inconsistencies()

    def inconsistencies(self) -> Iterator[PartoptError]:
        """What is wrong with it although every value has the right type."""
        yield from ()

    def _reads_back(self) -> bool:
        """Whether its JSON is the same struct; NaN and infinity become null."""
        try:
            content = msgspec.json.encode(self)
            same = bool(msgspec.json.decode(content, type=type(self)) == self)
            return same and not _CONTROL_IN_JSON.search(content)
        except (msgspec.MsgspecError, TypeError, ValueError, RecursionError):
            return False


class Note(StrictStruct, frozen=True, kw_only=True):
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


class Document(StrictStruct, frozen=True, kw_only=True):
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


def refuse(faults: Iterable[PartoptError], where: str) -> None:
    """Raise all `faults` of a file together, each said to be at `where`, if there are any."""
    found = [fault.at(where) for fault in faults]
    if found:
        raise PartoptError.together(found, file=where)


def fault_at(path: str, what: str, hint: str) -> PartoptError:
    """The fault of a value at `path` that has the right type, and contradicts others."""
    return PartoptError(f"{path}: {what}", hint, code="inconsistent-document", path=path)


def encode(document: msgspec.Struct | dict[str, Any]) -> bytes:
    """Indented JSON in the order of the fields, ending in a newline.

    The same document gives the same bytes. What a terminal obeys or hides is escaped.
    """
    content = msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n"
    if content.isascii() and b"\x7f" not in content:
        return content

    def escape(match: re.Match[str]) -> str:
        return match[0] if match[0].isprintable() else json.dumps(match[0])[1:-1]

    return _NOT_ASCII.sub(escape, content.decode()).encode()


class _Head(msgspec.Struct):
    """What every document begins with."""

    schema: str | None = None


def decode(content: bytes, expected: type[Struct], where: str) -> Struct:
    """The document in `content`.

    Raises PartoptError that names `where` and the path of every fault found.
    """
    field = msgspec.structs.fields(expected)[0]
    schema = str(
        field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
    )
    raw, document = None, None
    unreadable = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
    try:  # at once, where it is valid and of this version
        if msgspec.json.decode(content, type=_Head).schema == schema:
            document = msgspec.json.decode(content, type=expected)
    except unreadable:
        pass
    if document is None:
        try:
            raw = msgspec.json.decode(content)
        except unreadable as error:
            raise _malformed(content, str(error), schema).at(where) from None
    refuse(_content_faults(content, document), where)
    if document is not None:
        return document
    if _is_newer(raw, schema, where):
        raw = _without_unknown(raw, expected)
    refuse(find_faults(raw, expected), where)
    return msgspec.convert(raw, expected)


def check_option(option: str, value: object, expected: Any, hint: str) -> None:
    """Raise PartoptError where `value` is not of the type `expected`, constraints included."""
    for fault in _value_faults(value, expected, ""):
        raise invalid(option, value, fault.message, hint)


def find_faults(raw: object, expected: Any, path: str = "") -> Iterator[PartoptError]:
    """Every way in which plain data differs from the type `expected`, each error at its path."""
    struct = _struct_in(expected)
    item, value = _inside(expected, list), _inside(expected, dict)
    if struct and isinstance(raw, dict):
        inside = list(_key_faults(raw, _fields(struct), path))
        yield from inside or _value_faults(raw, struct, path)
    elif _struct_in(item) and isinstance(raw, list) and raw:
        for index, element in enumerate(raw):
            yield from find_faults(element, item, f"{path}[{index}]")
    elif _struct_in(value) and isinstance(raw, dict) and raw:
        for key, element in raw.items():
            yield from find_faults(element, value, _join(path, str(key)))
    else:
        yield from _value_faults(raw, expected, path)


def leaf_faults(raw: object, path: str = "") -> Iterator[PartoptError]:
    """Control characters in any text, keys given twice, and numbers that are not finite.

    A `text` is a sentence and may have several lines; a name may not.
    """
    if isinstance(raw, dict):
        for key in raw.twice if isinstance(raw, _Object) else ():
            place = printable(_join(path, key))
            what, hint = f"{place}: given twice", "keep one of the two"
            yield PartoptError(what, hint, code="repeated-key", path=place)
        for key, value in raw.items():
            place = printable(_join(path, str(key)))
            yield from _text_faults(str(key), place)
            yield from leaf_faults(value, place)
    elif isinstance(raw, list | tuple):
        for index, value in enumerate(raw):
            yield from leaf_faults(value, f"{path}[{index}]")
    elif isinstance(raw, str):
        yield from _text_faults(raw.replace("\n", "") if path.endswith(".text") else raw, path)
    elif isinstance(raw, float) and not math.isfinite(raw):
        message = f"{path}: {raw} is not a finite number"
        yield PartoptError(message, "JSON has no NaN or infinity", code="not-finite", path=path)


class _Object(dict[str, Any]):
    """A JSON object that may have keys `twice`."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        keys = [key for key, _ in pairs] if len(self) < len(pairs) else []
        self.twice = [key for key in self if keys.count(key) > 1]


def _content_faults(content: bytes, document: object) -> Iterator[PartoptError]:
    """Repeated keys and control characters in valid JSON, which was decoded to `document` if it is.

    No key is repeated where the values, written again, are the same text. That is quick.
    """
    try:
        compact, encode_json = msgspec.json.format(content, indent=-1), msgspec.json.encode
        same = encode_json(document) == compact
        same = same or encode_json(msgspec.json.decode(content)) == compact
        if not same or _CONTROL_IN_JSON.search(content):
            # numbers do not matter here, and a huge whole number is slow to read
            yield from leaf_faults(
                json.loads(content, object_pairs_hook=_Object, parse_int=len, parse_float=len)
            )
    except RecursionError:
        yield PartoptError("nested too deeply", FORMATS, code="malformed-document")


def _text_faults(text: str, path: str) -> Iterator[PartoptError]:
    if found := _CONTROL.search(text):
        message = f"{path}: has the control character {found[0]!r}"
        hint = "use printable characters alone"
        yield PartoptError(message, hint, code="control-character", path=path)


def _key_faults(
    raw: dict[Any, Any], fields: dict[str, msgspec.structs.FieldInfo], path: str
) -> Iterator[PartoptError]:
    """Unknown and missing keys of a mapping, and the faults of its values."""
    for key in raw:
        if key not in fields:
            place = _join(path, str(key))
            yield unknown(f"{place}: unknown key", key, fields, code="unknown-key", path=place)
    for key, field in fields.items():
        place = _join(path, key)
        if key in raw:
            yield from find_faults(raw[key], field.type, place)
        elif field.required:
            yield PartoptError(f"{place}: missing", FORMATS, code="missing-key", path=place)


def _value_faults(raw: object, expected: Any, path: str) -> Iterator[PartoptError]:
    """The first fault that msgspec finds, in partopt's words: `expected a number, found text`."""
    try:
        msgspec.convert(raw, expected)
    except msgspec.ValidationError as error:
        what, _, inner = str(error).partition(" - at `$")
        place = f"{path}{inner.rstrip('`')}"
        message = f"{place}: {_plain(what)}".removeprefix(": ")
        yield PartoptError(message, FORMATS, code="invalid-value", path=place)
        return
    except UnicodeEncodeError:  # half of a surrogate pair, which YAML may say
        message = f"{path}: a character that is none"
        yield PartoptError(message, FORMATS, code="invalid-value", path=path)
        return
    if (read := _reader_in(expected)) and raw is not None:
        try:
            read(raw)
        except PartoptError as error:
            yield error.at(path)


def _plain(what: str) -> str:
    what = what.replace("Object missing required field", "missing").replace("`", "")
    for word, words in _WORDS.items():
        what = re.sub(rf"\b{word}\b", words, what)
    return what[:1].lower() + what[1:].replace(", got ", ", found ").replace("object", "a mapping")


def _without_unknown(raw: Any, expected: Any) -> Any:
    """`raw` without the keys that the struct `expected`, or a struct in it, does not have."""
    struct, item = _struct_in(expected), _inside(expected, list)
    if struct and isinstance(raw, dict):
        types_of = {key: field.type for key, field in _fields(struct).items()}
        return {
            key: _without_unknown(value, types_of[key])
            for key, value in raw.items()
            if key in types_of
        }
    if item is not None and isinstance(raw, list):
        return [_without_unknown(element, item) for element in raw]
    return raw


def _struct_in(expected: Any) -> type[msgspec.Struct] | None:
    """The struct that a type is, without its constraints, or the one in `Struct | None`."""
    if isinstance(expected, type):
        return expected if issubclass(expected, msgspec.Struct) else None
    inside = typing.get_args(expected)
    if typing.get_origin(expected) is typing.Annotated:
        return _struct_in(inside[0])
    if typing.get_origin(expected) in (typing.Union, types.UnionType):
        return next(filter(None, map(_struct_in, inside)), None)
    return None


def _reader_in(expected: Any) -> Callable[[Any], float] | None:
    """What reads the quantity that a type is, in SI units; None where it is none."""
    if typing.get_origin(expected) in (typing.Union, types.UnionType):
        return next(filter(None, map(_reader_in, typing.get_args(expected))), None)
    for meta in getattr(expected, "__metadata__", ()):
        if isinstance(meta, msgspec.Meta) and meta.extra:
            return cast(Callable[[Any], float], meta.extra[READ])
    return None


def _inside(expected: Any, container: type) -> Any:
    """The type of a list's items or of a mapping's values, without its constraints; else None."""
    if typing.get_origin(expected) is typing.Annotated:
        expected = typing.get_args(expected)[0]
    return typing.get_args(expected)[-1] if typing.get_origin(expected) is container else None


@functools.cache
def _fields(struct: type[msgspec.Struct]) -> dict[str, msgspec.structs.FieldInfo]:
    return {field.encode_name: field for field in msgspec.structs.fields(struct)}


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _is_newer(raw: object, known: str, where: str) -> bool:
    """Whether `raw` is of a newer minor version than `known`.

    Raises PartoptError where it is not a document of that kind, or is of another major version.
    """
    found, expected = raw.get("schema") if isinstance(raw, dict) else None, _SCHEMA.fullmatch(known)
    assert expected is not None
    kind, match = expected["name"], _SCHEMA.fullmatch(found) if isinstance(found, str) else None
    if not isinstance(found, str):
        message = f'{where}: has no "schema": not a partopt {kind}'
        hint = f'a {kind} begins with {{"schema": "{known}"'
    elif match is None or match["name"] != kind:
        message = f"{where}: " + cut(f'schema: "{found}" is not a partopt {kind}')
        hint = f'a file with "schema": "{known}" is expected here'
    elif match["major"] != expected["major"]:
        message = f"{where}: schema: version {match['major']} of {kind} is not known"
        hint = f'this partopt reads "{known}"'
    else:
        return int(match["minor"] or 0) > int(expected["minor"] or 0)
    raise PartoptError(message, hint, code="unknown-schema")


def _malformed(content: bytes, reason: str, schema: str) -> PartoptError:
    """The error of malformed JSON, with its line and column."""
    kind = schema.split("/")[0].removeprefix("partopt.")
    code, fields = "malformed-document", dict[str, Any]()
    hint = f"a partopt {kind} is expected here"
    offset = re.search(r"byte (\d+)", reason)
    if "recursion" in reason:
        message = "not JSON that partopt writes: nested too deeply"
    elif not content.strip():
        message, code = "the file is empty", "empty-file"
    elif not content.lstrip().startswith(b"{"):
        message = f"not a partopt {kind}: not JSON"
    elif offset is None:
        message = f"not JSON: {_plain(reason.partition(' - at `$')[0])}"
        hint = "the file may be cut short; write it again"
    else:
        before = content[: int(offset[1])]
        line, column = before.count(b"\n") + 1, len(before) - before.rfind(b"\n")
        what = reason.split(" (byte")[0].removeprefix("JSON is malformed: ")
        message = f"line {line}, column {column}: not JSON: {what}"
        hint = "JSON has no NaN, Infinity, comments or trailing commas"
        fields = {"line": line, "column": column}
    return PartoptError(message, hint, code=code, **fields)
