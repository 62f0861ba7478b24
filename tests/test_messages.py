"""What partopt says: every error has a code, and only the command line speaks in flags."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.helpers import ROOT

MODULES = sorted((ROOT / "partopt").rglob("*.py"))
FLAG = re.compile(r"(?<![\w-])--[a-z]")
COMMAND = re.compile(
    r"\bpartopt (plan|simulate|compare|profile|show|import|export|topology|schema)\b"
)


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def calls_of(tree: ast.AST, name: str) -> list[ast.Call]:
    return [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name
    ]


@pytest.mark.parametrize("path", MODULES, ids=named)
def test_every_error_has_a_code(path):
    missing = [
        f"{named(path)}:{call.lineno}"
        for call in calls_of(ast.parse(path.read_text()), "PartoptError")
        if not any(keyword.arg == "code" for keyword in call.keywords)
    ]
    assert missing == []


def spoken(tree: ast.AST) -> list[tuple[int, str]]:
    """Strings and parts of strings that are not docstrings, with their lines."""
    documented = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    return [
        (node.lineno, node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and id(node) not in documented
    ]


# the command line, and those of trainers
OF_FLAGS = {"cli", "trainers"}


@pytest.mark.parametrize(
    "path", [path for path in MODULES if not OF_FLAGS & {*path.parts}], ids=named
)
def test_only_the_command_line_speaks_in_flags(path):
    found = [
        f"{named(path)}:{line}: {text}"
        for line, text in spoken(ast.parse(path.read_text()))
        if FLAG.search(text) or COMMAND.search(text)
    ]
    assert found == []
