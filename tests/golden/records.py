"""Documents beside what was recorded of them: the values that differ, by their paths."""

import math


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
