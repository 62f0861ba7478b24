"""YAML as people write it: read without its traps, with units on its quantities."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import yaml

from partopt.documents.reading import READ, Struct, find_faults, leaf_faults, refuse
from partopt.errors import PartoptError
from partopt.printable import printable
from partopt.units import format_bytes

_MOST_BYTES, _MOST_VALUES = 10**6, 20_000  # of a file that people write; a second to read
_NUMBERS = {"int": r"[-+]?[0-9]+$", "float": r"[-+]?([0-9]+\.[0-9]*|\.[0-9]+)$"}


class _Loader(yaml.SafeLoader):
    """YAML's safe loader, but `16:30`, `0x10` and dates are text, and repeated keys are `faults`.

    Refused are more than `_MOST_VALUES` values, those that an alias repeats counted each time.
    """

    yaml_implicit_resolvers = {
        first: [
            (tag, pattern)
            for tag, pattern in resolvers
            if tag.rpartition(":")[2] not in (*_NUMBERS, "timestamp")
        ]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def __init__(self, stream: bytes) -> None:
        super().__init__(stream)
        self.values, self.faults = 0, list[PartoptError]()
        self.values_in: dict[yaml.Node, int] = {}  # of each node that is complete

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        before = self.values
        node = super().compose_node(parent, index)
        if node is None:
            return None
        self.values += self.values_in.get(node, 1)
        self.values_in.setdefault(node, self.values - before)
        if self.values > _MOST_VALUES:
            what = f"more than {_MOST_VALUES:,} values"
            raise yaml.composer.ComposerError(None, None, what, node.start_mark)
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if str(key.value) in seen:
                what = f'{_place(key.start_mark)}the key "{key.value}" is given twice'
                fault = PartoptError(printable(what), "keep one of the two", code="repeated-key")
                self.faults.append(fault)
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


for _tag, _pattern in _NUMBERS.items():
    _Loader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}", re.compile(_pattern), list("-+.0123456789")
    )


def read_mapping(
    content: bytes,
    kind: str,
    expected: type[Struct],
    where: str,
    inconsistencies: Callable[[dict[str, Any]], Iterable[PartoptError]],
) -> Struct:
    """The file of the `kind` that a YAML text is, which `where` names in errors.

    Raises PartoptError for malformed YAML, for what is no such file, and with every other fault:
    keys, types, quantities, and `inconsistencies` of what was read, whose types may be wrong.
    """
    if len(content) > _MOST_BYTES:
        raise _malformed(f"more than {format_bytes(_MOST_BYTES)} of YAML").at(where)
    try:
        loader = _Loader(content)
        raw: object = loader.get_single_data()
    except yaml.reader.ReaderError as error:
        what = f"not YAML: {error.reason} at position {error.position}"
        raise _malformed(what).at(where) from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = printable(str(getattr(error, "problem", None) or error))
        raise _malformed(f"{_place(mark)}not YAML: {problem}").at(where) from None
    # raised by PyYAML itself: `!!int x`, lists nested without end
    except (ValueError, RecursionError) as error:
        raise _malformed(f"not YAML that partopt reads: {error}").at(where) from None
    faults = loader.faults
    with contextlib.suppress(RecursionError):  # a list nested in itself, which the types refuse
        faults += leaf_faults(raw)
    required = {field.name for field in msgspec.structs.fields(expected) if field.required}
    if not isinstance(raw, dict) or not required & raw.keys():
        raise PartoptError.together([*faults, _malformed(f"not a {kind}").at(where)], file=where)
    refuse([*faults, *find_faults(raw, expected), *inconsistencies(raw)], where)
    return msgspec.convert(raw, expected)


def read_by(parse: Callable[[Any], float]) -> msgspec.Meta:
    """Of a type: what is written so is a quantity that `parse` reads."""
    return msgspec.Meta(extra={READ: parse})


def positive(parse: Callable[[Any], float]) -> Callable[[Any], float]:
    """Reads a quantity as `parse` does, which may not be zero."""

    def read(given: Any) -> float:
        value = float(parse(given))
        if value:
            return value
        hint = "write what the device or the link really has"
        raise PartoptError(f"'{given}' is zero", hint, code="invalid-value")

    return read


def _malformed(message: str) -> PartoptError:
    return PartoptError(message, "see docs/formats.md for an example", code="malformed-document")


def _place(mark: yaml.Mark | None) -> str:
    return f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
