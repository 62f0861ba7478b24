"""Documents beside what was recorded of them: the values that differ, by their paths."""

import hashlib
import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Collection
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest

LONG = 60  # characters: more are recorded as a digest


def record_test(
    path: Path, cases: Collection[str], find: Callable[[str], object]
) -> Callable[[str, pytest.FixtureRequest], None]:
    """A test that what is found of every case is what a file has of it, a line each.

    With `--update` the file is written anew first.
    """

    @cache
    def recorded(update: bool) -> dict[str, Any]:
        if update:
            found = ({"case": case, "found": find(case)} for case in cases)
            path.write_text("".join(json.dumps(line) + "\n" for line in found))
        each = map(json.loads, path.read_text().splitlines())
        return {line["case"]: line["found"] for line in each}

    @pytest.mark.parametrize("case", cases)
    def test(case: str, request: pytest.FixtureRequest) -> None:
        expected = recorded(request.config.getoption("--update"))[case]
        assert differences(find(case), expected) == {}

    return test


def condensed(document: object) -> dict[str, object]:
    """The values of a document by their paths, without places in lists.

    Of numbers there are how many, their sum, and their sum weighed by their places; of long texts
    a digest.
    """
    values = defaultdict[str, list[Any]](list)
    for path, value in leaves(msgspec.to_builtins(document)).items():
        place = re.sub(r"\[\d+\]", "[]", path)
        values[f"{place} {type(value).__name__}"].append(value)
    return {path: _together(own) for path, own in values.items()}


def beside(found: dict[str, object], first: dict[str, object]) -> dict[str, object]:
    """What is found at paths where the first has something else, or nothing."""
    return {path: value for path, value in found.items() if value != first.get(path)}


def _together(values: list[Any]) -> object:
    if isinstance(values[0], int | float):
        weighed = sum((n + 1) * value for n, value in enumerate(values))
        return _rounded([len(values), sum(values), weighed] if len(values) > 1 else values)
    text = " ".join(map(str, values))
    return text if len(text) <= LONG else hashlib.sha256(text.encode()).hexdigest()[:12]


def _rounded(numbers: list[float]) -> list[float]:
    return [float(f"{own:.12g}") if isinstance(own, float) else own for own in numbers]


def differences(found, expected):
    """What is found and what is expected where they differ; floats only by more than rounding."""
    found, expected = leaves(found), leaves(expected)
    return {
        path: (found.get(path), expected.get(path))
        for path in found | expected
        if not (path in found and path in expected and _same(found[path], expected[path]))
    }


def leaves(node, path=""):
    """The values in a document by their paths."""
    if isinstance(node, dict):
        return {
            p: v for key, value in node.items() for p, v in leaves(value, f"{path}.{key}").items()
        }
    if isinstance(node, list) and node:
        return {
            p: v for n, value in enumerate(node) for p, v in leaves(value, f"{path}[{n}]").items()
        }
    return {path: node}


def _same(found, expected):
    if isinstance(expected, float) and isinstance(found, float):
        return math.isclose(found, expected, rel_tol=1e-9, abs_tol=1e-15)
    return bool(found == expected)
