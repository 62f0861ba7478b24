"""Reading and writing partopt's files: strict types, errors that name the place, deterministic bytes, nothing half-written.

A JSON document is a frozen msgspec struct whose first field is its schema, `partopt.<name>/<major>` or `partopt.<name>/<major>.<minor>`.
Unknown fields of a newer minor version are ignored; those of the version that this partopt knows are refused, with the nearest known name.
"""

from __future__ import annotations

import functools
import os
import re
import stat
import sys
import tempfile
import types
import typing
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from partopt.errors import PartoptError, did_you_mean

Document = TypeVar("Document", bound=msgspec.Struct)


Check = Callable[[Document], Iterable[PartoptError]]  # what types cannot say of a document


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of every struct in a file: immutable, and strict about its keys."""


class _Head(msgspec.Struct):
    """What every document begins with."""

    schema: str | None = None


_FORMATS = "docs/formats.md describes the format, partopt schema prints it"
_SCHEMA = re.compile(r"partopt\.(?P<name>[a-z]+)/(?P<major>[0-9]+)(?:\.(?P<minor>[0-9]+))?")


def read_bytes(path: str) -> bytes:
    """The content of the file `path`, or of standard input where it is `-`."""
    if path == "-":
        return sys.stdin.buffer.read()
    try:
        return Path(path).read_bytes()
    except IsADirectoryError:
        raise PartoptError(f"{path}: is a directory", "name a file in it") from None
    except FileNotFoundError:
        raise PartoptError(f"{path}: no such file", "check the path, or list what is there with ls") from None
    except OSError as error:
        raise PartoptError(f"{path}: cannot be read: {error.strerror}", "check the permissions") from None


def write_bytes(path: str, content: bytes, force: bool = False) -> None:
    """Write `content` to the file `path` (`-` is standard output) whole or not at all; an existing file only with `force`."""
    if path == "-":
        sys.stdout.buffer.write(content)
        sys.stdout.buffer.flush()
        return
    check_writable(path, force)
    try:
        if stat.S_ISREG(_mode(path) or stat.S_IFREG):
            _replace(Path(path).resolve(), content)
        else:
            Path(path).write_bytes(content)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise PartoptError(f"{path}: cannot be written: {error.strerror}", "choose another place") from None


def check_writable(path: str, force: bool = False) -> None:
    """Refuse, before any work is done, an output path that could not be written at the end. Pipes and devices are written as they are."""
    if path == "-":
        return
    folder, mode = Path(path).parent, _mode(path)
    if stat.S_ISDIR(mode):
        raise PartoptError(f"{path}: is a directory", "name a file in it")
    if stat.S_ISREG(mode) and not force:
        raise PartoptError(f"{path}: already exists", "add --force to replace it")
    if not folder.is_dir():
        raise PartoptError(f"{path}: the folder {folder} does not exist", f"make it first: mkdir -p {folder}")
    if not mode and not os.access(folder, os.W_OK):
        raise PartoptError(f"{path}: the folder {folder} cannot be written to", "choose another folder")


def _mode(path: str) -> int:
    """Kind and permissions of the file at `path`; 0 where there is none."""
    try:
        return Path(path).stat().st_mode
    except FileNotFoundError:
        return 0
    except OSError as error:
        raise PartoptError(f"{path}: cannot be written: {error.strerror}", "choose another place") from None


def _replace(target: Path, content: bytes) -> None:
    """Write `content` beside `target` and put it in its place at once; where that fails, leave nothing behind."""
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=".partopt.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        Path(temporary).chmod(0o666 & ~_umask())
        Path(temporary).replace(target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def load(path: str, expected: type[Document], check: Check[Document]) -> Document:
    """Read the document in the file `path` (`-` is standard input). Raises PartoptError with every fault found."""
    return parse(read_bytes(path), expected, check, path)


def parse(content: bytes, expected: type[Document], check: Check[Document], where: str) -> Document:
    """The document in `content`, its types and then its meaning checked; `where` names it in errors."""
    document = decode(content, expected, where)
    refuse(check(document), where)
    return document


def save(document: Document, check: Check[Document], path: str, force: bool = False) -> None:
    """Check `document` and write it to `path`, whole or not at all."""
    refuse(check(document), path)
    write_bytes(path, encode(document), force)


def refuse(faults: Iterable[PartoptError], where: str) -> None:
    """Raise all of `faults` at once, placed at `where`; nothing where there are none."""
    found = [fault.at(where) for fault in faults]
    if found:
        raise PartoptError.together(found)


def encode(document: msgspec.Struct) -> bytes:
    """Indented JSON in the order of the fields, ending in a newline: the same document gives the same bytes."""
    return msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n"


def decode(content: bytes, expected: type[Document], where: str) -> Document:
    """The document in `content`, or a PartoptError that names `where` and the path of every fault found."""
    name = _schema_name(expected)
    try:
        if msgspec.json.decode(content, type=_Head).schema == name:
            return msgspec.json.decode(content, type=expected)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass
    return _decode_or_explain(content, expected, name, where)


def _decode_or_explain(content: bytes, expected: type[Document], name: str, where: str) -> Document:
    """The slow way in, which knows the place of every fault and what a newer minor version may add."""
    try:
        raw = msgspec.json.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _malformed(content, str(error), name).at(where) from None
    newer = _check_schema(raw, name, where)
    refuse(find_faults(raw, expected, "", ignore_unknown=newer), where)
    return msgspec.convert(_known_part(raw, expected), expected)


def find_faults(raw: object, expected: Any, path: str, ignore_unknown: bool = False) -> Iterator[PartoptError]:
    """Every way in which plain data differs from the type `expected`, each error placed at its path."""
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
    """The first way in which `raw` as a whole differs from `expected`: what the types of its parts cannot say is said here."""
    try:
        msgspec.convert(raw, expected)
    except msgspec.ValidationError as error:
        what, _, inner = str(error).partition(" - at `$")
        yield PartoptError(f"{path}{inner.rstrip('`')}: {_plain(what)}".removeprefix(": "), _FORMATS)


def _known_part(raw: Any, expected: Any) -> Any:
    """`raw` without the keys that the struct `expected`, or a struct in it, does not have."""
    bare = _without_constraints(expected)
    if _is_struct(bare) and isinstance(raw, dict):
        hints = _hints(bare)
        return {key: _known_part(value, hints[key]) for key, value in raw.items() if key in hints}
    if typing.get_origin(bare) is list:
        return [_known_part(element, typing.get_args(bare)[0]) for element in raw]
    return raw


def _struct_faults(raw: dict[Any, Any], expected: type[msgspec.Struct], path: str, ignore_unknown: bool) -> Iterator[PartoptError]:
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
    return structs[0] if typing.get_origin(expected) in (typing.Union, types.UnionType) and structs else expected


def _schema_name(expected: type[msgspec.Struct]) -> str:
    """The current schema of a document type: the default of its first field."""
    return str(msgspec.structs.fields(expected)[0].default)


def _check_schema(raw: object, known: str, where: str) -> bool:
    """Whether `raw` is of a newer minor version than `known`; PartoptError where it is not a document of that kind at all."""
    found = raw.get("schema") if isinstance(raw, dict) else None
    kind = known.split("/")[0].removeprefix("partopt.")
    if not isinstance(found, str):
        raise PartoptError(f'{where}: has no "schema": not a partopt {kind}', f'a {kind} begins with {{"schema": "{known}"')
    match, own = _SCHEMA.fullmatch(found), _SCHEMA.fullmatch(known)
    assert own is not None
    if match is None or match["name"] != kind:
        raise PartoptError(f'{where}: schema: "{found}" is not a partopt {kind}', f'a file with "schema": "{known}" is expected here')
    if match["major"] != own["major"]:
        raise PartoptError(f"{where}: schema: version {match['major']} of {kind} is not known", f'this partopt reads "{known}"')
    return int(match["minor"] or 0) > int(own["minor"] or 0)


def _malformed(content: bytes, reason: str, schema: str) -> PartoptError:
    """Say where JSON stops being JSON, as line and column."""
    kind = schema.split("/")[0].removeprefix("partopt.")
    if "recursion" in reason:
        return PartoptError("not JSON that partopt writes: nested too deeply", f"a partopt {kind} is expected here")
    if not content.strip():
        return PartoptError("the file is empty", f"a partopt {kind} is expected here")
    offset = re.search(r"byte (\d+)", reason)
    if offset is None:
        return PartoptError(f"not JSON: {_plain(reason.partition(' - at `$')[0])}", "is the file whole? write it anew")
    before = content[: int(offset[1])]
    line, column = before.count(b"\n") + 1, len(before) - before.rfind(b"\n")
    what = reason.split(" (byte")[0].removeprefix("JSON is malformed: ")
    return PartoptError(f"line {line}, column {column}: not JSON: {what}", "JSON knows no NaN, Infinity, comments or trailing commas")


def _plain(what: str) -> str:
    """A msgspec message in partopt's words: `expected a number, found text`."""
    what = what.replace("Object missing required field", "missing").replace("`", "")
    for word, plain in (("float", "a number"), ("int", "a whole number"), ("str", "text"), ("bool", "true or false"), ("array", "a list")):
        what = re.sub(rf"\b{word}\b", plain, what)
    return what[:1].lower() + what[1:].replace(", got ", ", found ").replace("object", "a mapping")


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
