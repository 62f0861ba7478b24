"""YAML as people write it, read without its traps."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import yaml

from partopt.documents.faults import find_faults, leaf_faults
from partopt.documents.structs import Struct, refuse
from partopt.errors import PartoptError
from partopt.printable import printable
from partopt.units import format_bytes

_MOST_BYTES, _MOST_VALUES = 10**6, 20_000  # of a file that people write; a second to read


class _Loader(yaml.SafeLoader):
    """YAML's safe loader, but `16:30`, `0x10` and dates are text, and repeated keys are refused.

    So are more than `_MOST_VALUES` values, those that an alias repeats counted each time.
    """

    def __init__(self, stream: bytes) -> None:
        super().__init__(stream)
        self.values = 0
        self.values_in: dict[yaml.Node, int] = {}  # of each node that is complete

    yaml_implicit_resolvers = {
        first: [
            (tag, pattern)
            for tag, pattern in resolvers
            if tag.rpartition(":")[2] not in ("int", "float", "timestamp")
        ]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        before = self.values
        node = super().compose_node(parent, index)
        if node is None:
            return None
        self.values += self.values_in.get(node, 1)
        self.values_in.setdefault(node, self.values - before)
        if self.values > _MOST_VALUES:
            raise yaml.composer.ComposerError(
                None, None, f"more than {_MOST_VALUES:,} values", node.start_mark
            )
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if str(key.value) in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f'the key "{key.value}" is given twice', key.start_mark
                )
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:int", re.compile(r"[-+]?[0-9]+$"), list("-+0123456789")
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?([0-9]+\.[0-9]*|\.[0-9]+)$"), list("-+.0123456789")
)


def read_yaml(content: bytes, where: str) -> object:
    """The plain data in a YAML text, which `where` names in errors.

    Raises PartoptError for malformed YAML, repeated keys and control characters.
    """
    if len(content) > _MOST_BYTES:
        raise malformed(f"more than {format_bytes(_MOST_BYTES)} of YAML").at(where)
    try:
        raw: object = yaml.load(content, _Loader)
    except yaml.YAMLError as error:
        raise _not_yaml(error).at(where) from None
    # raised by PyYAML itself: `!!int x`, lists nested without end
    except (ValueError, RecursionError) as error:
        raise malformed(f"not YAML that partopt reads: {error}").at(where) from None
    refuse(_text_faults(raw), where)
    return raw


def read_mapping(content: bytes, kind: str, expected: type[Struct], where: str) -> Struct:
    """The file of the `kind` that a YAML text is, which `where` names in errors.

    Raises PartoptError with every way in which its types differ, or for what is no such file.
    """
    raw = read_yaml(content, where)
    required = {field.name for field in msgspec.structs.fields(expected) if field.required}
    if not isinstance(raw, dict) or not required & raw.keys():
        raise malformed(f"not a {kind}").at(where)
    refuse(find_faults(raw, expected, ""), where)
    return msgspec.convert(raw, expected)


def malformed(message: str) -> PartoptError:
    """The error of a text that partopt cannot read."""
    return PartoptError(message, "see docs/formats.md for an example", code="malformed-document")


def _text_faults(raw: object) -> list[PartoptError]:
    """Control characters; none where a list is nested in itself, which the types refuse."""
    try:
        return list(leaf_faults(raw))
    except RecursionError:
        return []


def _not_yaml(error: yaml.YAMLError) -> PartoptError:
    if isinstance(error, yaml.reader.ReaderError):
        return malformed(f"not YAML: {error.reason} at position {error.position}")
    mark = getattr(error, "problem_mark", None)
    place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
    problem = printable(str(getattr(error, "problem", None) or error))
    return malformed(f"{place}not YAML: {problem}")
