"""YAML as people write it: read without its traps, with units on its quantities."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from typing import Any

import msgspec
import yaml

from partopt.documents.reading import Struct, find_faults, leaf_faults, refuse
from partopt.errors import PartoptError
from partopt.printable import printable
from partopt.units import format_bytes

_MOST_BYTES, _MOST_VALUES = 10**6, 20_000  # of a file that people write; a second to read
_NUMBERS = {"int": r"[-+]?[0-9]+$", "float": r"[-+]?([0-9]+\.[0-9]*|\.[0-9]+)$"}


class _Loader(yaml.SafeLoader):
    """YAML's safe loader, but `16:30`, `0x10` and dates are text, and repeated keys are refused.

    So are more than `_MOST_VALUES` values, those that an alias repeats counted each time.
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
        self.values = 0
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
                what = f'the key "{key.value}" is given twice'
                raise yaml.constructor.ConstructorError(None, None, what, key.start_mark)
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


for _tag, _pattern in _NUMBERS.items():
    _Loader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}", re.compile(_pattern), list("-+.0123456789")
    )


def read_mapping(content: bytes, kind: str, expected: type[Struct], where: str) -> Struct:
    """The file of the `kind` that a YAML text is, which `where` names in errors.

    Raises PartoptError for malformed YAML, for what is no such file, and with every way in which
    its types differ.
    """
    if len(content) > _MOST_BYTES:
        raise _malformed(f"more than {format_bytes(_MOST_BYTES)} of YAML").at(where)
    try:
        raw: object = yaml.load(content, _Loader)
    except yaml.reader.ReaderError as error:
        what = f"not YAML: {error.reason} at position {error.position}"
        raise _malformed(what).at(where) from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        problem = printable(str(getattr(error, "problem", None) or error))
        raise _malformed(f"{place}not YAML: {problem}").at(where) from None
    # raised by PyYAML itself: `!!int x`, lists nested without end
    except (ValueError, RecursionError) as error:
        raise _malformed(f"not YAML that partopt reads: {error}").at(where) from None
    faults: list[PartoptError] = []
    with contextlib.suppress(RecursionError):  # a list nested in itself, which the types refuse
        faults = list(leaf_faults(raw))
    refuse(faults, where)
    required = {field.name for field in msgspec.structs.fields(expected) if field.required}
    if not isinstance(raw, dict) or not required & raw.keys():
        raise _malformed(f"not a {kind}").at(where)
    refuse(find_faults(raw, expected), where)
    return msgspec.convert(raw, expected)


class Quantities:
    """Reads quantities in SI units; what is wrong with them is gathered in `faults`."""

    def __init__(self) -> None:
        self.faults: list[PartoptError] = []

    def read(
        self, parse: Callable[[object], float], given: object, path: str, zero: bool = False
    ) -> Any:
        """The quantity that is `given` at `path`, which may be 0 where `zero` says so.

        It is UNSET where None is given. Where it is faulty it is 1, so that the rest of the file is
        checked.
        """
        if given is None:
            return msgspec.UNSET
        try:
            value = float(parse(given))
            if value or zero:
                return value
            hint = "write what the device or the link really has"
            raise PartoptError(f"'{given}' is zero", hint, code="invalid-value", path=path)
        except PartoptError as error:
            self.faults.append(error.at(path))
        return 1.0


def _malformed(message: str) -> PartoptError:
    return PartoptError(message, "see docs/formats.md for an example", code="malformed-document")
